"""join(): rank 0 has three batches and rank 1 four. What is the fourth step worth?

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/join.py
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.counting import Collectives


def train(wrapped, steps):
    """Take steps of 0.1; return each one's gradient, and the all-reduces per step."""
    gradients = []
    with Collectives() as collectives:
        for _ in range(steps):
            wrapped.zero_grad()
            wrapped(torch.ones(1, 1)).sum().backward()
            gradients.append(wrapped.module.weight.grad.item())
            wrapped.module.weight.data -= 0.1 * wrapped.module.weight.grad
    return gradients, collectives.total()["all_reduce"]["calls"] / steps


dist.init_process_group("gloo")
rank = dist.get_rank()
wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False))
_, count = train(wrapped, 3)  # as many on both ranks
if rank == 0:
    print(f"without join: {count:.0f} all-reduces per step", flush=True)

# The gradient of every batch is 1 on every rank.
for options in ({}, {"divide_by_initial_world_size": False}):
    with wrapped.join(**options):
        gradients, count = train(wrapped, 3 + rank)
    weights = [torch.zeros(1, 1), torch.zeros(1, 1)]
    dist.all_gather(weights, wrapped.module.weight.data)
    if rank == 1:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        print(f"join({text}): {count:.0f} all-reduces per step", flush=True)
        print("  gradients on rank 1:", gradients, flush=True)
        print("  weights equal afterwards:", torch.equal(*weights), flush=True)

try:
    with wrapped.join(throw_on_early_termination=True):
        train(wrapped, 3 + rank)
except RuntimeError as error:
    dist.barrier()
    if rank == 1:
        print(f"join(throw_on_early_termination=True):\n  {error}", flush=True)
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
