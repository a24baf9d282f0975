"""What a process does to itself, as a `prepare` of tests/harness.py.

It stands by itself because the forks import it: to import a file of tests takes them seconds.
"""

import itertools
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

from common import data

import psutil
import torch


def signalled(step, *names, ranks=("0", "1", "2", "3")):
    """Have these ranks send signals to themselves and their children in the middle of a step."""
    derive_seed = data.derive_seed

    def watched(*key):
        if key[1] == step and os.environ["RANK"] in ranks:
            for name in names:
                for child in psutil.Process().children():
                    child.send_signal(getattr(signal, name))
                os.kill(os.getpid(), getattr(signal, name))
        return derive_seed(*key)

    data.derive_seed = watched  # which the loop calls once per step


def killed_at(call, name):
    """Have the process kill itself just before the n-th call of a function that writes."""
    owner = {"fsync": os, "replace": Path, "unlink": Path}[name]
    original, calls = getattr(owner, name), itertools.count(1)

    def counted(*args, **options):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(owner, name, counted)


def no_large_files(most):
    """Limit the size of a file, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def slow_to_write(seconds):
    """Have every file take so long to be written, as a large one does."""
    fsync = os.fsync

    def slow(descriptor):
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


def signalled_and_slow_to_write(step, seconds):
    """Have all ranks get SIGTERM in the middle of a step, and write slowly."""
    signalled(step, "SIGTERM")
    slow_to_write(seconds)


def no_step(start_method=None):
    """Have every optimizer step fail; start the workers of loaders by this method."""
    torch.optim.SGD.step = None
    multiprocessing.set_start_method(start_method, force=True)
