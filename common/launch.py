"""Checks of what a launcher set up, this process's device, and signals.

The scripts join the process group themselves. What stands here only checks, and ends
the program with one line and exit code 2 if something is missing or contradictory.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import warnings

import torch

from common.args import fail

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
# What Slurm, Kubernetes and launchers send to a run that is to stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def check():
    """End the program unless a launcher started it.

    A launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    """
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = os.environ.get(name, "")
        if not text.isdecimal():
            lines = sys.modules["__main__"].__doc__.splitlines()
            commands = " or ".join(line for line in lines[2:] if line)
            what = f"is {text!r}, not a number" if text else "is not set"
            fail(f"{name} {what}; a launcher sets it: start with {commands}")
        values[name] = int(text)
    port = values.pop("MASTER_PORT")
    if not values["LOCAL_RANK"] <= values["RANK"] < values["WORLD_SIZE"]:
        shown = " ".join(f"{name}={value}" for name, value in values.items())
        fail(f"{shown} contradict each other; leave them to the launcher")
    if not os.environ.get("MASTER_ADDR") or port >= 2**16:
        fail("MASTER_ADDR is not set, or MASTER_PORT is not a port")


def get_device(device, local_rank):
    """Return the CPU, or the GPU whose index is `local_rank`.

    device: a torch.device of the kind that is asked for. Ends the program if there is
    no such GPU.
    """
    if device.type == "cpu":
        return device
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        fail(
            f"--device cuda: local rank {local_rank} has no GPU, since {gpus} are"
            " visible; start one process per GPU, and let every process see all GPUs"
            " of its machine"
        )
    return torch.device("cuda", local_rank)


def die_with_parent():
    """Have the kernel kill this process (SIGKILL) when its parent dies; on Linux only.

    A launcher that is killed cannot stop its processes. See prctl(2). A process that
    was started by hand, in a shell, is left alone, since the shell may end first. If
    torchrun has died before this call, init_process_group fails after its timeout.
    """
    parent = multiprocessing.parent_process()  # None unless multiprocessing started it
    if parent is None and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun sets it
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and not parent.is_alive():  # it died before that call
            os.kill(os.getpid(), signal.SIGKILL)


def ignore_mesh_warnings():
    """Drop what torch warns of when weights are split over two dimensions of a mesh.

    A norm over both dimensions takes two all-reduces, and a whole weight two gathers.
    The two all-reduces can be made one, but only by a private method,
    DeviceMesh._flatten; the gathers cannot. And what the model returns is a view, of a
    DTensor, which matters only to a caller that writes to it.
    """
    redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
    redistribute.setLevel(logging.ERROR)
    view = "FSDP2-wrapped module .* returned a view tensor"
    warnings.filterwarnings("ignore", view, UserWarning)


def catch_signals():
    """Record SIGTERM and SIGUSR1 instead of ending; return the list they go to.

    The list holds the signals' numbers. Launchers may send a signal twice, the second
    time while the first is being handled: appending to a list is safe then. A Ctrl-C
    after one of them is ignored: it would interrupt the last step.
    """
    received = []

    def record(number, _):
        received.append(number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    for number in STOP_SIGNALS:
        signal.signal(number, record)
    return received
