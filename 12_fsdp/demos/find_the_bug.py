"""Train with FSDP2, and clip the gradients as an old script of one process did it.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/find_the_bug.py model.pt

On two ranks it trains other weights than on one. An exercise has you repair it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(24, 8)
targets = 3 * inputs.sum(dim=1, keepdim=True).sin()
shard = slice(rank, None, world_size)

model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
mesh = dist.init_device_mesh("cpu", (world_size,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs[shard]), targets[shard]).backward()
    gradients = [weight.grad.to_local() for weight in model.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.5 / norm.item()))
    optimizer.step()

# All ranks have to take part; rank 0 gets the whole weights.
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=options)
if rank == 0:
    torch.save(weights, sys.argv[1])
dist.destroy_process_group()
