"""Accumulate the loss per token, over micro-batches and ranks, in three ways.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/demos/tokens.py
"""

import gc

import torch
import torch.distributed as dist
from loss_per_token import PADDING
from loss_per_token import accumulate
from torch import nn

# The lengths of the sequences: two micro-batches of two sequences on each rank.
LENGTHS = [[[3, 9], [30, 2]], [[5, 40], [8, 8]]]


def make_micro_batch(lengths):
    """Return tokens and targets [B, T], the targets padded."""
    tokens, targets = torch.randint(50, (2, len(lengths), max(lengths)))
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = PADDING
    return tokens, targets


def mean_loss(model, micro_batch):
    """Return the mean over a micro-batch's tokens."""
    tokens, targets = micro_batch
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=PADDING)


def count(*micro_batches):
    return sum((targets != PADDING).sum() for _, targets in micro_batches)


def by_micro_batch(ddp, micro_batches, _):
    """Average the micro-batches' means; DDP averages those of the ranks."""
    for one in micro_batches:
        (mean_loss(ddp, one) / len(micro_batches)).backward()


def by_rank(ddp, micro_batches, _):
    """Take the mean over this rank's tokens; DDP averages the ranks' means."""
    for one in micro_batches:
        weight = count(one) / count(*micro_batches).double()
        (mean_loss(ddp, one) * weight).backward()


def gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def main():
    torch.manual_seed(0)
    batches = [[make_micro_batch(one) for one in shard] for shard in LENGTHS]
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).double()

    # The right answer: all sequences on one process, the mean over all their tokens.
    everything = [one for shard in batches for one in shard]
    loss = sum(mean_loss(model, one) * count(one) for one in everything)
    (loss / count(*everything).double()).backward()
    wanted = gradient(model)

    ddp = nn.parallel.DistributedDataParallel(model)
    ways = {
        "mean per micro-batch, divided by N": by_micro_batch,
        "sum, divided by the rank's tokens": by_rank,
        "sum, divided by all ranks' tokens": accumulate,
    }
    for name, way in ways.items():
        ddp.zero_grad()
        way(ddp, batches[dist.get_rank()], "cpu")
        error = ((gradient(model) - wanted).norm() / wanted.norm()).item()
        if dist.get_rank() == 0:
            print(f"{name:34}: gradient off by {error:.0e}")
        assert (error < 1e-12) == (way is accumulate)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
