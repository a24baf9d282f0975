"""Train an epoch of 30 micro-batches on each of two ranks, four in each step.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/demos/last_group.py
"""

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

LENGTH, N = 30, 4


def fourth(i):
    return (i + 1) % N == 0


def fourth_or_last(i):
    return fourth(i) or i + 1 == LENGTH


def wrong_fourth(i):
    return i % N == 0


def train(is_last_of_step, syncs):
    """Train; return the sizes of the steps, what is left over, and a difference.

    is_last_of_step, syncs: for micro-batch i, counted from 0, whether a step follows
    it, and whether it runs outside `no_sync`. The difference is that of the two ranks'
    weights.
    """
    torch.manual_seed(0)
    model = nn.Linear(10, 3).double()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = torch.randn(LENGTH, 2, 10).double(), torch.arange(2)
    steps, group = [], 0
    for i in range(LENGTH):
        group += 1
        with nullcontext() if syncs(i) else ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(inputs[i]), targets)
        own_size = LENGTH % N if i >= LENGTH - LENGTH % N else N
        (loss / own_size).backward()
        if is_last_of_step(i):
            optimizer.step()
            optimizer.zero_grad()
            steps.append(group)
            group = 0
    sum_of_weights = model.weight.detach().clone()
    dist.all_reduce(sum_of_weights)
    difference = (sum_of_weights - 2 * model.weight).abs().max()
    return steps, group, difference


def main():
    rows = {
        "(i + 1) % 4 == 0": (fourth, fourth),
        "i % 4 == 0": (wrong_fourth, wrong_fourth),
        "... or the last": (fourth_or_last, fourth_or_last),
        "... under no_sync": (fourth_or_last, fourth),
    }
    for name, (is_last_of_step, syncs) in rows.items():
        steps, left, difference = train(is_last_of_step, syncs)
        if dist.get_rank() == 0:
            print(
                f"{name:17} steps of {steps[0]}, {steps[1]} ... {steps[-1]};"
                f" left over: {left}; ranks differ by {difference:.0e}"
            )
            assert (difference == 0) == (name != "... under no_sync")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
