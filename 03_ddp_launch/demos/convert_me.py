"""A training script for one process. Exercise 3 converts it.

python 03_ddp_launch/demos/convert_me.py model.pt
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(96, 8, dtype=torch.float64)
targets = inputs.sum(dim=1, keepdim=True).sin()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12)
model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print(f"a weight after training: {model[0].weight[0, 0]:.9f}")
torch.save(model.state_dict(), sys.argv[1])
