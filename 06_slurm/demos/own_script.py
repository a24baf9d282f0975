"""A script of one's own for gpu_job.sbatch. It imports nothing but torch.

SCRIPT=06_slurm/demos/own_script.py sbatch 06_slurm/gpu_job.sbatch
torchrun --standalone --nproc-per-node=2 06_slurm/demos/own_script.py
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
from torch.nn.parallel import DistributedDataParallel


def setup():
    """Join the other processes; return this one's device."""
    if "RANK" not in os.environ:  # started by srun, not by torchrun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def save(folder, step, model, optimizer):
    """Write a checkpoint, which gets its name when it is complete."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "step": step}, folder / "unfinished.pt")
    (folder / "unfinished.pt").rename(folder / f"step-{step:09}.pt")


def load_latest(folder, model, optimizer):
    """Load the latest checkpoint; return its step, or 0 if there is none."""
    found = [max(folder.glob("step-*.pt"), default=None)]
    dist.broadcast_object_list(found)  # otherwise ranks may see different files
    if found[0] is None:
        return 0
    state = torch.load(found[0], map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0, help="of each step")
    args = parser.parse_args()
    device = setup()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # 1. Record the signals. By default they end the process.
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: received.append(number))
    # 2. A group on the CPUs. In nccl's, the answer would wait for the GPU.
    cpu_group = dist.new_group(backend="gloo")

    done = load_latest(args.checkpoint_dir, model, optimizer)
    if rank == 0:
        print(f"{dist.get_world_size()} processes, {done} steps done", flush=True)
    for step in range(done + 1, args.steps + 1):
        torch.manual_seed(1000 * step + rank)  # stands for the batch of this step
        inputs, targets = torch.randn(16, 64), torch.randint(10, (16,))
        optimizer.zero_grad()
        outputs = ddp_model(inputs.to(device))
        nn.functional.cross_entropy(outputs, targets.to(device)).backward()
        optimizer.step()
        time.sleep(args.seconds)  # stands for a larger model
        # 3. Add up how many signals the ranks have received. All get the same sum.
        count = torch.tensor(len(received))
        dist.all_reduce(count, group=cpu_group)
        stopping = count.item() > 0
        # 4. Save, and have all ranks stay until the file is complete.
        if rank == 0 and (stopping or step % 100 == 0 or step == args.steps):
            save(args.checkpoint_dir, step, model, optimizer)
        if stopping:
            dist.barrier()
            return 143  # 5. Not 0, which says that the training is done.
    return 0


if __name__ == "__main__":
    exit_code = main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
    sys.exit(exit_code)
