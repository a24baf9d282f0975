"""Measure what each of four ranks holds and writes for a checkpoint.

torchrun --standalone --nproc-per-node=4 13_sharded_checkpoints/demos/gathered.py

It compares stage 12, where rank 0 gathers the whole state, with stage 13.
"""

import gc
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from harness.counting import Collectives
from harness.counting import size


def make():
    """Return a sharded GPT and its AdamW, which has taken a step."""
    torch.manual_seed(0)
    model = GPT(256, 32, width=256, depth=4)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (2, 32))
    logits = model(tokens).flatten(0, 1)
    nn.functional.cross_entropy(logits, tokens.flatten()).backward()
    optimizer.step()
    return model, optimizer


def written(state):
    """Return the bytes that this process has of a state."""
    return size(filter(torch.is_tensor, tree_leaves(state)))


def gathered(collectives):
    """Return the bytes of what this process has got from all-gathers."""
    return sum(whole for name, *_, whole in collectives.seen if name == "all_gather")


def row(name, number):
    """Print a number of bytes of each rank."""
    numbers = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number / 2**20]))
    if dist.get_rank() == 0:
        print(f"{name:30}" + "".join(f"{float(each):8.1f}" for each in numbers))


def main(folder):
    model, optimizer = make()
    if dist.get_rank() == 0:
        print("MiB on rank                          0       1       2       3")
    with Collectives() as collectives:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_state_dict(model, optimizer, options=whole)
    row("stage 12: gathered", gathered(collectives))
    row("stage 12: state to write", written(full))
    with Collectives() as collectives:
        shards = get_state_dict(model, optimizer)
        state = {"model": shards[0], "optimizer": shards[1]}
        dcp.save(state, checkpoint_id=folder)
    row("stage 13: gathered", gathered(collectives))
    row("stage 13: state to write", written(shards))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # rank 0's
        main(folders[0])
        dist.barrier()
    gc.collect()
    dist.destroy_process_group()
