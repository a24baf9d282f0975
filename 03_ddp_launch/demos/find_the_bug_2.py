"""Fit measurements with noise of known size, so that each has a weight of its own.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/find_the_bug_2.py model.pt

On two ranks it trains other weights than on one. An exercise has you repair it.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs, noise = torch.randn(96, 8), torch.rand(96, 1) + 0.5
targets = inputs.sum(dim=1, keepdim=True).sin()
batch_size = 12  # of all ranks together
dataset = TensorDataset(inputs, targets, noise)
sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for x, y, sigma in loader:
        optimizer.zero_grad()
        loss = ((wrapped(x) - y) / sigma).square().sum() / batch_size
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
