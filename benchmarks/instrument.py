"""Run a stage's script; count what a step does, and take windows of the limit.

torchrun --standalone --nproc-per-node=2 -m benchmarks.instrument \
FILE LIMITS 03_ddp_launch/train.py FLAGS

In the first epoch, which warms up, it counts the collectives per optimizer step and the
bytes that one process contributes to them (torch's profiler sees those of gloo and of
nccl, also those that DDP starts), the times that Python waits for the device, and the
memory. After every epoch all processes take a window of the limit (benchmarks/limit.py)
of as many steps: so each epoch of the stage has one shortly before and one shortly
after it. LIMITS is `bare`, or `ddp` to take a window with DDP, too. FILE gets the
counts and the windows of rank 0, as JSON.

With `memory` in place of LIMITS there are no windows. The memory is then what the
process takes beyond its imports, in two steps in which the C library gives back what
is freed: otherwise the peak is that of its heap, which the order of the sizes decides.
"""

import ctypes
import functools
import gc
import itertools
import json
import math
import re
import resource
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import limit
from common import launch
from common import meters
from common.args import ArgumentParser

FIRST, LAST = 2, 7  # counted from the end of one step to the end of the other
BYTES = {
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
}
aten = torch.ops.aten
# Python needs a number that the device computes, or the size of a result.
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
COPIES = {aten._to_copy.default, aten.copy_.default}


class Waits(TorchDispatchMode):
    """Counts the operations that make Python wait for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in WAITING:
            self.count += 1
        if function in COPIES:
            source = args[1] if function is aten.copy_.default else args[0]
            devices = {source.device.type, result.device.type}
            pinned = source.device.type == "cpu" and source.is_pinned()
            self.count += devices == {"cpu", "cuda"} and not pinned
        return result


def sent(profiler, steps):
    """Return what a profiler saw: {collective: {"calls": per step, "bytes": ...}}."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = {}
    for event in events:
        name = re.fullmatch("(?:gloo|nccl):(.*)", event.get("name", ""))
        if name:
            shapes = event["args"].get("Input Dims", [])  # a barrier has none
            kinds = event["args"].get("Input type", [])
            seen = found.setdefault(name[1], {"calls": 0, "bytes": 0})
            seen["calls"] += 1
            for shape, kind in zip(shapes, kinds, strict=True):
                seen["bytes"] += math.prod(shape) * BYTES[kind]
    return {
        name: {key: total / steps for key, total in seen.items()}
        for name, seen in found.items()
    }


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def between_steps(first, last, begin, end):
    """Have this process call `begin` and `end`, each after one of its optimizer steps.

    first, last: counted from 1, over all optimizers of the process.
    """
    steps = itertools.count(1)
    calls = {first: begin, last: end}

    def after_step(*_):
        if call := calls.get(next(steps)):
            call()

    register_optimizer_step_post_hook(after_step)


def peak_bytes():
    """Return the most memory that this process has taken so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def count_steps(results):
    """Have this process count what happens between the two steps, into `results`."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )
    waits = Waits()

    def begin():
        profiler.start()
        waits.__enter__()

    def end():
        waits.__exit__(None, None, None)
        profiler.stop()
        results["bytes"] = peak_bytes()
        results["gpu_bytes"] = None
        if torch.cuda.is_available():
            results["gpu_bytes"] = torch.cuda.max_memory_allocated()
        results["waits_per_step"] = waits.count / (LAST - FIRST)
        results["per_step"] = sent(profiler, LAST - FIRST)

    between_steps(FIRST, LAST, begin, end)


def interleave(results, path, get_args, with_ddp):
    """Have this process take a window of each limit after each epoch of the stage.

    After each of them rank 0 writes the results to `path`. get_args: returns the
    stage's flags; with_ddp: whether there is a limit with DDP.
    """
    progress = meters.progress
    take = {}
    epochs = itertools.count(1)

    def interleaved(loader, title, meter, show=True):
        yield from progress(loader, title, meter, show)
        if not title.startswith("epoch"):
            return
        args = get_args()
        limit.synchronize(args)  # what the stage has begun counts as its time
        begin = time.perf_counter()
        if not take:
            sizes = loader.dataset, loader.batch_size
            take.update(limit.make_steps(args, *sizes, with_ddp))
            for step in take.values():
                limit.seconds(args, step, 2)  # warms up
        for name, step in take.items():
            seconds = limit.seconds(args, step, len(loader))
            results["limit"].setdefault(name, []).append(seconds)
        if is_main_process():
            Path(path).write_text(json.dumps(results))
        if next(epochs) == args.epochs:
            take.clear()  # a DDP object must not outlive the process group
            gc.collect()
        meter.start += time.perf_counter() - begin

    meters.progress = interleaved


def measure_memory(results, path):
    """Have this process count what the first two steps take, and rank 0 write it all.

    The steps that are counted come after them, as the profiler takes memory, too.
    """
    before = peak_bytes()
    keep_freed_memory = launch.keep_freed_memory
    launch.keep_freed_memory = lambda: None
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(launch.M_MMAP_THRESHOLD, 2**16)

    def take_peak():
        results["bytes_of_steps"] = peak_bytes() - before
        keep_freed_memory()  # from here on as the stage does, and as fast

    def write():
        if is_main_process():
            Path(path).write_text(json.dumps(results))

    between_steps(FIRST, LAST + 1, take_peak, write)


def instrument(path, limits, get_args):
    """Have this process count and interleave; rank 0 writes the results to `path`."""
    results = {"limit": {}, "per_step": None}
    if limits == "memory":
        measure_memory(results, path)  # before the profiler is started
    count_steps(results)
    if limits != "memory":
        interleave(results, path, get_args, with_ddp=limits == "ddp")


def in_child(path, limits, function, rank, args, *others):
    """Entry point of a process that the script spawns; `args` are its flags."""
    instrument(path, limits, lambda: args)
    function(rank, args, *others)


def main():
    path, limits, *sys.argv = sys.argv[1:]
    parsed = []
    parse_args, spawn = ArgumentParser.parse_args, mp.spawn

    def remember(self, *args, **kwargs):
        parsed.append(parse_args(self, *args, **kwargs))
        return parsed[-1]

    def instrumented_spawn(function, *arguments, **options):
        child = functools.partial(in_child, path, limits, function)
        return spawn(child, *arguments, **options)

    ArgumentParser.parse_args = remember
    mp.spawn = instrumented_spawn
    instrument(path, limits, lambda: parsed[-1])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # In this module, unlike in __main__, a spawned process finds `in_child`.
    from benchmarks.instrument import main

    main()
