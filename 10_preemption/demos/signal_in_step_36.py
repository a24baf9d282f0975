"""Run a script, and send SIGTERM to its last rank in step 36, as Slurm would.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/signal_in_step_36.py \
10_preemption/train.py --device cpu --epochs 2
"""

import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []


def after_step(*_):
    steps.append(1)
    is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if len(steps) == 36 and is_last_rank:
        signal.raise_signal(signal.SIGTERM)


register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
