"""Train an epoch of 30 micro-batches on each of two ranks, four in each step.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/demos/last_group.py
"""

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn


# ---- the lines to copy ---------------------------------------------------------------
def train_one_epoch(ddp, optimizer, loader, n):
    """Take a step after every n micro-batches, and one after those that are left."""
    left = len(loader) % n
    for i, (inputs, targets) in enumerate(loader, start=1):
        size = left if i > len(loader) - left else n  # of the group of this micro-batch
        is_last = i % n == 0 or i == len(loader)
        with nullcontext() if is_last else ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(inputs), targets) / size
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


# ---- mistakes ------------------------------------------------------------------------
LENGTH, N = 30, 4


def by_rule(takes_step, syncs):
    """Return an epoch in which micro-batch i, counted from 0, obeys these two rules."""

    def epoch(ddp, optimizer, loader, n):
        for i, (inputs, targets) in enumerate(loader):
            with nullcontext() if syncs(i) else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(inputs), targets)
            own_size = LENGTH % n if i >= LENGTH - LENGTH % n else n
            (loss / own_size).backward()
            if takes_step(i):
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def groups_at_once(ddp, optimizer, loader, n):
    for first in range(0, len(loader), n):
        inputs, targets = map(torch.cat, zip(*loader[first : first + n], strict=True))
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- the run -------------------------------------------------------------------------
def train(epoch):
    """Train; return the sizes of the steps, what is left over, and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(10, 3).double()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    loader = [(torch.randn(2, 10).double(), torch.arange(2)) for _ in range(LENGTH)]
    sizes = [0]
    model.register_forward_hook(lambda *_: sizes.append(sizes.pop() + 1))
    optimizer.register_step_post_hook(lambda *_: sizes.append(0))
    epoch(ddp, optimizer, loader, N)
    return sizes[:-1], sizes[-1], model.weight.detach().clone()


def main():
    def fourth(i):
        return (i + 1) % N == 0

    def fourth_or_last(i):
        return fourth(i) or i + 1 == LENGTH

    rows = {
        "the lines above": train_one_epoch,
        "(i + 1) % 4 == 0": by_rule(fourth, fourth),
        "i % 4 == 0": by_rule(lambda i: i % N == 0, lambda i: i % N == 0),
        "no_sync until (i + 1) % 4 == 0": by_rule(fourth_or_last, fourth),
    }
    *_, right = train(groups_at_once)
    for name, epoch in rows.items():
        steps, left, weights = train(epoch)
        ours, sum_of_weights = name == "the lines above", weights.clone()
        assert ours == bool((weights - right).abs().max() < 1e-12)
        dist.all_reduce(sum_of_weights)
        difference = (sum_of_weights - 2 * weights).abs().max()
        assert (difference == 0) == (not name.startswith("no_sync"))
        if dist.get_rank() == 0:
            print(
                f"{name:30} steps of {steps[0]}, {steps[1]} ... {steps[-1]};"
                f" left over: {left}; ranks differ by {difference:.0e}"
            )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
