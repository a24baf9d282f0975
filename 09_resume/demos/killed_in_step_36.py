"""Run a script, and kill its last rank in step 36, as if its machine had failed.

torchrun --standalone --nproc-per-node=2 09_resume/demos/killed_in_step_36.py \
09_resume/train.py --device cpu --epochs 2

If torchrun starts the rank again, it is not killed again.
"""

import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []


def after_step(*_):
    steps.append(1)
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if len(steps) == 36 and first_start and last_rank:
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
