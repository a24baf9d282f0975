"""Train stage 10 with steps of two seconds, until the job has been queued again.

SCRIPT=10_preemption/demos/slow_steps.py sbatch 10_preemption/job.sbatch

Otherwise so short a training would be over before its time is.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []


def after_step(*_):
    steps.append(1)
    if len(steps) == 1:
        print("the first step is done", flush=True)
    time.sleep(2)


if "SLURM_RESTART_COUNT" not in os.environ:
    register_optimizer_step_post_hook(after_step)
sys.argv[0] = str(Path(__file__).resolve().parents[1] / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
