"""Count the collectives of one step of DDP and of FSDP, and what each rank sends.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/collectives.py
"""

import contextlib
import gc
import re
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

KINDS = ("DDP", "FSDP", "no reshard", "only the root", "ends apart", "HSDP, 2 x 2")
# Between micro-batches, the weights can be kept, too.
KEPT = ("FSDP, kept", "no reshard, kept")
NAMES = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
LINKS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # ways around the ring


class Collectives(TorchDispatchMode):
    """Count the calls of each collective, and the bytes that a rank sends in a ring."""

    def __init__(self):
        super().__init__()
        self.calls, self.sent = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # such as c10d::_allgather_base_, c10d::_reduce_scatter_base_ and allreduce_
        name = str(function) if function.namespace == "c10d" else ""
        for key in [key for key in NAMES if key in name][:1]:
            leaves = tree_leaves((args, kwargs))
            whole = max(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
            objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
            n = dist.ProcessGroup.unbox(objects[0]).size()
            self.calls[NAMES[key]] += 1
            self.sent += LINKS[NAMES[key]] * whole * (n - 1) / n
        return function(*args, **(kwargs or {}))


def make(kind, amp):
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
    policy = MixedPrecisionPolicy()
    if amp:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    for block in model.blocks if kind != "only the root" else ():
        fully_shard(block, **options, reshard_after_forward="no reshard" not in kind)
    if kind == "ends apart":
        fully_shard(model.tokens, **options)
        fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    return fully_shard(model, **options), weights


def step(model, micro_batches, amp, kept=False):
    """Run forward and backward on the micro-batches of one step."""
    tokens = torch.randint(256, (5, 32))
    for n in range(1, micro_batches + 1):
        last, sync = n == micro_batches, contextlib.nullcontext()
        if hasattr(model, "no_sync"):
            sync = sync if last else model.no_sync()
        else:
            model.set_requires_gradient_sync(last)
            if kept:
                model.set_reshard_after_backward(last)
        with sync, torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()


def count(kind, micro_batches, amp):
    """Return the calls of the three collectives, and what a rank sends, in P."""
    model, weights = make(kind, amp)
    kept = kind in KEPT
    if kind == "DDP":
        step(model, 1, amp)  # after which it rebuilds its buckets
    if kept:
        step(model, micro_batches, amp, kept)  # what is kept from the step before
    with Collectives() as collectives:
        step(model, micro_batches, amp, kept)
    calls = [collectives.calls[name] for name in NAMES.values()]
    return calls, collectives.sent / weights


def main():
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    log(f"{'':17}{'calls of':>16}{'calls of':>16}{'calls of':>16}     P sent by a rank")
    log(" " * 17 + "".join(f"{name:>16}" for name in NAMES.values()), end="")
    log("   float32  bfloat16")
    for micro_batches in (1, 3):
        log(f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}")
        for kind in (*KINDS, *(KEPT if micro_batches > 1 else ())):
            calls, sent = count(kind, micro_batches, amp=False)
            same, sent_in_16_bits = count(kind, micro_batches, amp=True)
            assert calls == same
            cells = "".join(f"{number or '-':>16}" for number in calls)
            row = f"  {kind:17}{cells[2:]}{sent:10.2f}{sent_in_16_bits:10.2f}"
            log(row, flush=True)


def read(printed):
    """Return what `main` printed: {(micro-batches, kind): five numbers}."""
    rows = {}
    for line in printed.splitlines()[2:]:
        if "micro-batch" in line:
            micro_batches = int(line.split()[0])
        else:
            kind, *cells = re.split(r"  +", line.strip())
            rows[micro_batches, kind] = [
                float(cell.replace("-", "0")) for cell in cells
            ]
    return rows


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
