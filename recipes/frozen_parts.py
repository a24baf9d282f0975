"""A frozen teacher, and layers that are unfrozen later: what does DDP average?

DDP notes when it is made which parameters require a gradient. A model without any, such
as a teacher, it refuses: "DistributedDataParallel is not needed when a module doesn't
have any parameter that requires a gradient". Call a teacher without a wrapper, and load
its weights on every rank. What is unfrozen after wrapping is not averaged, and there is
no error. So when you unfreeze, make a new wrapper of the model; the optimizer can stay.
Or wrap before you freeze, with `find_unused_parameters=True`.

$ torchrun --standalone --nproc-per-node=2 recipes/frozen_parts.py
unfrozen, the same wrapper: equal to one process: False, ranks differ: True
unfrozen, a new wrapper: equal to one process: True, ranks differ: False
wrapped, then frozen: equal to one process: True, ranks differ: False
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def unfreeze(part, model):
    """Unfreeze a part of a model; return the model's new wrapper."""
    part.requires_grad_(True)
    return DistributedDataParallel(model)


# ---- the proof -----------------------------------------------------------------------
def make_student():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(8, 16), nn.SiLU())
    return nn.Sequential(encoder, nn.Linear(16, 2))


def steps(student, wrapped, optimizer, numbers, rank, world_size):
    """Train a student on this rank's part of each batch of 12 samples."""
    device = next(student.parameters()).device
    torch.manual_seed(1)  # on every rank the same teacher
    teacher = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2))
    teacher.to(device).requires_grad_(False)
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(12, 8, generator=generator)[rank::world_size].to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), teacher(inputs)).backward()
        optimizer.step()


def train(how, device, rank, world_size):
    """Train with a frozen encoder, then without; return all weights."""
    student = make_student().to(device)
    wrapped, encoder = student, student[0]
    if how == "wrapped, then frozen":
        wrapped = DistributedDataParallel(student, find_unused_parameters=True)
    encoder.requires_grad_(False)
    if "wrapper" in how:
        wrapped = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    steps(student, wrapped, optimizer, range(5), rank, world_size)
    if how == "unfrozen, a new wrapper":
        wrapped = unfreeze(encoder, student)
    encoder.requires_grad_(True)
    steps(student, wrapped, optimizer, range(5, 10), rank, world_size)
    return nn.utils.parameters_to_vector(student.parameters()).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        DistributedDataParallel(nn.Linear(1, 1).to(device).requires_grad_(False))
    except RuntimeError as error:
        assert "not needed when a module doesn't have any parameter" in str(error)
    else:
        raise AssertionError("DDP has wrapped a teacher")
    expected = train("one process", device, 0, 1)
    for how in (
        "unfrozen, the same wrapper",
        "unfrozen, a new wrapper",
        "wrapped, then frozen",
    ):
        weights = train(how, device, rank, world_size)
        others = [torch.empty_like(weights) for _ in range(world_size)]
        dist.all_gather(others, weights)
        differ = any((other - weights).abs().max() > 1e-10 for other in others)
        equal = (weights - expected).abs().max().item() < 1e-10
        wrong = how == "unfrozen, the same wrapper" and world_size > 1
        assert (equal, differ) == (not wrong, wrong)
        if rank == 0:
            text = f"equal to one process: {equal}, ranks differ: {differ}"
            print(f"{how}: {text}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
