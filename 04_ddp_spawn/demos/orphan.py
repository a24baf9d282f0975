"""Kill a parent with SIGKILL, and see whether the process that it spawned lives on.

python 04_ddp_spawn/demos/orphan.py

It runs on Linux only, because prctl exists nowhere else.
"""

import ctypes
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def worker(pid_pipe, protected):
    if protected:  # ask the kernel: when my parent dies, send me SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid_pipe.send(os.getpid())
    time.sleep(60)  # its "training"


def parent(pid_pipe, protected):
    spawn = get_context("spawn")
    spawn.Process(target=worker, args=(pid_pipe, protected)).start()
    time.sleep(60)


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()  # Z: a zombie


def main():
    spawn = get_context("spawn")
    for protected in (False, True):
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=parent, args=(sender, protected))
        process.start()
        orphan = receiver.recv()
        process.kill()  # SIGKILL: the parent cannot react to it
        process.join()
        time.sleep(2)
        left = is_running(orphan)
        name = "with prctl" if protected else "without prctl"
        print(f"{name}: the worker {'is still running' if left else 'is gone, too'}")
        if left:
            os.kill(orphan, signal.SIGKILL)


if __name__ == "__main__":
    main()
