"""Run a script, and kill its last rank while it writes the third checkpoint.

torchrun --standalone --nproc-per-node=2 \
13_sharded_checkpoints/demos/killed_while_saving.py 13_sharded_checkpoints/train.py ...
"""

import os
import runpy
import signal
import sys

from torch.distributed.checkpoint import FileSystemWriter

write_data = FileSystemWriter.write_data
saves = []


def write_and_die(self, plan, planner):
    saves.append(1)
    last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if len(saves) == 3 and last_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return write_data(self, plan, planner)


FileSystemWriter.write_data = write_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
