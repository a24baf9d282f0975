"""A script for the launcher of 2018, which passed the local rank as a flag.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/old_local_rank.py
"""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
rank = os.environ["RANK"]
print(f"rank {rank} takes GPU {args.local_rank}\n", end="", flush=True)
