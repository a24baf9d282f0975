"""The smallest tensor-parallel program: two layers, and the work of each of two ranks.

torchrun --standalone --nproc-per-node=2 14_tensor_parallel/demos/smallest.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module


def tell(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


dist.init_process_group("gloo")  # nccl on GPUs
torch.manual_seed(0)  # the same weights and samples on all ranks
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
up, gelu, down = model
x = torch.randn(4, 8, dtype=torch.float64)
expected = model(x)

mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
outputs = {}
for layer in (up, gelu, down):
    layer.register_forward_hook(lambda module, _, y: outputs.update({module: y.shape}))
assert (model(x) - expected).abs().max() < 1e-12

tell("                            weight           on this rank  output")
for name, layer in (("up, ColwiseParallel", up), ("down, RowwiseParallel", down)):
    weight, shape = layer.weight, [*outputs[layer]]
    whole, local = [*weight.shape], [*weight.to_local().shape]
    tell(f"{name:28}{whole!s:17}{local!s:14}{shape}")
tell(f"between them, from GELU     {'':31}{[*outputs[gelu]]}")
tell("the output is that of the two layers on one process")
dist.destroy_process_group()
