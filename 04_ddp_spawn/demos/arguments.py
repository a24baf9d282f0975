"""Spawn two processes that write into a tensor and a list, both passed as arguments.

python 04_ddp_spawn/demos/arguments.py
"""

import torch
import torch.multiprocessing as mp


def worker(rank, tensor, numbers):
    tensor[rank] = 1
    numbers[rank] = 1


if __name__ == "__main__":
    tensor, numbers = torch.zeros(2), [0, 0]
    mp.spawn(worker, (tensor, numbers), nprocs=2)
    print("in the parent, afterward:", tensor.int().tolist(), numbers)
