"""Checks of what a launcher set up, this process's device, and signals.

The scripts join the process group themselves. What stands here only checks, and says in
one line what is missing or contradictory.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys

import torch

from common.args import fail

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
# What Slurm, Kubernetes and launchers send to a run that is to stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def check_batch_size(args, world_size):
    """Fail unless `world_size` processes can divide the global batch equally."""
    if args.batch_size % world_size:
        fits = max(1, round(args.batch_size / world_size)) * world_size
        fail(
            f"--batch-size {args.batch_size} is the global batch: it must be divisible"
            f" by the number of processes ({world_size}); try {fits}"
        )


def check_environment(args):
    """Check RANK, WORLD_SIZE and LOCAL_RANK, which a launcher sets, and the batch size.

    A variable that is missing, is not a number or contradicts the others ends the
    program with one line; so does a global batch that the processes cannot divide
    equally.
    """
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ.get(name, "")
        if not text.isdecimal():
            lines = sys.modules["__main__"].__doc__.splitlines()
            commands = " or ".join(line for line in lines[2:] if line)
            what = f"is {text!r}, not a number" if text else "is not set"
            fail(f"{name} {what}; a launcher sets it: start with {commands}")
        values[name] = int(text)
    if not values["LOCAL_RANK"] <= values["RANK"] < values["WORLD_SIZE"]:
        shown = " ".join(f"{name}={value}" for name, value in values.items())
        fail(f"{shown} contradict each other; leave them to the launcher")
    check_batch_size(args, values["WORLD_SIZE"])


def keep_freed_memory():
    """Have the C library keep the memory that tensors on the CPU free; with glibc only.

    By default it gives memory back to the kernel after each step, and gets it again
    page by page during the next one. That is a tenth of a step's time. See mallopt(3).
    """
    if os.name != "posix":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that it accepts


def get_device(args, local_rank):
    """Return the CPU, or the GPU whose index is `local_rank`, as --device asks."""
    if args.device.type == "cpu":
        keep_freed_memory()
        return args.device
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        fail(
            f"--device cuda: local rank {local_rank} has no GPU, since {gpus} are"
            " visible; start one process per GPU, and let every process see all GPUs"
            " of its machine"
        )
    return torch.device("cuda", local_rank)


def has_master_address():
    """Return whether MASTER_ADDR is set, and MASTER_PORT is the number of a port."""
    port = os.environ.get("MASTER_PORT", "")
    is_port = port.isdecimal() and int(port) < 2**16
    return is_port and bool(os.environ.get("MASTER_ADDR"))


@contextlib.contextmanager
def hint(message):
    """If the block cannot connect, fail with one line: `message`, then torch's own.

    torch raises ValueError if MASTER_ADDR or MASTER_PORT is missing or wrong, and for
    other reasons, too: if the two are right, a ValueError is passed on.
    """
    try:
        yield
    except (
        ValueError,
        torch.distributed.DistNetworkError,
        torch.distributed.DistStoreError,
    ) as error:
        if isinstance(error, ValueError) and has_master_address():
            raise
        fail(f"{message}: {' '.join(str(error).split())}")


def die_with_parent(parent_pid):
    """Have the kernel kill this process (SIGKILL) when its parent dies; on Linux only.

    A parent that is killed cannot stop its children. See prctl(2). parent_pid: what
    os.getppid() returned before the slow imports; if that process has died meanwhile,
    this one ends with exit code 1. A process that was started by hand, in a shell, is
    left alone, since the shell may end first.
    """
    parent = multiprocessing.parent_process()  # None unless multiprocessing started it
    if parent is None and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun sets it
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid or (parent and not parent.is_alive()):
        sys.exit(1)


def catch_signals():
    """Record SIGTERM and SIGUSR1 instead of ending; return the list they go to.

    The list holds the signals' numbers. Launchers may send a signal twice, the second
    time while the first is being handled: appending to a list is safe then.
    """
    received = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    return received


@contextlib.contextmanager
def default_signals(received):
    """Let SIGTERM and SIGUSR1 end the process in this block, also one `received`."""
    handlers = {
        number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS
    }
    try:
        if received:
            signal.raise_signal(received[0])
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
