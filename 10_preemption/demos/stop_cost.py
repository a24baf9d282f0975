"""Measure what it costs to ask all ranks after every step.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/stop_cost.py
"""

import gc
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS, REPEATS = 50, 3


def step(model):
    """Compute gradients and average them."""
    model(torch.ones(8, 256)).sum().backward()


def ask():
    """Begin to add up how many signals each rank has received; do not wait."""
    count = torch.tensor(0)
    return count, dist.all_reduce(count, async_op=True)


def without(model):
    for _ in range(STEPS):
        yield step(model)


def at_once(model):
    for _ in range(STEPS):
        step(model)
        count, answer = ask()
        yield answer.is_completed()
        answer.wait()
        assert count.item() == 0


def a_step_later(model):
    count, answer = ask()
    for _ in range(STEPS):
        step(model)
        yield answer.is_completed()
        answer.wait()
        assert count.item() == 0
        count, answer = ask()
    answer.wait()


def measure(way, model):
    """Return the milliseconds per step, and in how many steps the answer was there."""
    start = time.perf_counter()
    there = sum(map(bool, way(model)))
    return 1e3 * (time.perf_counter() - start) / STEPS, there


def main():
    dist.init_process_group("gloo")
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    for way in (without, at_once, a_step_later):
        measure(way, model)  # the first steps are slower
        times, there = zip(*[measure(way, model) for _ in range(REPEATS)], strict=True)
        if dist.get_rank() == 0:
            print(f"{way.__name__}: {statistics.median(times):.2f} ms per step")
            if way is not without:
                often = sum(there) >= 0.9 * STEPS * REPEATS
                share = "at least" if often else "fewer than"
                print(f"{way.__name__}: an answer in {share} 9 of 10 steps")


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
