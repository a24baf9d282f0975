"""Count the collectives of one step of DDP and of FSDP, and what each rank sends.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/collectives.py
"""

import contextlib
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from harness.counting import Collectives

KINDS = ("DDP", "FSDP", "no reshard", "only the root", "ends apart", "HSDP, 2 x 2")
# Between micro-batches, the weights can be kept, too.
KEPT = ("FSDP, kept", "no reshard, kept")
NAMES = ("all_gather", "reduce_scatter", "all_reduce")


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
    total = collectives.total()
    calls = [total.get(name, {"calls": 0})["calls"] for name in NAMES]
    return calls, collectives.sent / weights


def main():
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    log(f"{'':17}{'calls of':>16}{'calls of':>16}{'calls of':>16}     P sent by a rank")
    names = [f"{name.replace('_', '-'):>16}" for name in NAMES]
    log(" " * 17 + "".join(names), end="")
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
