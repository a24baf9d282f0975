"""Each process prints its rank, and all add up ones: once, or as long as FILE exists.

torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
    --rdzv-endpoint=machine1:29500 06_slurm/demos/meet.py [FILE]
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FILE = Path(sys.argv[1]) if sys.argv[1:] else None

# a short timeout, so that what is wrong shows soon
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, local_rank = dist.get_rank(), os.environ["LOCAL_RANK"]
text = f"rank {rank}, local rank {local_rank}, of {dist.get_world_size()}\n"
print(text, end="", flush=True)  # in one piece: two processes share the terminal
meeting = True
while meeting:
    ones = torch.tensor([1, FILE is not None and FILE.exists()])
    dist.all_reduce(ones)
    assert ones[0] == dist.get_world_size()
    meeting = ones[1] > 0  # the same on all ranks: otherwise one leaves too early
    time.sleep(0.1)
print(f"rank {rank}: done\n", end="", flush=True)
dist.destroy_process_group()
