"""Two ways to average a gradient, and what they send: via rank 0, and a ring.

torchrun --standalone --nproc-per-node=4 03_ddp_launch/demos/ring.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from exercises.solutions import ring  # you can write it yourself: see exercises

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
isend, sent = dist.isend, 0  # bytes that this rank has sent


def count_and_send(tensor, dst):
    global sent
    sent += tensor.nbytes
    return isend(tensor, dst)


def sum_on_rank_0(gradient):
    """All ranks send to rank 0, which adds up and sends the sum to all."""
    if rank > 0:
        dist.isend(gradient, 0).wait()
        dist.recv(gradient, 0)
        return
    for other in range(1, n):
        received = torch.empty_like(gradient)
        dist.recv(received, other)
        gradient += received
    for other in range(1, n):
        dist.isend(gradient, other).wait()


dist.isend = count_and_send
ways = {"sum_on_rank_0": sum_on_rank_0, "ring_all_reduce": ring.all_reduce}
for name, way in ways.items():
    gradient = torch.full((1_000_000,), rank + 1.0)  # 4 MB
    wanted = gradient.clone()
    dist.all_reduce(wanted)
    sent = 0
    way(gradient)
    assert torch.equal(gradient, wanted)
    counts = [None] * n
    dist.all_gather_object(counts, sent / 1e6)
    if rank == 0:
        print(f"{name:15} MB sent by rank 0, 1, ...:", *counts, flush=True)
dist.destroy_process_group()
