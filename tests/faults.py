"""What a process does to itself, as a `prepare` of tests/running.py.

It stands by itself because the forks import it: to import a file of tests takes them seconds.
"""

import itertools
import os
import resource
import signal
from pathlib import Path

from common import data

import torch


def signalled(step, *names, ranks=("0", "1", "2", "3")):
    """Have these ranks send themselves signals in the middle of a step."""
    seed_of = data.seed_of

    def watched(*key):
        if key[1] == step and os.environ["RANK"] in ranks:
            for name in names:
                os.kill(os.getpid(), getattr(signal, name))
        return seed_of(*key)

    data.seed_of = watched  # which the loop calls once per step


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


def no_step():
    """Have every optimizer step fail."""
    torch.optim.SGD.step = None
