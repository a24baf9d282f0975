"""Rank 1 has one batch more than rank 0.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/uneven.py
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=5))
wrapped = nn.parallel.DistributedDataParallel(nn.Linear(8, 3), process_group=group)
for epoch in (1, 2):
    for step in range(1, 4 + rank):
        try:
            wrapped(torch.ones(2, 8)).sum().backward()
        except RuntimeError:
            text = f"epoch {epoch}: rank {rank} is left waiting in step {step}\n"
            print(text, end="", flush=True)
            raise
    print(f"epoch {epoch}: rank {rank} took {step} steps\n", end="", flush=True)
time.sleep(600)  # torchrun ends this rank when the other one has failed
