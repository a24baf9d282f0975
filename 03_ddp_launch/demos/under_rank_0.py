"""A collective that only rank 0 calls. The argument is the size of the gradient.

Rank 0 makes two calls and rank 1 makes one: rank 0's second call is never answered.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/under_rank_0.py 1
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=5))
loss = torch.tensor([1.0 + rank])
gradient = torch.full((int(sys.argv[1]),), 10.0 + 10 * rank)

if rank == 0:
    dist.all_reduce(loss, group=group)  # the mistake
    print(f"mean loss: {loss.item() / 2}\n", end="", flush=True)
dist.all_reduce(gradient, group=group)
print(f"rank {rank}: 10 + 20 = {gradient[0].item():.0f}\n", end="", flush=True)
time.sleep(600)  # torchrun ends this rank when the other one has failed
