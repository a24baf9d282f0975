"""Print which gradients DDP puts into which bucket, and what their place decides.

torchrun --standalone --nproc-per-node=3 09_resume/demos/buckets.py
"""

import gc

import torch
import torch.distributed as dist
from last_bit import make_model
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def print_buckets():
    """Print the parameters in each bucket, in the first three steps."""
    model = make_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
    buckets = []

    def hook(group, bucket):  # DDP calls it for every bucket, instead of all-reducing
        buckets.append(" ".join(names[each] for each in bucket.parameters()))
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    for step in (1, 2, 3):
        buckets.clear()
        wrapped(torch.ones(1, 64)).sum().backward()
        if dist.get_rank() == 0:
            print(f"step {step}: {' | '.join(buckets)}")


def print_sums():
    """Add up the ranks' numbers in two places of a buffer, and compare the sums."""
    torch.manual_seed(dist.get_rank())
    numbers = torch.randn(1000)
    buffer = torch.zeros(10_000)
    sums = []
    for place in (slice(0, 1000), slice(9000, 10_000)):
        buffer.zero_()
        buffer[place] = numbers
        dist.all_reduce(buffer)
        sums.append(buffer[place].clone())
    differ = (sums[0] != sums[1]).double().mean().item()
    if dist.get_rank() == 0:
        print(f"front and back of a buffer: {differ:.1%} of the sums differ")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_buckets()
    print_sums()
    gc.collect()
    dist.destroy_process_group()
