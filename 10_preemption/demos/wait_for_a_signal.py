"""Train stage 10, and wait in step 36 for SIGTERM or SIGUSR1; not after a requeue.

SCRIPT=10_preemption/demos/wait_for_a_signal.py sbatch 10_preemption/job.sbatch

Otherwise so short a training would be over before anybody could interrupt it.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

steps, received = [], []


def note(number):
    """Have a signal noted in `received`, and then handled as before."""
    handler = signal.getsignal(number)

    def noted(*event):
        received.append(number)
        handler(*event)

    signal.signal(number, noted)


def after_step(*_):
    steps.append(1)
    if len(steps) == 1:
        note(signal.SIGTERM)
        note(signal.SIGUSR1)
    if len(steps) == 36 and "SLURM_RESTART_COUNT" not in os.environ:
        if os.environ["RANK"] == "0":
            print("waiting in step 36", flush=True)
        while not received:
            time.sleep(0.05)


register_optimizer_step_post_hook(after_step)
sys.argv[0] = str(Path(__file__).resolve().parents[1] / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
