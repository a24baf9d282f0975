"""What DistributedDataParallel adds: a broadcast, and an all-reduce of each gradient.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/by_hand.py
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
images = torch.randn(12, 8, generator=generator, dtype=torch.float64)
targets = torch.arange(12) % 3
shard = slice(rank, None, world_size)  # this rank's images

torch.manual_seed(rank)  # the ranks begin with different weights ...
model = nn.Linear(8, 3, dtype=torch.float64)
for weight in model.parameters():
    dist.broadcast(weight.data, src=0)  # ... and all get those of rank 0

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[shard]), targets[shard]).backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)  # now .grad is the sum over all ranks ...
        weight.grad /= world_size  # ... and now their mean
    optimizer.step()

print(f"rank {rank}: {model.weight[0, 0]:.12f}\n", end="", flush=True)
dist.destroy_process_group()
