"""Gradient accumulation: many micro-batches, one average of the gradients."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn


def accumulate_gradients(ddp, micro_batches):
    # The ranks have different numbers of samples, and each knows only its own.
    count = torch.tensor(sum(len(targets) for _, targets in micro_batches))
    dist.all_reduce(count)
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        # The forward pass has to be in here, because there DDP decides whether the
        # backward pass sends. The last one sends what all of them have added up.
        with contextlib.nullcontext() if last else ddp.no_sync():
            outputs = ddp(inputs)
            loss = nn.functional.cross_entropy(outputs, targets, reduction="sum")
            # The sum over the samples of all ranks, divided by their number, is what is
            # wanted. DDP divides by the number of ranks on its own: that is undone.
            (loss * dist.get_world_size() / count).backward()
