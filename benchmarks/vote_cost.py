"""Measure what stage 10's agreement on a signal costs a step, on two processes.

python -m benchmarks.vote_cost [STEPS]
"""

import importlib.util
import math
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tools.stages import ROOT


def cast_vote():
    """Return stage 10's function of this name."""
    path = ROOT / "10_preemption/train.py"
    spec = importlib.util.spec_from_file_location("stage_10", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cast_vote


def measure(rank, folder, steps):
    """Print what a vote adds to a step: as in stage 10, and waited for at once."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", timedelta(seconds=60), 2, rank
    )
    vote = cast_vote()
    args = SimpleNamespace(checkpoint_minutes=math.inf)
    ckpt = SimpleNamespace(minutes_since_save=lambda: 0.0)
    group = dist.new_group(backend="gloo")
    matrix = torch.randn(500, 500)
    for wait_at_once in (False, True):
        spent = []
        decision = vote(args, ckpt, [], group)
        for _ in range(steps):
            for _ in range(4):  # some milliseconds of work, like a step
                matrix @ matrix
            start = time.perf_counter()
            decision.wait()
            decision = vote(args, ckpt, [], group)
            if wait_at_once:
                decision.wait()
            spent.append(time.perf_counter() - start)
        if rank == 0:
            how = "waited for at once" if wait_at_once else "looked at a step later"
            print(
                f"{how}: {1e3 * statistics.median(spent):.2f} ms per step", flush=True
            )
    dist.destroy_process_group()


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, steps), nprocs=2)


if __name__ == "__main__":
    main()
