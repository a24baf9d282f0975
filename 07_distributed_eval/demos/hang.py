"""Evaluate seven images on two processes, through the bare model and through DDP.

torchrun --standalone --nproc-per-node=2 07_distributed_eval/demos/hang.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
# DDP's collectives give up after 10 s, so that this program ends.
group = dist.new_group(timeout=timedelta(seconds=10))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
wrapped.eval()
shard = torch.randn(7, 8)[rank::2]  # four images on rank 0, three on rank 1


def evaluate(network, name):
    for image in shard.split(1):  # batches of one image
        network(image)
    images = torch.tensor([len(shard)])
    dist.all_reduce(images)
    if rank == 0:
        print(f"{name}: {images.item()} images", flush=True)


with torch.no_grad():
    evaluate(model, "bare model, no_grad")
    evaluate(wrapped, "DDP, no_grad")
evaluate(model, "bare model, without no_grad")
evaluate(wrapped, "DDP, without no_grad")
dist.destroy_process_group()
