"""Who downloads, and who writes, on machines that share no disk.

Each rank works in its current folder, which is on its machine's disk.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
data = Path("data.pt")

if local_rank == 0 and not data.exists():  # one process on each machine
    torch.save(torch.arange(1440), data)  # instead of a download
    print(f"rank {rank}, local rank {local_rank}: downloaded\n", end="", flush=True)
dist.barrier()  # otherwise the others read a file that is not complete yet
samples = torch.load(data)
text = f"rank {rank}, local rank {local_rank}: read {len(samples)} samples\n"
print(text, end="", flush=True)

if rank == 0:  # one process of all
    torch.save({"weight": torch.ones(3)}, "model.pt")
    print(f"rank {rank}, local rank {local_rank}: saved\n", end="", flush=True)
dist.destroy_process_group()
