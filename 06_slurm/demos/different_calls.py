"""Rank 0 makes a call that rank 1 does not make; each prints the calls it has made.

torchrun --standalone --nproc-per-node=2 06_slurm/demos/different_calls.py
"""

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # of gloo, and not public

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=5))
gradient, loss = torch.ones(1000), torch.ones(1)
try:
    dist.all_reduce(gradient, group=group)
    if rank == 0:
        dist.broadcast(loss, src=0, group=group)
    dist.all_reduce(gradient, group=group)
except RuntimeError as error:
    entries = json.loads(_dump_fr_trace_json())["entries"]
    calls = [f"{e['collective_seq_id']} {e['profiling_name']}" for e in entries]
    print(f"rank {rank} made: {', '.join(calls)}\nrank {rank} got: {error}\n", end="")
    dist.barrier()  # until the other one has printed, too
    raise
