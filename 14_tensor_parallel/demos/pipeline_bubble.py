"""Print in which order the processes of a pipeline work, and how long they wait.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/pipeline_bubble.py
"""

# torch's own schedules run a model that does nothing, and each process records the
# order of its passes. From the orders follows when each pass can begin, if a backward
# pass takes twice as long as a forward pass.

import argparse
import os
from collections import deque
from fractions import Fraction

import torch
import torch.distributed as dist
from pipeline import ArgumentParser
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from common import launch
from common.args import fail
from common.args import positive_int

# {name: the schedule, parts of the model on each process}
SCHEDULES = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
}
LENGTHS = {"F": 2, "B": 4}  # slots of a pass through all blocks of a process


# ---- when a pass can begin -----------------------------------------------------------
# A pass is named F2 or B2, forward or backward of micro-batch 2, through the first part
# of the model that a process has. Through its second part it is f2 or b2.
def parts_of(orders):
    """Return how many parts of the model each process has, 1 or 2."""
    return 2 if any(each[0].islower() for order in orders for each in order) else 1


def needed(rank, each, ranks, parts):
    """Return the pass that has to be done before one can begin: (rank, name), or None.

    The input of a forward pass comes from the part before, and the gradient of a
    backward pass from the part after, which are on the neighbors of a process. The
    first part reads the batch, and the last computes the loss.
    """
    part = rank + ranks * each[0].islower()
    part += -1 if each[0] in "Ff" else 1
    if not 0 <= part < ranks * parts:
        return None
    kind = each[0].upper() if part < ranks else each[0].lower()
    return part % ranks, kind + each[1:]


def timeline(orders):
    """Return (name, begin, end) of each pass of each process, in order and in slots.

    orders: of each process, the names of its passes in order, such as ["F0", "B0"].
    Raises ValueError if two processes would wait for each other.
    """
    parts, ranks = parts_of(orders), len(orders)
    waiting = [deque(order) for order in orders]
    rows = [[] for _ in orders]
    ends = {None: 0}
    while any(waiting):
        before = len(ends)
        for rank, passes in enumerate(waiting):
            while passes and (first := needed(rank, passes[0], ranks, parts)) in ends:
                each = passes.popleft()
                free = rows[rank][-1][2] if rows[rank] else 0
                begin = max(free, ends[first])
                end = begin + LENGTHS[each[0].upper()] // parts
                rows[rank].append((each, begin, end))
                ends[rank, each] = end
        if len(ends) == before:
            raise ValueError(f"each process waits for another: {orders}")
    return rows


def bubble(rows):
    """Return the share of the time in which a process waits, as a Fraction."""
    length = max(row[-1][2] for row in rows)
    work = sum(end - begin for row in rows for _, begin, end in row)
    return 1 - Fraction(work, length * len(rows))


def held(row, parts=1):
    """Return {slot: micro-batches that a process holds from then on}.

    A micro-batch is held from the beginning of its forward pass to the end of its
    backward pass; in one of two parts it counts half.
    """
    changes = {}
    for each, begin, end in row:
        forward = each[0] in "Ff"
        slot, change = (begin, 1) if forward else (end, -1)
        changes[slot] = changes.get(slot, 0) + Fraction(change, parts)
    now, counts = Fraction(0), {}
    for slot in sorted(changes):
        now += changes[slot]
        counts[slot] = now
    return counts


# ---- the order, recorded -------------------------------------------------------------
class RecordedStage(PipelineStage):
    """Has a list to which it appends the names of its passes, as described above."""

    def __init__(self, number, stages, passes):
        super().__init__(NoPart(), number, stages, torch.device("cpu"))
        self.passes = passes
        self.kinds = "FB" if number < dist.get_world_size() else "fb"

    def forward_one_chunk(self, number, *args, **kwargs):
        self.passes.append(f"{self.kinds[0]}{number}")
        return super().forward_one_chunk(number, *args, **kwargs)

    def backward_one_chunk(self, number, *args, **kwargs):
        self.passes.append(f"{self.kinds[1]}{number}")
        super().backward_one_chunk(number, *args, **kwargs)


class NoPart(nn.Module):
    """A part of a model that computes almost nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight * x


def record(name, micro_batches):
    """Run a step with a schedule; return the passes of this process, in order."""
    kind, parts = SCHEDULES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    passes = []
    stages = [
        RecordedStage(rank + part * ranks, parts * ranks, passes)
        for part in range(parts)
    ]
    made = stages if parts > 1 else stages[0]
    schedule = kind(made, micro_batches, loss_fn=nn.functional.mse_loss)
    x = torch.ones(micro_batches, 1)
    inputs = [x] if rank == 0 else []  # torch 2.11 wants none on the others
    schedule.step(*inputs, target=x)  # a process in the middle does not use it
    return passes


def for_picture(orders):
    """Return {schedule: its passes, its bubble, what process 0 holds} for figures.py.

    orders: {name of a schedule: what each process recorded}
    """
    found = {}
    for name, of_ranks in orders.items():
        rows = timeline(of_ranks)
        counts = held(rows[0], parts_of(of_ranks))
        in_flight = [(slot, float(count)) for slot, count in counts.items()]
        found[name] = rows, str(bubble(rows)), in_flight
    return found


# ---- the run -------------------------------------------------------------------------
def parse_args():
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--micro-batches", type=positive_int, default=4, help="parts of a batch")
    return parser.parse_args()


def main():
    args = parse_args()
    launch.check()
    launch.die_with_parent()
    ranks, micro_batches = int(os.environ["WORLD_SIZE"]), args.micro_batches
    if ranks < 2:
        fail("a pipeline needs 2 processes or more: use --nproc-per-node=2")
    if micro_batches % ranks:
        fail(f"--micro-batches {micro_batches} is not a multiple of {ranks} processes")
    dist.init_process_group("gloo")
    for name, (_, parts) in SCHEDULES.items():
        orders = [None] * ranks
        dist.all_gather_object(orders, record(name, micro_batches))
        if dist.get_rank() > 0:
            continue
        waits = bubble(timeline(orders))
        predicted = Fraction(ranks - 1, parts * micro_batches + ranks - 1)
        formula = "(p-1)/(2m+p-1)" if parts == 2 else "(p-1)/(m+p-1)"
        print(f"{name}: bubble {waits}, {formula} = {predicted}")
        for rank, order in enumerate(orders):
            print(f"  process {rank}: {' '.join(order)}", flush=True)
    dist.destroy_process_group()


def read(printed):
    """Return what `main` printed, {schedule: of each process, its passes in order}."""
    orders = {}
    for line in printed.splitlines():
        before, _, after = line.partition(": ")
        if before in SCHEDULES:
            orders[before] = rows = []
        elif before.startswith("  process "):
            rows.append(after.split())
    return orders


if __name__ == "__main__":
    main()
