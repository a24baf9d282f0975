"""Do all processes reach each other, and how fast? all_reduce of growing sizes.

SCRIPT=06_slurm/demos/smoke_test.py sbatch 06_slurm/job.sbatch
torchrun --standalone --nproc-per-node=2 06_slurm/demos/smoke_test.py
"""

import gc
import os
import socket
import time

import torch
import torch.distributed as dist


def number(torchruns_name, slurms_name):
    return int(os.environ.get(torchruns_name) or os.environ[slurms_name])


def main():
    rank = number("RANK", "SLURM_PROCID")
    size = number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", number("LOCAL_RANK", "SLURM_LOCALID"))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=size)
    nodes = [None] * size
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    dist.all_gather_object(nodes, node)
    if rank == 0:
        print(f"{size} processes, {dist.get_backend()}, on", *nodes)
    # 1 GB at last on GPUs: less takes too little time to measure a fast network
    for numbers in (1000, 100_000, 250_000_000 if cuda else 10_000_000):
        tensor = torch.full((numbers,), float(rank), device=device)
        dist.all_reduce(tensor)  # the first one connects, so it is not timed
        assert (tensor == size * (size - 1) / 2).all(), "a wrong sum"
        start = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        seconds = (time.perf_counter() - start) / 5
        speed = 2 * (size - 1) / size * tensor.nbytes / seconds  # sent by each process
        if rank == 0:
            print(f"{tensor.nbytes} bytes: sum correct, {speed / 1e9:.4f} GB/s")


main()
gc.collect()  # otherwise gloo may abort at exit
dist.destroy_process_group()
