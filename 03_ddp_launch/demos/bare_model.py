"""Train by calling the wrapper, and by calling the model inside it.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/bare_model.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
images = torch.randn(12, 8, generator=generator)
target = torch.arange(12) % 3
shard = slice(rank, None, world_size)


def train(called, model):
    """Take 20 steps; return the last loss, and how far the ranks' weights differ."""
    for _ in range(20):
        model.zero_grad()
        loss = nn.functional.cross_entropy(called(images[shard]), target[shard])
        loss.backward()
        for weight in model.parameters():
            weight.data -= 0.1 * weight.grad
    of_rank_0 = model.weight.data.clone()
    dist.broadcast(of_rank_0, src=0)
    return loss.item(), (model.weight - of_rank_0).abs().max().item()


for way in ("wrapped(images)", "model(images)", "wrapped.module(images)"):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    wrapped = nn.parallel.DistributedDataParallel(model)
    ways = {"wrapped(images)": wrapped, "model(images)": model}
    results = [None] * world_size
    dist.all_gather_object(results, train(ways.get(way, wrapped.module), model))
    if rank == 0:
        losses, differences = zip(*results, strict=True)
        print(f"{way:22} losses", *(f"{loss:.2f}" for loss in losses), end="  ")
        print(f"the ranks' weights differ by {max(differences):.1e}", flush=True)
        assert (max(differences) == 0) == (way == "wrapped(images)")
del wrapped, ways
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
