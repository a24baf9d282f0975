"""Run a script, and in its step 36 send a signal, as Slurm or a person would.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/signal_in_step_36.py \
TERM 10_preemption/train.py --device cpu --epochs 2

TERM goes to the last rank and its loader's workers. USR1 goes to every process that
srun started: to torchrun and to all ranks.
"""

import os
import runpy
import sys
import time

import psutil
from torch.optim.optimizer import register_optimizer_step_post_hook

name = sys.argv[1]
steps = []


def after_step(*_):
    steps.append(1)
    if len(steps) != 36 or int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:
        return
    this = psutil.Process()
    if name == "TERM":
        members = [*this.children(), this]
    else:
        members = [this.parent(), *this.parent().children()]
    for member in members:
        # a program of its own sends it: workers ask whether their rank was the sender
        psutil.Popen(["kill", f"-{name}", str(member.pid)]).wait()
    if name == "USR1":
        time.sleep(600)  # a launcher that dies of it ends this process meanwhile


register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
