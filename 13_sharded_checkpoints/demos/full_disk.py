"""Run a script whose last rank cannot write more than 100 kB to a file.

torchrun --standalone --nproc-per-node=2 \
13_sharded_checkpoints/demos/full_disk.py 13_sharded_checkpoints/train.py ...
"""

import os
import resource
import runpy
import sys

if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
