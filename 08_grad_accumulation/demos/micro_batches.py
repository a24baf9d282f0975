"""Accumulate the gradient of a batch over four micro-batches on each rank.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/demos/micro_batches.py
"""

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn


# ---- the lines to copy ---------------------------------------------------------------
def accumulate_gradients(ddp, inputs, targets, n):
    """Run forward and backward on n micro-batches, one after the other."""
    assert len(inputs) % n == 0  # otherwise chunk may return fewer, of other sizes
    parts = zip(inputs.chunk(n), targets.chunk(n), strict=True)
    for number, (some, labels) in enumerate(parts, start=1):
        # no all-reduce before the last one; the forward pass has to be in here
        with nullcontext() if number == n else ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(some), labels) / n
        loss.backward()  # adds to .grad


# ---- the run -------------------------------------------------------------------------
def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(10, 3).double()
    inputs, targets = torch.randn(48, 10).double(), torch.arange(48) % 3
    nn.functional.cross_entropy(model(inputs), targets).backward()
    whole = model.weight.grad.clone()  # of the global batch, at once
    model.zero_grad()

    ddp = nn.parallel.DistributedDataParallel(model)
    shard = inputs[rank::world_size], targets[rank::world_size]
    accumulate_gradients(ddp, *shard, n=4)
    difference = (model.weight.grad - whole).abs().max()
    assert difference < 1e-12
    if rank == 0:
        print(f"largest difference from the whole batch's gradient: {difference:.0e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
