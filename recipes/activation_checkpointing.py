"""Activation checkpointing and DDP: "Expected to mark a variable ready only once".

The reentrant kind of torch.utils.checkpoint starts a backward pass inside the backward
pass. By then, DDP with find_unused_parameters=True has already marked the blocks'
parameters as unused and ready. With use_reentrant=False there is no error, and a block
keeps only its input for backward, at the price of a second forward pass (without the
last product of a block, whose result backward does not need). Selective checkpointing
also keeps the results of the matrix products, which take the most time, and recomputes
only what is cheap.

$ torchrun --standalone --nproc-per-node=2 recipes/activation_checkpointing.py
without activation checkpointing: 26 matrix products, gradients as in one process
use_reentrant=False: 30 matrix products, gradients as in one process
selective: 26 matrix products, gradients as in one process
use_reentrant=True: Expected to mark a variable ready only once.
"""

import functools
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts


# ---- the lines to copy ---------------------------------------------------------------
def through_blocks(blocks, x, use_reentrant=False):
    """Keep only each block's input for backward, which computes the rest again."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return x


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def keep_products(_context, operation, *_args, **_kwargs):
    """Say what selective checkpointing keeps: of attention, add its operations."""
    if operation in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def through_blocks_selectively(blocks, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


# ---- the proof -----------------------------------------------------------------------
def through_blocks_as_usual(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Net(nn.Module):
    """A layer, and four blocks, through which a function goes."""

    def __init__(self, through):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        wide = [(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in wide)
        self.through = through

    def forward(self, x):
        return self.through(self.blocks, self.first(x))


class Products(TorchDispatchMode):
    """Counts the matrix products."""

    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.number += operation in PRODUCTS
        return operation(*args, **(kwargs or {}))


def log(text):
    """Print a line, once for the whole run."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    whole = Net(through_blocks_as_usual)
    samples = torch.randn(8 * dist.get_world_size(), 64)
    whole(samples).square().mean().backward()  # as one process would, without DDP
    own = samples.chunk(dist.get_world_size())[dist.get_rank()].clone()
    numbers = []
    for name, through in {
        "without activation checkpointing": through_blocks_as_usual,
        "use_reentrant=False": through_blocks,
        "selective": through_blocks_selectively,
    }.items():
        net = Net(through)
        wrapped = DistributedDataParallel(net, find_unused_parameters=True)
        with Products() as counter:
            wrapped(own).square().mean().backward()
        for a, b in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
        numbers.append(counter.number)
        log(f"{name}: {counter.number} matrix products, gradients as in one process")
    assert numbers[0] == numbers[2] < numbers[1]
    net = Net(functools.partial(through_blocks, use_reentrant=True))
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    try:
        wrapped(own).square().mean().backward()
        message = None
    except RuntimeError as error:
        message = str(error).partition(" This error")[0]
    assert message == "Expected to mark a variable ready only once."
    log(f"use_reentrant=True: {message}")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
