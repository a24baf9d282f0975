"""monitored_barrier names the ranks that are missing.

torchrun --standalone --nproc-per-node=3 06_slurm/demos/missing_rank.py
"""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")  # on GPUs "nccl", which has no monitored_barrier
cpu_group = dist.new_group(backend="gloo")  # so it gets a second group, on the CPU
if dist.get_rank() == 1:
    time.sleep(3600)
dist.monitored_barrier(cpu_group, timedelta(seconds=2), wait_all_ranks=True)
