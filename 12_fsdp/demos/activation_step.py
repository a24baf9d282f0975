"""Activation checkpointing, also in host memory: what is kept, and what it costs.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/activation_step.py
"""

import gc
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

TOKENS = torch.arange(128).view(4, 32)


# ---- to copy -------------------------------------------------------------------------
def offload_block(block):
    """Keep what backward needs of a block in host memory."""
    forward = block.forward

    def forward_and_offload(*inputs):
        with save_on_cpu(pin_memory=True):
            return forward(*inputs)

    block.forward = forward_and_offload


# ---- on one process ------------------------------------------------------------------
def make(depth=4, checkpointing=False):
    """Return a small GPT, whose blocks may be checkpointed."""
    torch.manual_seed(0)
    model = GPT(256, 32, width=64, depth=depth)
    for block in model.blocks if checkpointing else ():
        checkpoint_block(block)
    return model


def checkpoint_block(block):
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def get_loss(model):
    return nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


def kept_for_backward(model):
    """Go forward; return number and bytes of the tensors kept, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # memory that is shared counts once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = get_loss(model)
    loss.backward()
    return len(kept), sum(storage.nbytes() for storage in kept.values())


def moved_to_host(model):
    """Go forward; return the bytes that save_on_cpu copies."""
    sizes = []

    def copy(_copied, tensor, **_):
        sizes.append(tensor.nbytes)

    with mock.patch.object(torch.Tensor, "copy_", copy):
        get_loss(model)
    return sum(sizes)


# ---- on several ----------------------------------------------------------------------
class Checkpointed(nn.Module):
    """A checkpoint around a module, whose call is what is checkpointed."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def without(block, mesh):
    fully_shard(block, mesh=mesh)


def before_fully_shard(block, mesh):
    checkpoint_block(block)
    fully_shard(block, mesh=mesh)


def after_fully_shard(block, mesh):
    fully_shard(block, mesh=mesh)
    checkpoint_block(block)


def around_the_block(block, mesh):
    fully_shard(block, mesh=mesh)
    return Checkpointed(block)


def offload(block, mesh):
    checkpoint_block(block)
    offload_block(block)
    fully_shard(block, mesh=mesh)


def offload_policy(block, mesh):
    checkpoint_block(block)
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    fully_shard(block, mesh=mesh, offload_policy=policy)


ORDERS = (without, before_fully_shard, after_fully_shard, around_the_block)
ORDERS += (offload, offload_policy)


def main():
    log = print if dist.get_rank() == 0 else lambda *_: None
    log("checkpoint           calls of blocks  all-gathers  reduce-scatters")
    mesh, first = dist.init_device_mesh("cpu", (dist.get_world_size(),)), None
    for order in ORDERS:
        model, calls = make(), []
        for n, block in enumerate(model.blocks):
            count_calls(block, calls)
            model.blocks[n] = order(block, mesh) or block
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(3):
            calls.clear()
            with CommDebugMode() as mode:
                get_loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        count = mode.get_comm_counts()
        gathers = count[torch.ops.c10d._allgather_base_]
        scatters = count[torch.ops.c10d._reduce_scatter_base_]
        log(f"{order.__name__:18}{len(calls):18}{gathers:13}{scatters:17}")
        weights = [shard.to_local() for shard in get_model_state_dict(model).values()]
        first = first or weights
        assert all(one.equal(other) for one, other in zip(first, weights, strict=True))
    log("after 3 steps, the models have the same weights, bit for bit")


def count_calls(block, calls):
    """Have a list grow by one whenever the block computes."""
    forward = block.forward

    def counted(x):
        calls.append(block)
        return forward(x)

    block.forward = counted


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
