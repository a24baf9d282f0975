"""Run in bfloat16 with autocast, with FSDP's policy, with both: what has which type.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/precision.py
"""

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
from harness.counting import Kept
from harness.counting import local
from harness.counting import size

POLICY = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
# What is printed: (with fully_shard, its policy, autocast)
WAYS = {
    "DDP, autocast": (False, None, True),
    "FSDP, autocast": (True, MixedPrecisionPolicy(), True),
    "FSDP, policy": (True, POLICY, False),
    "FSDP, both": (True, POLICY, True),
}


def short(dtype):
    return {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]


def see(sharded, policy, amp):
    """Return the types of five tensors, the loss, and the bytes of 16-bit copies."""
    torch.manual_seed(0)
    model = GPT(256, 32, depth=4)
    weights = sum(weight.numel() for weight in model.parameters())
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    if sharded:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    bare, types = getattr(model, "module", model), []

    def note(module, inputs, output):
        types.extend((inputs[0].dtype, module.weight.dtype, output.dtype))

    bare.blocks[1].norm1.register_forward_hook(note)
    tokens = torch.arange(128).view(4, 32)
    with Kept() as kept, torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    shapes = {weight.shape for weight in bare.parameters() if weight.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    in_16_bits = [each for each in kept.tensors if each.dtype == torch.bfloat16]
    copies = size([each for each in in_16_bits if each.shape in shapes])
    loss.backward()
    (gradient,) = local([next(bare.parameters()).grad])
    types += [logits.dtype, loss.dtype, gradient.dtype]
    return types, loss.item(), copies / (2 * weights)


def main():
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    rows = [see(*way) for way in WAYS.values()]
    names = ("block's input", "norm's weight", "norm's output", "logits", "loss's type")
    names += ("gradient",)
    log(f"{'':15}" + "".join(f"{name:>16}" for name in WAYS))
    for n, name in enumerate(names):
        log(f"{name:15}" + "".join(f"{short(types[n]):>16}" for types, *_ in rows))
    log(f"{'loss':15}" + "".join(f"{loss:16.4f}" for _, loss, _ in rows))
    text = "".join(f"{copied:16.0%}" for *_, copied in rows)
    log(f"{'16-bit weights':15}{text}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
