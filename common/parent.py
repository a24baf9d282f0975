"""A process that does not outlive the one that started it."""

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def die_with_parent():
    """Have the kernel kill this process (SIGKILL) when its parent dies; on Linux only.

    A parent that is killed has no chance to stop its children. See prctl(2). A child of Python's
    multiprocessing also notices, on any system, that its parent died before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
