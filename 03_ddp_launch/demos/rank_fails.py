"""Rank 1 fails in step 3, in the way that the first argument names.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/rank_fails.py label
python 03_ddp_launch/demos/rank_fails.py label --spawn
"""

import argparse
import atexit
import os
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record


def fail(how, labels):
    """Do what makes a rank fail in practice."""
    if how == "label":
        labels[0] = 10  # the classes are 0 to 9
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does if memory runs out
    elif how == "hang":
        time.sleep(3600)


def main(args, **where):
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout), **where)
    rank = dist.get_rank()
    # Processes take a while to end: loggers, loader workers. Here one takes longest.
    atexit.register(time.sleep, 12 if rank == args.slow_rank else 2)
    atexit.register(dist.destroy_process_group)  # runs first
    model = nn.Linear(64, 10)
    for step in range(1, 6):
        images, labels = torch.randn(30, 64), torch.arange(30) % 10
        if rank == 1 and step == 3:
            fail(args.how, labels)
        nn.functional.cross_entropy(model(images), labels).backward()
        dist.all_reduce(model.weight.grad)  # rank 0 waits here for rank 1


def spawned(rank, args, folder):
    """Be a process that mp.spawn started."""
    main(args, init_method=f"file://{folder}/meet", rank=rank, world_size=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("label", "kill", "hang"))
    parser.add_argument("--record", action="store_true", help="main with @record")
    parser.add_argument("--slow-rank", type=int, default=0, help="takes longest to end")
    parser.add_argument("--timeout", type=float, default=1800, help="in seconds")
    parser.add_argument("--spawn", action="store_true", help="start the processes")
    args = parser.parse_args()
    if args.record:
        main = record(main)
    if args.spawn:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(spawned, (args, folder), nprocs=2)
    else:
        main(args)
