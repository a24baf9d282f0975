"""Fine-tune a pretrained backbone: first the new head alone, then all layers.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/find_the_bug.py model.pt

On two ranks, it trains other weights than on one. Exercise 2 has you repair it.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
images = torch.randn(12, 8, generator=generator)
target = torch.arange(12) % 3
shard = slice(rank, None, world_size)

torch.manual_seed(0)
backbone, head = nn.Linear(8, 16), nn.Linear(16, 3)
model = nn.Sequential(backbone, nn.Tanh(), head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
backbone.requires_grad_(False)
wrapped = DistributedDataParallel(model)
for epoch in range(1, 5):
    if epoch == 3:
        backbone.requires_grad_(True)
    output = wrapped(images[shard])
    loss = nn.functional.cross_entropy(output, target[shard])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
