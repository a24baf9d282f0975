"""Run stage 05's script with an infinite gradient in the last step of an epoch.

torchrun --standalone --nproc-per-node=2 05_amp/demos/infinite_gradient.py --epochs 2

The flags are the script's. Step 30 is the last of epoch 1.
"""

import itertools
import math
import runpy
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook

steps = itertools.count(1)


def before_step(optimizer, *_):
    if next(steps) == 30:
        weight = optimizer.param_groups[0]["params"][0]
        weight.grad[0] = math.inf


register_optimizer_step_pre_hook(before_step)
script = str(Path(__file__).resolve().parents[1] / "train.py")
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
