"""Spawn two processes; rank 1 raises an exception while rank 0 is still busy.

python 04_ddp_spawn/demos/failing_rank.py
"""

import time

import torch.multiprocessing as mp


def worker(rank):
    if rank == 1:
        raise ValueError("sample 17 has no label")
    time.sleep(600)  # its "training"


if __name__ == "__main__":
    mp.spawn(worker, nprocs=2)
