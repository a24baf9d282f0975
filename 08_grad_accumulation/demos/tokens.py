"""Accumulate the loss per token, over micro-batches and ranks, in three ways.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/demos/tokens.py
"""

import contextlib
import gc

import torch
import torch.distributed as dist
from torch import nn

PADDING = -100  # where there is no token to predict: cross_entropy leaves these out
# The lengths of the sequences: two micro-batches of two sequences on each rank.
LENGTHS = [[[3, 9], [30, 2]], [[5, 40], [8, 8]]]


def make_micro_batch(lengths):
    """Return tokens and targets [B, T], the targets padded."""
    tokens, targets = torch.randint(50, (2, len(lengths), max(lengths)))
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = PADDING
    return tokens, targets


def count(micro_batch):
    return (micro_batch[1] != PADDING).sum().item()


def summed_loss(model, micro_batch):
    tokens, targets = micro_batch
    logits = model(tokens).flatten(0, 1)
    loss = nn.functional.cross_entropy
    return loss(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")


def gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    batches = [[make_micro_batch(one) for one in shard] for shard in LENGTHS]
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).double()

    # The right answer: all sequences on one process, the mean over all their tokens.
    everything = [one for shard in batches for one in shard]
    loss = sum(summed_loss(model, one) for one in everything)
    (loss / sum(map(count, everything))).backward()
    wanted = gradient(model)

    ddp = nn.parallel.DistributedDataParallel(model)
    mine = batches[rank]
    own = torch.tensor(sum(map(count, mine)))
    total = own.clone()
    dist.all_reduce(total)  # once per step: the tokens of all ranks
    own, total = own.item(), total.item()

    # What each micro-batch's summed loss is multiplied by.
    ways = {
        "mean per micro-batch, divided by N": [
            1 / count(one) / len(mine) for one in mine
        ],
        "sum, divided by the rank's tokens": [1 / own] * len(mine),
        "sum, divided by all ranks' tokens": [world_size / total] * len(mine),
    }
    errors = []
    for name, factors in ways.items():
        ddp.zero_grad()
        for n, (one, factor) in enumerate(zip(mine, factors, strict=True), start=1):
            with contextlib.nullcontext() if n == len(mine) else ddp.no_sync():
                loss = summed_loss(ddp, one) * factor
            loss.backward()
        errors.append(((gradient(model) - wanted).norm() / wanted.norm()).item())
        if rank == 0:
            print(f"{name:34}: gradient off by {errors[-1]:.0e}")
    assert errors[2] < 1e-12 < 1e-3 < min(errors[:2])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
