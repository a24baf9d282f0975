"""More of what a forked process does to itself: see tests/fault_injection.py.

These are for the tests of resuming and of preemption.
"""

import functools
import importlib
import itertools
import os
import signal
import subprocess
import time
import types
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from common import checkpointer
from common import data
from common.model import GPT
from tests.fault_injection import no_large_files
from tests.fault_injection import signalled


def signalled_in_call(call, module, function, name, ranks=("0", "1", "2", "3")):
    """Have these ranks send themselves a signal in the n-th call of a function.

    module, function: one in common/ that the script calls as `module.function(...)`,
    or several, separated by "or". The signal arrives just before the function does
    anything.
    """
    module = importlib.import_module(f"common.{module}")
    calls = itertools.count(1)

    def counted(original, *args, **options):
        if next(calls) == call and os.environ["RANK"] in ranks:
            os.kill(os.getpid(), getattr(signal, name))
        return original(*args, **options)

    for each in function.split(" or "):
        setattr(module, each, functools.partial(counted, getattr(module, each)))


def signalled_in_different_steps(name, steps):
    """Have each rank send itself a signal in a step of its own; steps: {rank: step}."""
    for rank, step in steps.items():
        signalled(step, name, ranks=[rank])


def signalled_from_outside(step, name):
    """Have another process send a signal to this one and its children in a step.

    So does Slurm, to every process of a job. The children are the loaders' workers,
    which can see who sent it.
    """
    derive_seed = data.derive_seed

    def watched(*key):
        if key[1] == step:
            for process in (*psutil.Process().children(), psutil.Process()):
                send = f"kill -{name.removeprefix('SIG')} {process.pid}"
                subprocess.run(["sh", "-c", send], check=True)
            time.sleep(0.2)  # the workers get the time to end, if that is what they do
        return derive_seed(*key)

    data.derive_seed = watched


def a_minute_per_look_at_the_clock():
    """Have the clock of the Checkpointer advance by a minute each time it is read."""
    clock = types.SimpleNamespace(monotonic=itertools.count(0, 60).__next__)
    checkpointer.time = clock


def blind(*ranks):
    """Have these ranks not see the checkpoints, as without a shared disk."""
    exists = Path.exists

    def seen(path):
        hidden = path.name.startswith("step-") and os.environ["RANK"] in ranks
        return not hidden and exists(path)

    Path.exists = seen


def broadcasts_printed():
    """Have the process print each object that is broadcast, after it has arrived."""
    broadcast = dist.broadcast_object_list

    def printed(objects, *args, **options):
        broadcast(objects, *args, **options)
        print("broadcast:", *map(repr, objects), flush=True)

    dist.broadcast_object_list = printed


def blind_and_broadcasts_printed(*ranks):
    blind(*ranks)
    broadcasts_printed()


def unable_to_write(rank, most):
    """Have one rank write no file that is larger, as if its disk was full."""
    if os.environ["RANK"] == rank:
        no_large_files(most)


def killed_while_loading(rank):
    """Have one rank kill itself when it is to read its shards."""

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == rank:
        FileSystemReader.read_data = kill


def devices_of_the_model_printed():
    """Have the process print where the weights are before they are sharded."""
    to = GPT.to

    def printed(model, dtype):
        print("weights on", *{each.device.type for each in model.parameters()})
        return to(model, dtype)

    GPT.to = printed
