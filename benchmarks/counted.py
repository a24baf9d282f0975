"""Run a stage's script, and count what its processes send to each other in each step.

torchrun --standalone --nproc-per-node=2 -m benchmarks.counted \
FILE 03_ddp_launch/train.py FLAGS

torch's profiler sees every collective of gloo and of nccl, including those that DDP
starts. FILE gets, per optimizer step, the number of collectives of each kind and the
bytes that one process contributes to them, and the peak memory allocated on its GPU.
"""

import functools
import itertools
import json
import math
import re
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST, LAST = 2, 7  # counted from the end of one step to the end of the other
BYTES = {
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
}


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


def count(path):
    """Have this process write to `path` what it sends between the two steps."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )
    steps = itertools.count(1)

    def after_step(*_):
        step = next(steps)
        if step == FIRST:
            profiler.start()
        elif step == LAST:
            profiler.stop()
            if not dist.is_initialized() or dist.get_rank() == 0:
                seen = {"per_step": sent(profiler, LAST - FIRST), "gpu_bytes": None}
                if torch.cuda.is_available():
                    seen["gpu_bytes"] = torch.cuda.max_memory_allocated()
                Path(path).write_text(json.dumps(seen))

    register_optimizer_step_post_hook(after_step)


def counted(path, function, rank, *arguments):
    """Entry point of a process that the script spawns."""
    count(path)
    function(rank, *arguments)


def main():
    path, *sys.argv = sys.argv[1:]
    spawn = mp.spawn

    def counting_spawn(function, *arguments, **options):
        return spawn(functools.partial(counted, path, function), *arguments, **options)

    mp.spawn = counting_spawn
    count(path)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # In this module, unlike in __main__, a spawned process finds `counted`.
    from benchmarks.counted import main

    main()
