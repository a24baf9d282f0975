"""A job that stops: in step 4, rank 1 reads from a file server that does not answer.

SCRIPT=06_slurm/demos/hang.py sbatch --gpus-per-node=0 --ntasks-per-node=1 \
--cpus-per-task=1 06_slurm/job.sbatch 8    # seconds that a step may take
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Its name up to torch 2.13
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)


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
    for step in range(1, 100):
        gradient = read_images(step).mean()
        dist.all_reduce(gradient)
        if step == 1:  # which includes the start, and may take longer than others
            set_timeout(timedelta(seconds=int(sys.argv[1])))
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)


main()
