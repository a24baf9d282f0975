"""A loss that is a sum over the batch: what DDP makes of its gradient.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/sum_of_losses.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
images = torch.arange(12.0).reshape(12, 1)
shard = images[rank::world_size]
model = nn.Linear(1, 1, bias=False)
wrapped = DistributedDataParallel(model)


def gradient(loss):
    model.zero_grad()
    loss.backward()
    return model.weight.grad.item()


found = {
    "mean, one process": gradient(model(images).mean()),
    "mean, DDP": gradient(wrapped(shard).mean()),
    "sum, one process": gradient(model(images).sum()),
    "sum, DDP": gradient(wrapped(shard).sum()),
    "world_size * sum, DDP": gradient(world_size * wrapped(shard).sum()),
}
if rank == 0:
    for name, value in found.items():
        print(f"{name:22} gradient {value:4.1f}", flush=True)
    assert found["mean, DDP"] == found["mean, one process"]
    assert found["sum, DDP"] == found["sum, one process"] / world_size
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
