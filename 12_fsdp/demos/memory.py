"""Measure what a rank of DDP and of FSDP holds, with 1, 2 and 4 ranks, in MiB.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/memory.py [FILE.json]
"""

import gc
import json
import sys
import time
import weakref
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

VOCABULARY, WIDTH, DEPTH = 4096, 192, 4
WINDOWS, CONTEXT_LENGTH = 8, 32  # of the global batch
CASES = [("DDP", 1), ("DDP", 2), ("DDP", 4), ("FSDP", 1), ("FSDP", 2), ("FSDP", 4)]
AT_REST = ("weights", "gradients", "AdamW")
CASES += [("no reshard", 4), ("only the root", 4), ("ends apart", 4)]


def local(tensors):
    """Return this rank's own tensors: the shards of those that are sharded."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def size(tensors):
    """Return the bytes of the memory of this rank's tensors, each memory once."""
    storages = [each.untyped_storage() for each in local(tensors)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class Held(TorchDispatchMode):
    """Note the most bytes of tensors that are alive at once, after any operation.

    `most` has them in all, and for three kinds: the weights that FSDP gathers, the
    whole gradients, and the copy of them that a reduce-scatter sends.
    """

    def __init__(self, model, tensors):
        super().__init__()
        self.model, self.storages, self.kinds, self.grown = model, {}, {}, False
        self.most = Counter()
        self.see(local(tensors))

    def see(self, tensors, kind=None):
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                known = self.storages.get(id(storage), lambda: None)()
                if known is None:  # new, perhaps with the number of one that is gone
                    self.storages[id(storage)] = weakref.ref(storage)
                    self.kinds.pop(id(storage), None)
                    self.grown = True
                if kind:
                    self.kinds[id(storage)] = kind
                    self.grown = True  # FSDP gives gathered weights their memory again

    def count(self):
        if not self.grown:  # a view, for instance; counting them all takes long
            return
        self.grown, alive = False, Counter()
        for key, reference in list(self.storages.items()):
            storage = reference()
            if storage is None:
                del self.storages[key]
                self.kinds.pop(key, None)
            else:
                alive["all"] += storage.nbytes()
                alive[self.kinds.get(key)] += storage.nbytes()
        self.most |= alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if function.namespace == "c10d":
            # otherwise it depends on gloo's threads when they let go of the tensors
            for each in tree_leaves(result):
                if isinstance(each, torch.ScriptObject):
                    each.wait()
            time.sleep(0.02)
        self.see(tree_leaves((args, kwargs, result)))
        if "allgather_base" in name:
            self.see(args[:1], "gathered")
        elif "split_with_sizes_copy" in name:
            self.see(kwargs["out"], "gathered")
        elif "chunk_cat" in name:
            weights = [w for w in self.model.parameters() if not isinstance(w, DTensor)]
            self.see([w.grad for w in weights if w.grad is not None], "whole gradients")
            self.see(args[0], "whole gradients")
            self.see([kwargs["out"]], "copy to reduce")
        self.count()
        return result


def shard(model, kind, mesh, amp):
    """Shard a model as the script does, or in one of three other ways."""
    policy = MixedPrecisionPolicy()
    if amp:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    for block in model.blocks if kind != "only the root" else ():
        fully_shard(block, **options, reshard_after_forward=kind != "no reshard")
    if kind == "ends apart":  # two groups more; backward begins with the second
        fully_shard(model.tokens, **options)
        fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    return fully_shard(model, **options)


def hold(kind, group, amp):
    """Take two steps; return the bytes of each kind that the second one needs."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, CONTEXT_LENGTH, WIDTH, DEPTH)
    if kind == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        wrapped = shard(model, kind, DeviceMesh.from_group(group, "cpu"), amp)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(VOCABULARY, (WINDOWS // group.size(), CONTEXT_LENGTH))

    def forward(keep=lambda tensor: tensor):
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=amp),
        ):
            logits = wrapped(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return logits, loss

    kept = []
    logits, loss = forward(lambda tensor: kept.append(tensor) or tensor)
    whole = {w.untyped_storage().data_ptr() for w in local(model.parameters())}
    kept = [each for each in kept if each.untyped_storage().data_ptr() not in whole]
    outputs = [each for each in kept if each.numel() == logits.numel()]
    activations = size(kept) - size(outputs)
    sizes = {"activations": activations, "logits": size([*outputs, logits])}
    kept.clear(), outputs.clear()
    loss.backward()
    del logits, loss
    optimizer.step()
    optimizer.zero_grad()
    weights = list(model.parameters())
    states = [each for state in optimizer.state.values() for each in state.values()]
    with Held(model, [*weights, *states]) as held:
        logits, loss = forward()
        loss.backward()
    sizes |= {"weights": size(weights), "AdamW": size(states)}
    sizes["gradients"] = size([weight.grad for weight in weights])
    return sizes | held.most


def main():
    rank, everything = dist.get_rank(), {}
    if rank == 0:
        print(f"{'at rest':>45}{'most during a step':>25}")
        print(f"{'':14}ranks  weights  gradients  AdamW     float32  bfloat16")
    for kind, ranks in CASES:
        group = dist.new_group(range(ranks))
        if rank < ranks:
            held, in_16_bits = (hold(kind, group, amp) for amp in (False, True))
            rest = [held[name] / 2**20 for name in AT_REST]
            assert all(held[name] == in_16_bits[name] for name in AT_REST)
            most = held["all"] / 2**20, in_16_bits["all"] / 2**20
            everything[f"{kind}, {ranks}"] = held, in_16_bits
            if rank == 0:
                row = "{:9.1f}{:11.1f}{:7.1f}{:12.1f}{:10.1f}".format(*rest, *most)
                print(f"{kind:14}{ranks:5}{row}", flush=True)
        dist.barrier()
    if rank == 0 and len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(everything))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
