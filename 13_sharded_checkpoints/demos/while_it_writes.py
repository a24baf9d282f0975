"""Show that training continues while a checkpoint is written, and what is written.

torchrun --standalone --nproc-per-node=2 \
13_sharded_checkpoints/demos/while_it_writes.py FOLDER

The disk is slow: no rank writes its file before three more steps have been taken.
"""

import gc
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asynchronous_saves import AsynchronousSaves
from asynchronous_saves import PublishingWriter

may_write = threading.Event()


class SlowWriter(PublishingWriter):
    def write_data(self, plan, planner):
        may_write.wait()
        return super().write_data(plan, planner)


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(folder):
    torch.manual_seed(0)
    model, inputs = nn.Linear(64, 64), torch.randn(8, 64)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    saves = AsynchronousSaves(timedelta(seconds=60), SlowWriter)
    path, weights = folder / "step-000000003", {}
    for step in range(1, 7):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights[step] = model.weight.to_local().clone()
        log(f"step {step} is done; {path.name} exists: {path.exists()}")
        if step == 3:
            saves.begin(model.state_dict(), path, identity={}, keep=2)
            log("async_save has returned")
        dist.barrier()
    may_write.set()
    saves.wait()
    dist.barrier()
    log(f"the save has ended; {path.name} exists: {path.exists()}")
    loaded = {"app": model.state_dict()}
    dcp.load(loaded, checkpoint_id=path)
    (step,) = [
        n for n in weights if loaded["app"]["weight"].to_local().equal(weights[n])
    ]
    log(f"it holds the weights of step {step}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    gc.collect()
    dist.destroy_process_group()
