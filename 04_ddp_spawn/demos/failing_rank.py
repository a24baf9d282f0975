"""Rank 1 fails, and then rank 0, whose connection to it breaks.

python 04_ddp_spawn/demos/failing_rank.py raise
torchrun --standalone --nproc-per-node=2 04_ddp_spawn/demos/failing_rank.py raise
"""

import argparse
import atexit
import os
import signal
import time
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, place, args):
    # Processes take a while to end: loggers, loader workers. Here one takes longest.
    atexit.register(time.sleep, 20 if rank == args.slow_rank else 3)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    try:
        dist.all_reduce(torch.ones(1))  # the first step
        if rank == 1:
            if args.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
            raise ValueError("sample 17 has no label")
        dist.all_reduce(torch.ones(1))  # rank 0 waits here for rank 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("raise", "kill"))
    parser.add_argument("--slow-rank", type=int, default=0, help="takes longest to end")
    args = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        worker(int(os.environ["RANK"]), "env://", args)
    else:
        with TemporaryDirectory() as folder:
            mp.spawn(worker, (f"file://{folder}/rendezvous", args), nprocs=2)
