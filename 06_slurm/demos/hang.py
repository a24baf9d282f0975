"""A job that stops: in step 4, rank 1 reads from a file server that does not answer.

SCRIPT=06_slurm/demos/hang.py sbatch --gpus-per-node=0 --ntasks-per-node=1 \
--cpus-per-task=1 06_slurm/job.sbatch 8    # the group's timeout is 8 seconds
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def read_images(step):
    if step == 4 and dist.get_rank() == 1:
        time.sleep(3600)  # the file server
    return torch.ones(1000)


def main():
    dist.init_process_group(
        "gloo",
        rank=int(os.environ["SLURM_PROCID"]),
        world_size=int(os.environ["SLURM_STEP_NUM_TASKS"]),
    )
    group = dist.new_group(timeout=timedelta(seconds=int(sys.argv[1])))
    for step in range(1, 100):
        gradient = read_images(step).mean()
        dist.all_reduce(gradient, group=group)
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)


main()
