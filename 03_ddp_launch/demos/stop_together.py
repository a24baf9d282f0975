"""All ranks stop when the first of them has no batch left.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/stop_together.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
wrapped = DistributedDataParallel(nn.Linear(8, 3))


def batches_that_all_have(loader):
    """Yield a loader's batches for as long as every rank has one."""
    iterator = iter(loader)
    while True:
        batch = next(iterator, None)
        everybody = torch.tensor(batch is not None, dtype=torch.int32)
        dist.all_reduce(everybody, dist.ReduceOp.MIN)
        if not everybody:
            return
        yield batch


loader = [torch.ones(2, 8)] * (3 + rank)  # rank 1 has one batch more
for epoch in (1, 2):
    steps = 0
    for images in batches_that_all_have(loader):
        wrapped(images).sum().backward()
        steps += 1
    print(f"epoch {epoch}: rank {rank} took {steps} steps\n", end="", flush=True)
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
