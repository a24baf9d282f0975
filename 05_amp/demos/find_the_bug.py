"""Train with gradient clipping in float16 on several ranks, or in float32 to compare.

torchrun --standalone --nproc-per-node=2 05_amp/demos/find_the_bug.py model.pt float16

In float16 it hardly learns. An exercise has you repair it.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
half = sys.argv[2] == "float16"
torch.manual_seed(0)
inputs = torch.randn(24, 8)
targets = 3 * inputs.sum(dim=1, keepdim=True).sin()
shard = slice(rank, None, world_size)

model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=5, enabled=half)
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=half):
        output = wrapped(inputs[shard])
    loss = nn.functional.mse_loss(output.float(), targets[shard])
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
