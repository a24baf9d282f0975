"""Exercise 3 solved: convert_me.py on several processes. For GPUs, take after.py.

torchrun --standalone --nproc-per-node=2 \\
  03_ddp_launch/demos/convert_solution.py model.pt
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
inputs = torch.randn(96, 8, dtype=torch.float64)
targets = inputs.sum(dim=1, keepdim=True).sin()
dataset = TensorDataset(inputs, targets)
# shuffle=False, because the loader did not shuffle either; then set_epoch is not needed
sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
local_batch_size = 12 // dist.get_world_size()
loader = DataLoader(dataset, batch_size=local_batch_size, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)).double()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print(f"a weight after training: {model[0].weight[0, 0]:.9f}", flush=True)
    torch.save(model.state_dict(), sys.argv[1])
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
