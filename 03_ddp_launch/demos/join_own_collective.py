"""join() answers DDP's collectives, and not a loop's own.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/join_own_collective.py
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=5))
wrapped = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
with wrapped.join():
    for step in range(1, 4 + rank):
        loss = wrapped(torch.ones(1, 1)).sum()
        loss.backward()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)  # the loop's own
        text = f"rank {rank}, step {step}: 1 + 1 = {total.item():.0f}\n"
        print(text, end="", flush=True)
time.sleep(600)  # torchrun ends this rank when the other one has failed
