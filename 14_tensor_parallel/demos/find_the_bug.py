"""Train two layers that are split over all ranks, which are one tp group.

torchrun --standalone --nproc-per-node=2 \\
  14_tensor_parallel/demos/find_the_bug.py model.pt

On two ranks it trains other weights than on one. An exercise has you repair it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 8)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=12 // world_size, sampler=sampler)

model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
mesh = dist.init_device_mesh("cpu", (world_size,))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

# All ranks have to take part; rank 0 gets the whole weights.
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=options)
if rank == 0:
    torch.save(weights, sys.argv[1])
dist.destroy_process_group()
