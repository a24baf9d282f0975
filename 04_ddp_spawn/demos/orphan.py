"""Kill a parent with SIGKILL, and see whether the process that it spawned lives on.

python 04_ddp_spawn/demos/orphan.py

It runs on Linux only, because prctl exists nowhere else.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

import torch.multiprocessing as mp

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
CASES = {  # whether SIGINT is ignored, and whether the worker asks for SIGKILL
    "mp.spawn alone": (False, False),
    "SIGINT ignored": (True, False),
    "SIGINT ignored, and prctl with SIGKILL": (True, True),
}


def worker(rank, pid_pipe, protected):  # noqa: ARG001 (mp.spawn passes the rank)
    if protected:  # ask the kernel: when my parent dies, send me SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid_pipe.send(os.getpid())
    time.sleep(300)  # its "training"


def parent(pid_pipe, ignored, protected):
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    signal.signal(signal.SIGINT, handler)  # the worker inherits what is ignored
    mp.spawn(worker, (pid_pipe, protected), nprocs=1)


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()  # Z: a zombie


def main():
    spawn = mp.get_context("spawn")
    started = []
    for flags in CASES.values():
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=parent, args=(sender, *flags))
        process.start()
        started.append((process, receiver))
    orphans = [receiver.recv() for _, receiver in started]
    for process, _ in started:
        process.kill()  # SIGKILL: the parent cannot react to it
        process.join()
    end = time.monotonic() + 60  # by then, those that end have ended
    while sum(map(is_running, orphans)) > 1 and time.monotonic() < end:
        time.sleep(0.1)
    for name, orphan in zip(CASES, orphans, strict=True):
        left = is_running(orphan)
        print(f"{name}: the worker {'is still running' if left else 'is gone, too'}")
        if left:
            os.kill(orphan, signal.SIGKILL)


if __name__ == "__main__":
    main()
