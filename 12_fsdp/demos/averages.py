"""How FSDP averages gradients, and what if a backend's average were a sum.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/averages.py
"""

import gc
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

# What FSDP calls has another name since torch 2.14 or before.
NAME = "reduce_scatter_single"
NAME = NAME if hasattr(dist, NAME) else "reduce_scatter_tensor"
reduce_scatter = getattr(dist, NAME)


def gradient(dtype, amp, broken):
    """Return one weight's averaged gradient, and how FSDP asked for the average."""
    asked = set()

    def watched(output, input, op, **options):  # noqa: A002, FSDP passes it by name
        asked.add(op)
        if broken and op == dist.ReduceOp.AVG:
            op = dist.ReduceOp.SUM
        return reduce_scatter(output=output, input=input, op=op, **options)

    torch.manual_seed(0)
    model = GPT(256, 32).to(dtype)
    policy = MixedPrecisionPolicy()
    if amp:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    tokens = torch.arange(128).view(4, 32)
    with (
        mock.patch.object(dist, NAME, watched),
        torch.autocast("cpu", torch.bfloat16, enabled=amp),
    ):
        logits = model(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens.flatten()).backward()
    (op,) = asked
    return model.head.weight.grad.full_tensor(), op


def main():
    for name, dtype, amp in (
        ("float64", torch.float64, False),
        ("float32", torch.float32, False),
        ("bfloat16", torch.float32, True),
    ):
        right, op = gradient(dtype, amp, broken=False)
        wrong, _ = gradient(dtype, amp, broken=True)
        if dist.get_rank() == 0:
            asks = str(op).split(".")[-1]
            ratio = (wrong.norm() / right.norm()).item()
            line = f"{name:9} asks for {asks}; if AVG were SUM: gradient times"
            print(f"{line} {ratio:.2f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
