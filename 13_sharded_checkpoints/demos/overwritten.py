"""Overwrite a checkpoint in its folder; rank 1 is killed before it opens its file.

torchrun --standalone --nproc-per-node=2 13_sharded_checkpoints/demos/overwritten.py \
FOLDER
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor

write_data = FileSystemWriter.write_data


def write_or_die(self, plan, planner):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return write_data(self, plan, planner)


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
for step in (1.0, 2.0):
    weight = distribute_tensor(torch.full((6,), step), mesh, [Shard(0)])
    dcp.save({"weight": weight}, checkpoint_id=sys.argv[1])
    FileSystemWriter.write_data = write_or_die
