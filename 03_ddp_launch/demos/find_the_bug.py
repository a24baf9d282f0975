"""Fine-tune a pretrained backbone: first the new head alone, then all layers.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/find_the_bug.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
images = torch.randn(12, 8, generator=generator)
target = torch.arange(12) % 3
shard = slice(rank, None, world_size)

torch.manual_seed(0)
backbone, head = nn.Linear(8, 16), nn.Linear(16, 3)
model = nn.Sequential(backbone, nn.Tanh(), head)
backbone.requires_grad_(False)
wrapped = DistributedDataParallel(model)
for epoch in range(1, 5):
    if epoch == 3:
        backbone.requires_grad_(True)
    output = wrapped(images[shard])
    loss = nn.functional.cross_entropy(output, target[shard])
    model.zero_grad()
    loss.backward()
    for weight in model.parameters():
        if weight.grad is not None:
            weight.data -= 0.1 * weight.grad

    # How far are the other ranks' weights from those of rank 0?
    for name, layer in (("backbone", backbone), ("head", head)):
        of_rank_0 = layer.weight.data.clone()
        dist.broadcast(of_rank_0, src=0)
        difference = (layer.weight.data - of_rank_0).abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if rank == 0:
            text = "is the same on" if difference == 0 else "DIFFERS between"
            print(f"epoch {epoch}: {name} {text} the two ranks", flush=True)
del wrapped
gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
dist.destroy_process_group()
