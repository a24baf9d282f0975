"""Evaluate on rank 0 alone, with the model that DDP wraps, or with DDP's wrapper.

torchrun --standalone --nproc-per-node=2 \
03_ddp_launch/demos/evaluate_wrapped.py wrapper
"""

import gc
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
# DDP's collectives give up after 5 s, so that this program ends.
group = dist.new_group(timeout=timedelta(seconds=5))
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
ddp = DistributedDataParallel(model, process_group=group)
ddp(torch.randn(8, 4)).sum().backward()
if dist.get_rank() == 0:
    evaluated = ddp if sys.argv[1] == "wrapper" else model
    evaluated.eval()
    with torch.no_grad():
        evaluated(torch.randn(8, 4))
    print("rank 0 has evaluated", sys.argv[1], flush=True)
    ddp.train()
dist.barrier()  # rank 1 waits here
del ddp
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
