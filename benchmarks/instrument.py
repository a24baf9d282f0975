"""Count what a step of a stage's script does, and take windows of the limit.

The script stays as it is. `variables` are for the environment of its command: with them
Python imports startup/sitecustomize.py first in each process of the run, also in those
that a launcher starts or the script spawns, and that calls `install`. All else happens
in torch's public hooks, above all the one that follows an optimizer step.

In the first epoch, which warms up, the processes count the collectives per step and the
bytes that one of them gives to them, the times that Python waits for the device, and
the memory. After the last step of every epoch all of them take a window of each limit
(limit.py) of as many steps, so each epoch but the first has one shortly before and one
shortly after it. The script's clock goes on meanwhile: the seconds that this takes are
among the results, and compare.py subtracts them. A program with another library has no
windows, and is compared by the time from its first step to its last.

To measure memory there are no windows either. The memory is then what a process takes
beyond its imports, in two steps in which the C library gives back what is freed:
otherwise the peak is that of its heap, which the order of the sizes decides.
"""

import ctypes
import gc
import itertools
import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import limit
from common import launch
from tools.counting import Collectives
from tools.counting import Waits
from tools.counting import between_steps
from tools.stages import ROOT

FIRST, LAST = 2, 7  # counted from the end of one step to the end of the other


def variables(path, limits, steps=None):
    """Return the variables of the environment that have a command's processes measure.

    path: the file to which rank 0 writes the results, as JSON; limits: the kinds of
    windows to take, as for limit.make_steps, or "memory"; steps: of an epoch.
    """
    paths = [ROOT / "benchmarks/startup", ROOT, os.environ.get("PYTHONPATH")]
    wanted = {"path": str(path), "limits": limits, "steps": steps}
    return {
        "PYTHONPATH": os.pathsep.join(str(each) for each in paths if each),
        "BENCHMARK": json.dumps(wanted),
    }


def install(path, limits, steps):
    """Have this process measure; the parameters are those of `variables`.

    The results: `bytes`, the peak at the end of step LAST; `gpu_bytes`, or None;
    `waits_per_step`; `per_step`, {collective: {"calls", "bytes"}}. With windows also
    `limit`, {kind: the seconds of each}, and `spent`, the seconds that each epoch's
    windows took with all around them. `between`: those from the end of an epoch's first
    step to the end of its last. For memory, `bytes_of_steps`.
    """
    results = {"limit": {}, "spent": [], "between": []}

    def write():
        if not dist.is_initialized() or dist.get_rank() == 0:
            Path(path).write_text(json.dumps(results))

    if limits == "memory":
        measure_memory(results)
    else:
        take_windows(results, write, steps, limits)
    count_steps(results, write)


def peak_bytes():
    """Return the most memory that this process has taken so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class WaitsForDevice(Waits):
    """Counts the same, except that AdamW reads how many steps it has taken.

    It keeps that number for each weight, in a tensor that is on the CPU even if the
    weight is on a GPU.
    """

    numbers = frozenset()

    def find_numbers(self, optimizer, *_):
        states = optimizer.state.values()
        self.numbers = {id(state["step"]) for state in states if "step" in state}

    def note(self, operation, args, result):
        if not args or id(args[0]) not in self.numbers:
            super().note(operation, args, result)


def count_steps(results, write):
    """Have this process count what happens between the steps FIRST and LAST."""
    waits, collectives = WaitsForDevice(), Collectives()
    steps = LAST - FIRST
    register_optimizer_step_pre_hook(waits.find_numbers)

    def begin():
        waits.__enter__()
        collectives.__enter__()

    def end():
        collectives.__exit__(None, None, None)
        waits.__exit__(None, None, None)
        results["bytes"] = peak_bytes()
        gpu = torch.cuda.is_available()
        results["gpu_bytes"] = torch.cuda.max_memory_allocated() if gpu else None
        results["waits_per_step"] = waits.count / steps
        results["per_step"] = {
            name: {key: number / steps for key, number in sums.items()}
            for name, sums in collectives.total().items()
        }
        write()

    between_steps(FIRST, LAST, begin, end)


def measure_memory(results):
    """Have this process note the memory that its first two steps take."""
    before = peak_bytes()

    def give_back_freed_memory(*_):
        hook.remove()
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
            mallopt(launch.M_TRIM_THRESHOLD, 2**17)
            mallopt(launch.M_MMAP_THRESHOLD, 2**16)

    def note():
        results["bytes_of_steps"] = peak_bytes() - before
        launch.keep_freed_memory()  # from here on as the stage does, and as fast

    # The model's first parameter: by then the stage has set what the C library does.
    hook = register_module_parameter_registration_hook(give_back_freed_memory)
    between_steps(FIRST, LAST, note, lambda: None)


def take_windows(results, write, steps, kinds):
    """Have this process take a window of each limit after the last step of an epoch."""
    count = itertools.count(1)
    windows = {}  # kind of a limit: function that takes a step
    in_window = False
    first = None  # when the first step of this epoch ended

    def after_step(optimizer, *_):
        nonlocal in_window, first
        if in_window:  # it is a step of the limit's own optimizer
            return
        number = next(count)
        if number % steps == 1:
            first = time.perf_counter()
        if number % steps:
            return
        device = optimizer.param_groups[0]["params"][0].device
        limit.synchronize(device)  # what the script has begun is its own work
        begin = time.perf_counter()
        results["between"].append(begin - first)
        in_window = True
        if kinds:
            args = runpy.run_path(sys.argv[0])["parse_args"]()  # the stage's flags
            args.device = device
            if not windows:
                windows.update(make_windows(args, kinds))
            for kind, step in windows.items():
                taken = limit.seconds(device, step, steps)
                results["limit"].setdefault(kind, []).append(taken)
            if number == steps * args.epochs:
                windows.clear()  # a DDP object must not outlive the process group
                gc.collect()
        results["spent"].append(time.perf_counter() - begin)
        write()
        in_window = False

    register_optimizer_step_post_hook(after_step)


def make_windows(args, kinds):
    """Return {kind: a function that takes a step of that limit}, warmed up."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    train_set = limit.load_train_set(args)
    windows = limit.make_steps(args, train_set, args.batch_size // processes, kinds)
    for step in windows.values():
        limit.seconds(args.device, step, 2)
    return windows
