"""Run a script that trains on the digits, with its DDP object warmed up.

torchrun --standalone --nproc-per-node=3 09_resume/demos/warmed_up.py \
09_resume/train.py --device cpu --epochs 2
"""

import runpy
import sys

import torch
from torch import nn

DistributedDataParallel = nn.parallel.DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def warm_up_ddp(wrapped, inputs):
    """Have DDP arrange its buckets before the first step, by a backward pass."""
    wrapped.eval()  # otherwise batch norm counts these inputs, and dropout draws
    wrapped(inputs).sum().backward()
    wrapped.zero_grad()
    wrapped.train()


# ---- the run -------------------------------------------------------------------------
def warmed_up(model):
    """Return what DistributedDataParallel(model) returns, after one backward pass."""
    wrapped = DistributedDataParallel(model)
    dtype = next(model.parameters()).dtype
    warm_up_ddp(wrapped, torch.zeros(1, 1, 8, 8, dtype=dtype))
    return wrapped


nn.parallel.DistributedDataParallel = warmed_up
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
