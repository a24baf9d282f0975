"""Print what DDP's all-reduce carries: in float32, under autocast, and compressed.

torchrun --standalone --nproc-per-node=2 05_amp/demos/all_reduce_bytes.py

bf16_compress_wrapper(noting) does what bf16_compress_hook does, around a hook that
looks.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_wrapper,
)


def noting(buckets, bucket):
    """Communication hook: note what is about to be averaged, and average it."""
    buckets.append(bucket.buffer())
    return allreduce_hook(None, bucket)


def backward(autocast, hook):
    """Return what one backward pass averaged, and the type of its gradients."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(500, 100))
    buckets = []
    model.register_comm_hook(buckets, hook)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(torch.randn(8, 500)).square().mean()
    loss.backward()
    return buckets, {parameter.grad.dtype for parameter in model.parameters()}


def main():
    dist.init_process_group("gloo")
    for name, autocast, hook in (
        ("float32", False, noting),
        ("autocast", True, noting),
        ("autocast and compression", True, bf16_compress_wrapper(noting)),
    ):
        buckets, types = backward(autocast, hook)
        size = sum(bucket.nbytes for bucket in buckets)
        if dist.get_rank() == 0:
            print(f"{name}: gradients {types}, {size} bytes averaged", flush=True)
    gc.collect()  # on gloo, a DDP object still alive can abort the process at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
