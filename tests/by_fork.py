"""torchrun and mp.spawn, with processes that are forks and need not import torch again.

    python tests/by_fork.py torchrun --standalone --nproc-per-node=2 TRAIN.PY ...
    python tests/by_fork.py python TRAIN.PY ...

The first is torchrun with its own options `--run-path --start-method=fork`. To import
torch takes most of the time of a short run; this one imports it once.
"""

import atexit
import gc
import os
import re
import runpy
import sys
from pathlib import Path

AS_USUAL = {"-m", "--module", "--no-python", "--max-restarts"}


def spawn_by_fork():
    """Have mp.spawn fork its processes, which have torch then."""
    from torch import multiprocessing as mp

    def call_in_child(rank, function, *arguments):
        # as its script did, in the parent
        function.__globals__["PARENT_PID"] = os.getppid()
        function(rank, *arguments)

    def spawn(fn, args=(), nprocs=1, join=True, daemon=False):
        args = (fn, *args)
        return mp.start_processes(call_in_child, args, nprocs, join, daemon, "fork")

    mp.spawn = spawn


def run_script(script, *arguments):
    """Be a process that executes a script."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def import_torch():
    """Import what the scripts do, and what an optimizer imports when it is made."""
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torchvision  # noqa: F401

    # OMP_NUM_THREADS was read here, and is not read in forks
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    gc.collect()
    gc.freeze()  # otherwise every fork looks for garbage among the objects of torch
    atexit.register(gc.unfreeze)  # otherwise extension modules report leaks at the end


def become(arguments):
    """Become a Python that was started as usual."""
    os.execv(sys.executable, [sys.executable, *arguments])


def main(program, *arguments):
    # A rank that dies and is restarted is reported in other words if it is a fork.
    words = {word.partition("=")[0] for word in arguments}
    if program == "torchrun" and not AS_USUAL & words:
        import_torch()
        from torch.distributed import run

        run.run_script_path = run_script
        run.main(["--run-path", "--start-method=fork", *arguments])
    elif program == "torchrun":
        become(["-m", "torch.distributed.run", *arguments])
    elif arguments[0].endswith(".py") and re.search(
        r"\bmp\.spawn\(", Path(arguments[0]).read_text()
    ):
        import_torch()
        spawn_by_fork()
        run_script(*arguments)
    else:
        become(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
