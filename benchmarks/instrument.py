"""Count what a step of a stage's script does, and take windows of the limit.

The script stays as it is. `variables` are for the environment of its command: with them
Python imports startup/sitecustomize.py first in each process of the run, also in those
that a launcher starts or the script spawns, and that calls `install`. All else happens
in torch's public hooks, above all the one that follows an optimizer step.

In the first epoch, which warms up, the processes count the collectives per step and the
bytes that one of them gives to them, the times that Python waits for the device, and
the memory. After the last step of every epoch all of them take a window of the limit
(limit.py) of as many steps, so each epoch but the first has one shortly before and one
shortly after it. The script's clock goes on meanwhile: the seconds that this takes are
among the results, and compare.py subtracts them.

To measure memory there are no windows. The memory is then what a process takes beyond
its imports, in two steps in which the C library gives back what is freed: otherwise the
peak is that of its heap, which the order of the sizes decides.
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

from benchmarks import limit
from common import data
from common import launch
from tools.counting import Collectives
from tools.counting import Waits
from tools.counting import between_steps
from tools.stages import ROOT

FIRST, LAST = 2, 7  # counted from the end of one step to the end of the other


def variables(path, limits, steps=None):
    """Return the variables of the environment that have a command's processes measure.

    path: the file to which rank 0 writes the results, as JSON; limits: "bare", "ddp" to
    take windows with DDP, too, or "memory"; steps: of an epoch, if there are windows.
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
    `limit`, {"bare" or "ddp": the seconds of each}, and `spent`, the seconds that each
    epoch's windows took with all around them. For memory, `bytes_of_steps`.
    """
    results = {"limit": {}, "spent": []}

    def write():
        if not dist.is_initialized() or dist.get_rank() == 0:
            Path(path).write_text(json.dumps(results))

    if limits == "memory":
        measure_memory(results)
    else:
        take_windows(results, write, steps, with_ddp=limits == "ddp")
    count_steps(results, write)


def peak_bytes():
    """Return the most memory that this process has taken so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def count_steps(results, write):
    """Have this process count what happens between the steps FIRST and LAST."""
    waits, collectives = Waits(), Collectives()
    steps = LAST - FIRST

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


def take_windows(results, write, steps, with_ddp):
    """Have this process take a window of each limit after the last step of an epoch."""
    count = itertools.count(1)
    kinds = {}  # name of a limit: function that takes a step
    in_window = False

    def after_step(optimizer, *_):
        nonlocal in_window
        if in_window:  # it is a step of the limit's own optimizer
            return
        number = next(count)
        if number % steps:
            return
        in_window = True
        args = runpy.run_path(sys.argv[0])["parse_args"]()  # the stage's flags
        args.device = optimizer.param_groups[0]["params"][0].device
        limit.synchronize(args)  # what the stage has begun is its own work
        begin = time.perf_counter()
        if not kinds:
            train_set, _ = data.load_data(args)
            processes = dist.get_world_size() if dist.is_initialized() else 1
            size = args.batch_size // processes
            kinds.update(limit.make_steps(args, train_set, size, with_ddp))
            for step in kinds.values():
                limit.seconds(args, step, 2)  # warms up
        for name, step in kinds.items():
            taken = limit.seconds(args, step, steps)
            results["limit"].setdefault(name, []).append(taken)
        if number == steps * args.epochs:
            kinds.clear()  # a DDP object must not outlive the process group
            gc.collect()
        results["spent"].append(time.perf_counter() - begin)
        write()
        in_window = False

    register_optimizer_step_post_hook(after_step)
