"""Count a step's collectives with activation checkpointing, also in host memory.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/activation_step.py
"""

import gc
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from harness.counting import Collectives

TOKENS = torch.arange(128).view(4, 32)
WAYS = ("without", "before fully_shard", "after fully_shard")
WAYS += ("inputs in host memory", "CPUOffloadPolicy")


def make(depth=4, checkpointing=False):
    """Return a small GPT, whose blocks may be checkpointed."""
    torch.manual_seed(0)
    model = GPT(256, 32, width=64, depth=depth)
    for block in model.blocks if checkpointing else ():
        checkpoint_block(block)
    return model


def checkpoint_block(block):
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


# ---- to copy -------------------------------------------------------------------------
def offload_block(block):
    """Keep a checkpointed block's input in host memory until backward needs it."""
    forward = block.forward

    def forward_and_offload(*inputs):
        with save_on_cpu(pin_memory=True):
            return forward(*inputs)

    block.forward = forward_and_offload


# ---- on several processes ------------------------------------------------------------
def get_loss(model):
    return nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


def shard(model, way, mesh):
    """Shard each block, and checkpoint it in one of WAYS; then shard the model."""
    options = {}
    if way == "CPUOffloadPolicy":
        # on a GPU with pinned memory, which is the default
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        if way not in ("without", "after fully_shard"):
            checkpoint_block(block)
        if way == "inputs in host memory":
            offload_block(block)
        fully_shard(block, mesh=mesh, **options)
        if way == "after fully_shard":
            checkpoint_block(block)
    return fully_shard(model, mesh=mesh)


def main():
    log = print if dist.get_rank() == 0 else lambda *_: None
    log("activation checkpointing  calls of blocks  all-gathers  reduce-scatters")
    mesh, first = dist.init_device_mesh("cpu", (dist.get_world_size(),)), None
    for way in WAYS:
        model, calls = make(), []
        for block in model.blocks:
            block.attention.register_forward_hook(lambda *_, to=calls: to.append(1))
        shard(model, way, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(3):
            calls.clear()
            with Collectives() as collectives:
                get_loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        total = collectives.total()
        gathers, scatters = (
            total[n]["calls"] for n in ("all_gather", "reduce_scatter")
        )
        log(f"{way:24}{len(calls):17}{gathers:13}{scatters:17}")
        weights = [shard.to_local() for shard in get_model_state_dict(model).values()]
        first = first or weights
        assert all(one.equal(other) for one, other in zip(first, weights, strict=True))
    log("after 3 steps, the models have the same weights, bit for bit")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
