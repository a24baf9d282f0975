"""Run a script, and in its step 36 send a signal, as Slurm or a person would.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/signal_in_step_36.py \
TERM 10_preemption/train.py --device cpu --epochs 2

TERM goes to the last rank and its loaders' workers. USR1 goes to torchrun, which under
Slurm is the task that srun has started.
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
    members = [this, *this.children()] if name == "TERM" else [this.parent()]
    # a program of its own sends it: workers ask whether their rank was the sender
    psutil.Popen(["kill", f"-{name}", *(str(member.pid) for member in members)]).wait()
    # for what the signal does to others: a launcher or a worker that it ends
    time.sleep(float(os.environ.get("WAIT", 1 if name == "TERM" else 600)))


register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
