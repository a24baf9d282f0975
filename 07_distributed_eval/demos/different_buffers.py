"""Evaluate a model with batch norm on two processes, whose buffers differ.

torchrun --standalone --nproc-per-node=2 \
07_distributed_eval/demos/different_buffers.py
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_grad_enabled(False)
torch.manual_seed(0)
inputs, targets = torch.randn(1001, 8) + 1, torch.arange(1001) % 3
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
# One batch in training mode: each rank updates its running statistics with its own.
model(inputs[500 * rank : 500 * rank + 20])
model.eval()

for broadcast in (False, True):
    for buffer in model.buffers() if broadcast else ():
        dist.broadcast(buffer, src=0)
    outputs = model(inputs[rank::2])
    loss = nn.functional.cross_entropy(outputs, targets[rank::2], reduction="sum")
    dist.all_reduce(loss)
    if rank == 0:
        alone = nn.functional.cross_entropy(model(inputs), targets)
        name = "broadcast first" if broadcast else "no broadcast"
        print(f"{name:15}: loss {loss / 1001:.5f},", end=" ")
        print(f"rank 0's model on the whole set {alone:.5f}")
        assert torch.isclose(loss / 1001, alone, atol=1e-6, rtol=0) == broadcast
dist.destroy_process_group()
