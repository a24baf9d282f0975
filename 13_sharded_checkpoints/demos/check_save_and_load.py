"""Check the two functions of an exercise, in a group of one process."""

import shutil
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from common.gpt import GPT


def make(seed, lr):
    """Return a sharded GPT and its AdamW."""
    torch.manual_seed(seed)
    model = fully_shard(GPT(256, 8), mesh=dist.init_device_mesh("cpu", (1,)))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def check(save, load, folder):
    """Raise an AssertionError that says what a function does not do."""
    shutil.rmtree(folder, ignore_errors=True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        save_into_and_load(save, load, folder)
    except dcp.CheckpointException as error:  # a BaseException
        raise AssertionError(str(error).splitlines()[-1]) from error
    finally:
        dist.destroy_process_group()


def save_into_and_load(save, load, folder):
    model, optimizer = make(0, lr=0.5)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    names = []
    finish = dcp.FileSystemWriter.finish

    def note_name_and_finish(self, *args, **kwargs):
        names.append(self.path.name)
        return finish(self, *args, **kwargs)

    with mock.patch.object(dcp.FileSystemWriter, "finish", note_name_and_finish):
        save(model, optimizer, folder)
    assert (folder / ".metadata").exists(), "save has not written folder/.metadata"
    assert folder.name not in names, "folder had its name before it was complete"
    other, fresh = make(1, lr=0.001)
    load(other, fresh, folder)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.full_tensor().equal(two.full_tensor()), "the weights are different"
    assert fresh.state, "the fresh optimizer has no state"
    states = zip(optimizer.state.values(), fresh.state.values(), strict=True)
    for one, two in states:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            same = (one[key] - two[key]).abs().max().item() == 0
            assert same, f"the optimizer's {key} is different"
    rate = fresh.param_groups[0]["lr"]
    assert rate == 0.5, f"the optimizer's learning rate is {rate}, and was saved as 0.5"
