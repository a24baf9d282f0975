"""Measure what a rank of DDP and of FSDP holds, with 1, 2 and 4 ranks.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/memory.py
"""

import gc
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.model import GPT

WINDOWS, CONTEXT_LENGTH = 8, 32  # of the global batch
CASES = [("DDP", 1), ("DDP", 2), ("DDP", 4)]
CASES += [("FSDP", 1), ("FSDP", 2), ("FSDP", 4), ("kept", 4), ("root", 4)]


def local(tensors):
    """Return this rank's own tensors: the shards of those that are sharded."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def size(tensors):
    """Return the bytes of this rank's tensors."""
    return sum(each.nbytes for each in local(tensors))


class Peak(TorchDispatchMode):
    """Note the most bytes of tensors that are alive at once, after any operation."""

    def __init__(self, tensors):
        super().__init__()
        self.storages, self.bytes = {}, 0
        self.see(local(tensors))

    def see(self, tensors):
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        if self.alive() > self.bytes:
            # gloo's threads let go of the tensors of a collective just after its end
            time.sleep(0.02)
            self.bytes = max(self.bytes, self.alive())

    def alive(self):
        alive = [storage for each in self.storages.values() if (storage := each())]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.see(tree_leaves((args, kwargs, result)))
        return result


def shard(model, kind, mesh):
    """Shard a model: block by block, and in "root" all of it at once."""
    for block in model.blocks if kind != "root" else ():
        fully_shard(block, mesh=mesh, reshard_after_forward=kind != "kept")
    return fully_shard(model, mesh=mesh)


def hold(kind, group):
    """Take two steps; return the bytes held after the second, and its peak."""
    torch.manual_seed(0)
    model = GPT(256, CONTEXT_LENGTH, width=256, depth=4)
    if kind == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        wrapped = shard(model, kind, DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(256, (WINDOWS // group.size(), CONTEXT_LENGTH))

    def backward():
        nn.functional.cross_entropy(wrapped(tokens), tokens).backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = list(model.parameters())
    states = [each for state in optimizer.state.values() for each in state.values()]
    with Peak([*weights, *states]) as peak:
        backward()
    optimizer.step()
    gradients = [weight.grad for weight in weights]
    return [size(weights), size(gradients), size(states), peak.bytes]


def main():
    rank = dist.get_rank()
    if rank == 0:
        print("kind  ranks  weights  gradients  AdamW  peak of the step")
    for kind, ranks in CASES:
        group = dist.new_group(range(ranks))
        if rank < ranks:
            held = torch.tensor(hold(kind, group)) / 2**20
            if rank == 0:
                row = "{:9.1f}{:11.1f}{:7.1f}{:18.1f}".format(*held.tolist())
                print(f"{kind:4}{ranks:7}{row}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
