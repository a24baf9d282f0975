"""Count the collectives of one step of DDP and of FSDP, and what they move.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/collectives.py
"""

import contextlib
import gc
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.model import GPT

KINDS = ("DDP", "FSDP", "FSDP, --keep-unsharded", "FSDP, only the root", "HSDP, 2 x 2")
NAMES = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}


class Collectives(TorchDispatchMode):
    """Count the calls of each collective, and the bytes of its largest tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # such as c10d::_allgather_base_, c10d::_reduce_scatter_base_ and allreduce_
        name = str(function) if function.namespace == "c10d" else ""
        for key in [key for key in NAMES if key in name][:1]:
            tensors = filter(torch.is_tensor, tree_leaves((args, kwargs)))
            self.calls[NAMES[key]] += 1
            self.bytes[NAMES[key]] += max(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


def make(kind):
    """Return a GPT of four blocks for one of KINDS, and its parameters' bytes."""
    torch.manual_seed(0)
    model = GPT(256, 32, depth=4)
    weights = sum(weight.nbytes for weight in model.parameters())
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(model), weights
    mesh = dist.init_device_mesh("cpu", (4,))
    if "HSDP" in kind:
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for block in () if "root" in kind else model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward="keep" not in kind)
    return fully_shard(model, mesh=mesh), weights


def step(model, micro_batches):
    """Run forward and backward on the micro-batches of one step."""
    tokens = torch.randint(256, (5, 32))
    for n in range(1, micro_batches + 1):
        last, sync = n == micro_batches, contextlib.nullcontext()
        if hasattr(model, "no_sync"):
            sync = sync if last else model.no_sync()
        else:
            model.set_requires_gradient_sync(last)
        with sync:
            loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()


def main():
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    log("calls and bytes, in units of the weights P", end="")
    log("".join(f"{name:>18}" for name in NAMES.values()))
    for micro_batches in (1, 3):
        for kind in KINDS:
            model, weights = make(kind)
            step(model, 1)  # DDP rebuilds its buckets after this one
            with Collectives() as count:
                step(model, micro_batches)
            cells = [
                f"{count.calls[name]:3}, {count.bytes[name] / weights:.2f} P"
                if count.calls[name]
                else "-"
                for name in NAMES.values()
            ]
            label = f"{kind}, {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
            log(f"{label:42}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
