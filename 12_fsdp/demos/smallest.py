"""The smallest FSDP program: what a rank holds of one weight, and when.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/smallest.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def tell(when, weight):
    rows = weight.to_local().size(0) if hasattr(weight, "to_local") else weight.size(0)
    if dist.get_rank() == 0:
        print(f"{when:33} {type(weight).__name__:10} {rows} of 64 rows", flush=True)


dist.init_process_group("gloo")  # nccl on GPUs
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
torch.manual_seed(0)  # FSDP does not copy rank 0's weights to the others
blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
model = nn.Sequential(*blocks)

for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())  # after fully_shard

first, last = model[0][0], model[2][0]
tell("a weight of the first block", first.weight)
for name, layer in (("that block's", first), ("the last block's", last)):
    layer.register_forward_hook(
        lambda *_, name=name: tell(f"in {name} forward pass", first.weight)
    )
model(torch.randn(8, 64)).sum().backward()
optimizer.step()
tell("between two steps", first.weight)
tell("its gradient", first.weight.grad)
tell("AdamW's average of the gradient", optimizer.state[first.weight]["exp_avg"])
dist.destroy_process_group()
