"""A process that does not outlive the one that started it.

The scripts import this module before all that takes long to import: it remembers who the parent is
while that parent is still there.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

PARENT = os.getppid()
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def die_with_parent():
    """Have the kernel kill this process (SIGKILL) when its parent dies; on Linux only.

    A parent that is killed has no chance to stop its children. See prctl(2). If the parent has died
    since this module was imported, this process ends with exit code 1. A process that was started
    by hand, in a shell, is left alone: its shell may end first.
    """
    starter = multiprocessing.parent_process()  # None, unless Python's multiprocessing started it
    if starter is None and "TORCHELASTIC_RUN_ID" not in os.environ:  # which torchrun sets
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != PARENT or (starter is not None and not starter.is_alive()):
        sys.exit(1)
