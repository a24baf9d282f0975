"""A program for torchrun: the ranks add up their numbers, and rank 0 prints the sum.

torchrun --standalone --nproc-per-node=2 04_ddp_spawn/demos/for_torchrun.py
"""

import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")  # finds all it needs in the environment
    total = torch.tensor(10 ** int(os.environ["LOCAL_RANK"]))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"the sum over {dist.get_world_size()} ranks is {total}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
