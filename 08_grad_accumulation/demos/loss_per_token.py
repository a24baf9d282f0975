"""Accumulate the gradient of a mean over the tokens of all micro-batches and ranks."""

from contextlib import nullcontext

import torch.distributed as dist
from torch import nn

PADDING = -100  # where there is no token to predict: cross_entropy leaves these out


def accumulate(ddp, micro_batches, device):
    """Run forward and backward; micro_batches: a list of (inputs, targets) [B, T]."""
    tokens = sum((targets != PADDING).sum() for _, targets in micro_batches)
    tokens = tokens.to(device)  # one integer; the micro-batches can be on the CPU
    dist.all_reduce(tokens)  # once per step: the tokens of all ranks
    factor = dist.get_world_size() / tokens.double()  # DDP divides by the world size
    for micro_step, (inputs, targets) in enumerate(micro_batches, start=1):
        last = micro_step == len(micro_batches)
        with nullcontext() if last else ddp.no_sync():
            loss = nn.functional.cross_entropy(
                ddp(inputs.to(device)).flatten(0, 1),
                targets.to(device).flatten(),
                ignore_index=PADDING,
                reduction="sum",
            )
        (loss * factor).backward()
