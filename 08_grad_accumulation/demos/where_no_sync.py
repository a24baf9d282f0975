"""Accumulate four micro-batches on two ranks, with `no_sync` in different places.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/demos/where_no_sync.py
"""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.counting import Collectives

N = 4
FLAG = "as a flag, after forward"
PLACES = {  # a name, and the passes that run under no_sync
    "nowhere": (),
    "around backward": ("backward",),
    "around forward": ("forward",),
    "around both": ("forward", "backward"),
    FLAG: (),
}


def accumulate(ddp, inputs, targets, place):
    parts = zip(inputs.chunk(N), targets.chunk(N), strict=True)
    for micro_step, (some, labels) in enumerate(parts, start=1):
        last = micro_step == N
        quiet = () if last else PLACES[place]
        with ddp.no_sync() if "forward" in quiet else nullcontext():
            loss = nn.functional.cross_entropy(ddp(some), labels) / N
        if place == FLAG:
            ddp.require_backward_grad_sync = last  # no_sync sets the same attribute
        with ddp.no_sync() if "backward" in quiet else nullcontext():
            loss.backward()


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, targets = torch.randn(48, 10).double(), torch.arange(48) % 3
    model = nn.Linear(10, 3).double()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    whole = model.weight.grad.clone()  # of the global batch, on one process
    inputs, targets = inputs[rank::world_size], targets[rank::world_size]

    for place in PLACES:
        ddp = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):  # the second step is the one that is printed
            model.zero_grad()
            with Collectives() as collectives:
                accumulate(ddp, inputs, targets, place)
        calls = collectives.total()["all_reduce"]["calls"]  # of one bucket each
        off = (model.weight.grad - whole).norm() / whole.norm()
        dist.reduce(off, dst=0, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{place:24}  all-reduces: {calls}  off by {off:.0e}")
            assert (off < 1e-12) == (place != FLAG)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
