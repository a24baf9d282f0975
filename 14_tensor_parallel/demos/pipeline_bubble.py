"""Print when the processes of a pipeline work, and when they wait.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/pipeline_bubble.py
"""

# torch's own schedules run a model that does nothing, and each process records the
# order of its passes. From the orders follows when each pass can begin, if all passes
# take equally long. With --milliseconds each pass sleeps so long, and the clock
# measures the bubble, too.

import argparse
import os
import time
from collections import deque
from fractions import Fraction

import torch
import torch.distributed as dist
from pipeline import SCHEDULES
from pipeline import ArgumentParser
from pipeline import RecordedStage
from torch import nn

from common import launch
from common.args import fail
from common.args import number
from common.args import positive_int

NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}  # as the papers write them
IDLE = "."
COLORS = {"F": "tab:blue", "B": "tab:red", IDLE: "white"}
LINES = ("black", "tab:green")  # of two schedules


# ---- when a pass can begin -----------------------------------------------------------
def needed(rank, each, last):
    """Return the pass that has to be done before one can begin: (rank, name), or None.

    The input of a forward pass comes from the process before, and the gradient of a
    backward pass from the process after. The first and the last have their own.
    """
    if each[0] == "F":
        return (rank - 1, each) if rank > 0 else None
    return (rank + 1, each) if rank < last else None


def timeline(orders):
    """Return what each process does in each slot: the name of a pass, or IDLE.

    orders: of each process, the names of its passes in order, such as ["F0", "B0"].
    Raises ValueError if two processes would wait for each other.
    """
    waiting = [deque(order) for order in orders]
    last = len(orders) - 1
    done = {None}
    slots = [[] for _ in orders]
    while any(waiting):
        now = set()
        for rank, passes in enumerate(waiting):
            begins = passes and needed(rank, passes[0], last) in done
            slots[rank].append(passes.popleft() if begins else IDLE)
            if begins:
                now.add((rank, slots[rank][-1]))
        if not now:
            raise ValueError(f"each process waits for another: {orders}")
        done |= now
    return slots


def bubble(slots):
    """Return the share of the slots in which a process waits, as a Fraction."""
    idle = sum(row.count(IDLE) for row in slots)
    return Fraction(idle, sum(len(row) for row in slots))


def held(row):
    """Return how many micro-batches a process holds in each slot of its row."""
    counts, now = [], 0
    for each in row:
        now += each[0] == "F"
        counts.append(now)  # a backward pass still needs what it frees at its end
        now -= each[0] == "B"
    return counts


# ---- the order, recorded -------------------------------------------------------------
class Wait(torch.autograd.Function):
    """Returns its input after some seconds, in the forward and the backward pass."""

    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class WaitingPart(nn.Module):
    """A part of a model that only waits."""

    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x):
        return Wait.apply(self.weight * x, self.seconds)


def record(name, micro_batches, seconds=0.0):
    """Run a step; return the passes of this process, and the seconds that it took."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = RecordedStage(WaitingPart(seconds), rank, ranks, torch.device("cpu"))
    schedule = SCHEDULES[name](stage, micro_batches, loss_fn=nn.functional.mse_loss)
    x = torch.ones(micro_batches, 1)
    for _ in range(2):  # the first step also runs a pass that finds the shapes
        stage.passes.clear()
        dist.barrier()
        start = time.perf_counter()
        schedule.step(x, target=x)  # a process in the middle uses neither
        dist.barrier()
    return stage.passes, time.perf_counter() - start


# ---- the picture ---------------------------------------------------------------------
def draw(timelines):
    """Draw the timelines of two schedules, and what the first process holds.

    timelines: {title: what `timeline` returns}
    """
    from matplotlib import pyplot as plt  # slow to import, and only for a notebook

    length = max(len(rows[0]) for rows in timelines.values())
    _, axes = plt.subplots(
        len(timelines) + 1,
        figsize=(11, 6.6),
        sharex=True,
        height_ratios=[len(rows) for rows in timelines.values()] + [3],
    )
    for axis, (title, rows) in zip(axes, timelines.items(), strict=False):
        for rank, row in enumerate(rows):
            for slot, each in enumerate(row):
                style = {"facecolor": COLORS[each[0]], "edgecolor": "gray"}
                style |= {"hatch": "///"} if each == IDLE else {}
                axis.add_patch(plt.Rectangle((slot, rank), 1, 1, alpha=0.45, **style))
                text = "" if each == IDLE else each
                axis.text(slot + 0.5, rank + 0.5, text, ha="center", va="center")
        names = [f"process {rank}" for rank in range(len(rows))]
        axis.set_yticks([rank + 0.5 for rank in range(len(rows))], names)
        axis.set(xlim=(0, length), ylim=(len(rows), 0), xticks=range(length + 1))
        axis.set_title(title.partition(", (p-1)")[0], loc="left", weight="bold")
    most = 0
    for (title, rows), color in zip(timelines.items(), LINES, strict=True):
        counts = held(rows[0])
        most = max(most, *counts)
        axes[-1].stairs(counts, label=title.partition(":")[0], color=color, lw=2)
    title = "micro-batches in flight on process 0"
    axes[-1].set_title(title, loc="left", weight="bold")
    axes[-1].set(xlabel="slot", ylim=(0, most + 0.5), yticks=range(0, most + 1, 2))
    axes[-1].legend(frameon=False, loc="upper right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()


# ---- the run -------------------------------------------------------------------------
def parse_args():
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--micro-batches", type=positive_int, default=4, help="parts of a batch")
    add("--milliseconds", type=number(float, ge=0), help="that each pass sleeps")
    return parser.parse_args()


def main():
    args = parse_args()
    launch.check()
    ranks, micro_batches = int(os.environ["WORLD_SIZE"]), args.micro_batches
    if ranks < 2:
        fail("a pipeline needs 2 processes or more: use --nproc-per-node=2")
    if micro_batches < ranks:
        fail(f"--micro-batches {micro_batches}: 1f1b needs {ranks} or more")
    dist.init_process_group("gloo")
    seconds = (args.milliseconds or 0) / 1000
    predicted = Fraction(ranks - 1, micro_batches + ranks - 1)
    for name in SCHEDULES:
        passes, took = record(name, micro_batches, seconds)
        orders = [None] * ranks
        dist.all_gather_object(orders, passes)
        if dist.get_rank() > 0:
            continue
        slots = timeline(orders)
        line = f"{NAMES[name]}: {ranks} processes, {micro_batches} micro-batches, "
        print(f"{line}bubble {bubble(slots)}, (p-1)/(m+p-1) = {predicted}")
        for rank, row in enumerate(slots):
            cells = "".join(f"{each:4}" for each in row)
            print(f"  process {rank}: {cells}".rstrip(), flush=True)
        if args.milliseconds:
            waits = 1 - 2 * micro_batches * seconds / took
            print(f"  measured: {took * 1000:.0f} ms, bubble {waits:.3f}", flush=True)
    dist.destroy_process_group()


def read(printed):
    """Return what `main` printed, {the first line of a schedule: its timeline}."""
    timelines = {}
    for line in printed.splitlines():
        if "micro-batches" in line:
            timelines[line] = rows = []
        elif "process " in line:
            rows.append(line.partition(":")[2].split())
    return timelines


if __name__ == "__main__":
    main()
