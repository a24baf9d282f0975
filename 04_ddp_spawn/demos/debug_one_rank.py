"""Stop rank 1 of two spawned processes in the debugger, while rank 0 waits.

python 04_ddp_spawn/demos/debug_one_rank.py ["COMMAND" ...]

In a terminal, type commands such as `up`, `p weight` and `c`. Commands that are given
as arguments are fed to the debugger instead.
"""

import os
import sys
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def attach_terminal(commands):
    """Give this process a standard input: the terminal, or a pipe with commands."""
    if commands:
        source, sink = os.pipe()
        os.write(sink, "\n".join([*commands, ""]).encode())
    else:
        source = os.open("/dev/tty", os.O_RDONLY)
    os.dup2(source, 0)


def worker(rank, folder, commands):
    attach_terminal(commands)
    address = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    weight = torch.tensor(rank + 1.0)
    total = weight.clone()
    dist.all_reduce(total)
    dist.breakpoint(rank=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, sys.argv[1:]), nprocs=2)
