"""Compare how long dcp.save and dcp.async_save stop two processes.

torchrun --standalone --nproc-per-node=2 13_sharded_checkpoints/demos/standstill.py

With "no-group", async_save uses the group in which training computes, and the run
aborts.
"""

import gc
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor

MIB, ROUNDS = 64, 5


def make_state():
    """Return tensors of 64 MiB, of which each rank has its shards."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(2**20, dtype=torch.float32).view(1024, 1024)  # 4 MiB
    return {
        str(n): distribute_tensor(whole + n, mesh, [Shard(0)]) for n in range(MIB // 4)
    }


def compare(state, group, folder):
    """Return medians in seconds, and for each round what async_save had left to do.

    That is whether it returned before the files were complete, and how many steps
    training took until they were.
    """
    seconds = {"save": [], "async_save": [], "async_save, until it is written": []}
    early, steps = [], []
    for n in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        dcp.save(state, checkpoint_id=f"{folder}/save-{n}", process_group=group)
        seconds["save"].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        path = Path(folder, f"async-{n}")
        pending = dcp.async_save(state, checkpoint_id=path, process_group=group)
        seconds["async_save"].append(time.perf_counter() - start)
        early.append(not (path / ".metadata").exists())
        steps.append(train_until(pending))
        pending.result()
        seconds["async_save, until it is written"].append(time.perf_counter() - start)
        assert (path / ".metadata").exists()
    medians = {name: sorted(each)[ROUNDS // 2] for name, each in seconds.items()}
    return medians, early, steps


def train_until(pending):
    """Gather weights as FSDP does in each step, until a save has ended on all ranks."""
    steps, busy = 0, True
    shard = torch.zeros(2**16)
    while busy:
        shard[0] = not pending.done()
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        busy = any(each[0] for each in shards)
        steps += 1
    return steps


def main(folder):
    state = make_state()
    if "no-group" in sys.argv:
        pending = dcp.async_save(state, checkpoint_id=f"{folder}/async")
        train_until(pending)
        pending.result()
        return
    group = dist.new_group(backend="gloo")
    seconds, early, steps = compare(state, group, folder)
    if dist.get_rank() == 0:
        for name, each in seconds.items():
            sys.stderr.write(f"{name}: {1000 * each:.0f} ms\n")
        print("async_save returned before the files were there:", all(early))
        # the first step may only find that the save has ended
        print("until they were, training took steps:", max(steps) > 1)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # rank 0's
        main(folders[0])
        dist.barrier()
    gc.collect()
    dist.destroy_process_group()
