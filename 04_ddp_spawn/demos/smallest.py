"""Two processes that add up their numbers, started by one call.

python 04_ddp_spawn/demos/smallest.py
"""

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world_size, folder):
    place = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size)
    number = torch.tensor(10**rank)
    dist.all_reduce(number)
    if rank == 0:
        print(f"the sum over {world_size} ranks is {number}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        mp.spawn(worker, args=(2, folder), nprocs=2)
