"""Rank 0 evaluates for a minute. Rank 1 waits for it, but only until the timeout.

torchrun --standalone --nproc-per-node=2 07_distributed_eval/demos/rank_0_alone.py
"""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
if dist.get_rank() == 0:
    time.sleep(60)  # a long evaluation
    print("rank 0 has evaluated the set")
dist.barrier()
dist.destroy_process_group()
