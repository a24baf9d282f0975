"""A short script of one's own, with the lines that let it stop in time.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/stop_in_time.py CHECKPOINT
"""

import gc
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def save(path, step, model, optimizer):
    """Write what this run needs to resume; a longer script needs more (stage 09)."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    new = path.with_suffix(".new")
    torch.save({**state, "step": step}, new)
    new.replace(path)


def load(path, model, optimizer):
    """Return the step of the checkpoint, or 0 if there is none."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main(checkpoint):
    dist.init_process_group("gloo")  # on GPUs: nccl
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = load(checkpoint, model, optimizer) + 1

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

    for step in range(first, 61):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        # 3. Ask after every step. All ranks get the same answer.
        if should_stop():
            if rank == 0:
                save(checkpoint, step, model, optimizer)
            # 4. Wait for rank 0. Launchers end all ranks when one exits with an error.
            dist.barrier()
            print(f"rank {rank} stopped after step {step}\n", end="", flush=True)
            return 143  # 5. Not 0: otherwise nobody starts the run again.
    print(f"rank {rank} took steps {first} to {step}\n", end="", flush=True)
    return 0


if __name__ == "__main__":
    exit_code = main(Path(sys.argv[1]))
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
    sys.exit(exit_code)
