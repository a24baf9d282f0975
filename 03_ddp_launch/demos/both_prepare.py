"""Every rank prepares the data unless the file is there, as in a script for one GPU.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/both_prepare.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
path = Path(sys.argv[1], "data.pt")


def download():
    """Write the file in two parts, as a download does; rank 1 comes in between."""
    torch.save(torch.arange(100_000), path)
    content = path.read_bytes()
    with path.open("wb") as file:
        file.write(content[:1000])
        file.flush()
        dist.barrier()  # not in a real script: rank 1 comes now
        dist.barrier()
        file.write(content[1000:])


if rank == 1:
    dist.barrier()
try:
    if not path.exists():
        download()
    data = torch.load(path)
    print(f"rank {rank}: read {len(data)} samples\n", end="", flush=True)
except (RuntimeError, EOFError) as error:
    text = str(error).partition(":")[0]
    print(f"rank {rank}: {type(error).__name__}: {text}\n", end="", flush=True)
if rank == 1:
    dist.barrier()
dist.destroy_process_group()
