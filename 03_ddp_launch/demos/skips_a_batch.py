"""Rank 1 runs out of memory in step 2, catches the error, and skips the batch.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/skips_a_batch.py
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=5))
linear = nn.Linear(1, 1, bias=False)
model = nn.parallel.DistributedDataParallel(linear, process_group=group)
for step in (1, 2, 3, 4):
    model.zero_grad()
    try:
        if rank == 1 and step == 2:
            torch.empty(10**15)  # four petabytes
        loss = model(torch.tensor([float(step)])).sum()  # its gradient is `step`
    except RuntimeError:  # of which torch.OutOfMemoryError is a kind
        print("rank 1, step 2: out of memory, skipped\n", end="", flush=True)
        continue
    loss.backward()
    mean = linear.weight.grad.item()
    text = f"rank {rank}, step {step}: gradient {step}, averaged {mean}\n"
    print(text, end="", flush=True)
time.sleep(600)  # torchrun ends this rank when the other one has failed
