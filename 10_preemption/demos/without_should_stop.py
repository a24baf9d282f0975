"""Do what signal_in_step_36.py does, with ranks that each look at their own signals.

torchrun --standalone --nproc-per-node=2 \
10_preemption/demos/without_should_stop.py 10_preemption/train.py \
--device cpu --epochs 2
"""

import runpy
from pathlib import Path

import torch.distributed as dist

all_reduce = dist.all_reduce


def own_answer(tensor, *args, group=None, **kwargs):
    """Leave the tensor as it is if it is for the group in which should_stop asks."""
    if group is None:
        all_reduce(tensor, *args, **kwargs)


dist.all_reduce = own_answer
runpy.run_path(str(Path(__file__).with_name("signal_in_step_36.py")))
