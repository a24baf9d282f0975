"""Batch norm's running mean on two ranks: whose images it has seen, and when.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/batch_norm.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
norm = nn.BatchNorm1d(1, momentum=0.5)
wrapped = nn.parallel.DistributedDataParallel(norm)


def show(moment):
    """Print the running mean of all ranks."""
    means = [None] * dist.get_world_size()
    dist.all_gather_object(means, norm.running_mean.item())
    if rank == 0:
        text = "  ".join(f"rank {r}: {mean:.2f}" for r, mean in enumerate(means))
        print(f"{moment:22} {text}", flush=True)


# What the layer sees once DDP's own work before the forward pass is done.
norm.register_forward_pre_hook(lambda *_: show("  as forward begins"))
for step in (1, 2):
    images = torch.tensor([[0.0], [2.0]]) + 10 * rank  # rank 0: mean 1, rank 1: mean 11
    wrapped(images).sum().backward()
    show(f"after step {step}")
assert norm.running_mean.item() == (5.75 if rank else 0.75)  # rank 1's begins as 0.5
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
