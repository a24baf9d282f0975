"""Print in which order a rank gathers weights and computes, as set and by default.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/prefetch.py
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from harness.counting import Collectives


def make():
    """Return a sharded GPT of four blocks."""
    torch.manual_seed(0)
    model = GPT(256, 32, depth=4)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---- to copy -------------------------------------------------------------------------
def prefetch(blocks, ahead):
    """Gather the weights of so many blocks ahead of the one that computes."""
    blocks = list(blocks)
    for n, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[n + 1 : n + 1 + ahead])
        before = blocks[max(n - ahead, 0) : n]
        block.set_modules_to_backward_prefetch(before[::-1])


# ---- the order -----------------------------------------------------------------------
def watch(ahead):
    """Return the order of a forward and of a backward pass, and the gradients."""
    model, collectives = make(), Collectives()
    if ahead:
        prefetch(model.blocks, ahead)

    def note(name):  # among the collectives, when the block computes
        return lambda *_: collectives.seen.append([name])

    for n, block in enumerate(model.blocks, start=1):
        block.up.register_forward_hook(note(f"F{n}"))
        block.up.register_full_backward_hook(note(f"B{n}"))
    with collectives:
        loss = model(torch.arange(64).view(2, 32)).square().mean()
        forward, collectives.seen = collectives.seen, []
        loss.backward()
    gradients = [weight.grad.to_local() for weight in model.parameters()]
    return names(forward), names(collectives.seen), gradients


def names(seen):
    """Return what was seen, without the reduce-scatters."""
    names = [name.replace("all_gather", "gather") for name, *_ in seen]
    return [name for name in names if name != "reduce_scatter"]


def main():
    first = None
    for ahead in (None, 1, 2):
        forward, backward, gradients = watch(ahead)
        first = first or gradients
        assert all(map(torch.equal, gradients, first))
        if dist.get_rank() == 0:
            print(f"{ahead} ahead" if ahead else "by default")
            print("  forward: ", *forward)
            print("  backward:", *backward, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
