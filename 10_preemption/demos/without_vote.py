"""Do what signal_in_step_36.py does, with ranks that each look at their own signals.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/without_vote.py TERM \
10_preemption/train.py --device cpu --epochs 2
"""

import runpy
from pathlib import Path

import torch
import torch.distributed as dist

all_reduce = dist.all_reduce


class NoVote:
    """Stands in for the all-reduce: its result is this rank's own vote."""

    def __init__(self, vote):
        self.vote = vote

    def get_future(self):
        future = torch.futures.Future()
        future.set_result([self.vote])
        return future


def own_vote(tensor, *args, async_op=False, **kwargs):
    return NoVote(tensor) if async_op else all_reduce(tensor, *args, **kwargs)


dist.all_reduce = own_vote
runpy.run_path(str(Path(__file__).with_name("signal_in_step_36.py")))
