"""How do I log to TensorBoard under DDP? There is an event file for every rank.

Create the SummaryWriter, or the W&B run, on rank 0 only. Rank 0's loss covers only its
own samples, so all-reduce the sum and the count of all ranks, and log the quotient. The
all-reduce waits for all ranks, and .item() for the GPU, so do it every few steps.

$ torchrun --standalone --nproc-per-node=2 recipes/logging_rank0.py
1 event file, with a loss at steps [10, 20, 30]
the loss of all samples, as in one process: True
rank 0's own loss is the same: False
1 run of W&B, with the same last loss: True
"""

import gc
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter


# ---- the lines to copy ---------------------------------------------------------------
def make_writer(folder):
    return SummaryWriter(folder) if dist.get_rank() == 0 else None


def log_loss(writer, sums, step):
    """sums: of the losses, and of the samples, since the last log."""
    dist.all_reduce(sums)  # not under `if writer`: it waits for all ranks
    if writer:
        writer.add_scalar("train/loss", sums[0] / sums[1], step)


# ---- the proof -----------------------------------------------------------------------
wandb = importlib.import_module("wandb") if importlib.util.find_spec("wandb") else None


def train(wrap, first, every, log):
    """Train on samples first, first + every, ...; call `log` after every 10 steps."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sums = torch.zeros(2)  # of the losses, and of the samples, since the last log
    for step in range(1, 31):
        torch.manual_seed(step)
        samples = torch.randn(24, 16)[first::every]
        optimizer.zero_grad()
        target = samples.sum(1, keepdim=True).sin()
        loss = nn.functional.mse_loss(model(samples), target)
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * len(samples)
        sums[1] += len(samples)
        if step % 10 == 0:
            log(step, sums)
            sums.zero_()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    rank, world_size = dist.get_rank(), dist.get_world_size()
    temporary = tempfile.TemporaryDirectory()
    folder = [temporary.name]  # rank 0's on all ranks: a second event file would show
    dist.broadcast_object_list(folder, src=0)
    writer = make_writer(folder[0])
    run = wandb.init(dir=folder[0], mode="offline") if wandb and rank == 0 else None
    own, one = [], []

    def log(step, sums):
        own.append((sums[0] / sums[1]).item())
        log_loss(writer, sums, step)
        if run:
            run.log({"train/loss": sums[0] / sums[1]}, step, commit=True)

    train(DistributedDataParallel, rank, world_size, log)
    train(nn.Sequential, 0, 1, lambda _, sums: one.append((sums[0] / sums[1]).item()))
    if writer:
        writer.close()
        (file,) = Path(folder[0]).glob("events.*")
        logged = EventAccumulator(str(file)).Reload().Scalars("train/loss")
        values = torch.tensor([event.value for event in logged])
        equal = torch.allclose(values, torch.tensor(one), rtol=1e-6)  # in float32
        same = torch.allclose(torch.tensor(own), torch.tensor(one), rtol=1e-2)
        print(f"1 event file, with a loss at steps {[event.step for event in logged]}")
        print(f"the loss of all samples, as in one process: {equal}")
        print(f"rank 0's own loss is the same: {same}")
        if run:
            assert abs(run.summary["train/loss"] - one[-1]) < 1e-6
            run.finish()
            (_,) = Path(folder[0]).glob("wandb/offline-run-*")
            print("1 run of W&B, with the same last loss: True")
        assert equal and same == (world_size == 1)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
