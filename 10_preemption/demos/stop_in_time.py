"""A short script of one's own, with the lines that let it resume and stop in time.

It saves at a signal only. A longer run saves every few minutes as well: a crash gives
no warning (stage 09).

torchrun --standalone --nproc-per-node=2 10_preemption/demos/stop_in_time.py
SCRIPT=10_preemption/demos/stop_in_time.py sbatch 10_preemption/job.sbatch
"""

import argparse
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def save(folder, step, model, optimizer):
    """Write what this run needs to resume; a longer script needs more (stage 09)."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "step": step}, folder / "unfinished")
    (folder / "unfinished").rename(folder / f"step-{step:09}.pt")  # it is complete


def load_latest(folder, model, optimizer):
    """Load the latest checkpoint; return its step, or 0 if there is none."""
    found = [max(folder.glob("step-*.pt"), default=None)]
    dist.broadcast_object_list(found)  # otherwise ranks may see different files
    if found[0] is None:
        return 0
    state = torch.load(found[0], map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--seconds", type=float, default=0, help="of each step")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # started by srun (stage 06)
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    dist.init_process_group("gloo")  # on GPUs: nccl, and set_device
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(8, 1)  # this is saved; ddp_model's names begin with `module.`
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = load_latest(args.checkpoint_dir, model, optimizer) + 1

    # 1. Record these signals. By default they end the process.
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: received.append(number))
    # 2. Have the ranks ask each other on their CPUs, even if they train on GPUs.
    cpu_group = dist.new_group(backend="gloo")

    def should_stop():
        count = torch.tensor(len(received))
        dist.all_reduce(count, group=cpu_group)
        return count.item() > 0

    if rank == 0:
        print(f"{dist.get_world_size()} processes, from step {first}", flush=True)
    for step in range(first, 61):
        optimizer.zero_grad()
        ddp_model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(args.seconds)  # stands for a larger model
        # 3. Ask after every step. All ranks get the same answer.
        if should_stop():
            if rank == 0:
                save(args.checkpoint_dir, step, model, optimizer)
            # 4. Wait for rank 0. Launchers end all ranks when one exits with an error.
            dist.barrier()
            print(f"rank {rank} stopped after step {step}\n", end="", flush=True)
            return 143  # 5. Not 0: otherwise nobody starts the run again.
    print(f"rank {rank} took steps {first} to {step}\n", end="", flush=True)
    return 0


if __name__ == "__main__":
    exit_code = main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
    sys.exit(exit_code)
