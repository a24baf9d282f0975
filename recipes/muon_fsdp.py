"""Muon and FSDP2: does it work on sharded weights, and what does a step send?

`torch.optim.Muon` does: it computes with DTensors, which gather what a product of
matrices needs. Give it the matrices of the hidden layers, and AdamW all the rest:
embeddings, the head, biases, norms. An optimizer that orthogonalizes each rank's rows
by themselves, on `parameter.to_local()`, trains other weights without an error. The
price is communication in each optimizer step: here, 27 collectives for two matrices
(two ranks, torch 2.14). For large models, there are variants that let each rank do
whole matrices. A checkpoint keeps both optimizers, by the names of the weights: pass
them as a list to `get_state_dict`.

$ torchrun --standalone --nproc-per-node=2 recipes/muon_fsdp.py
three steps in float64: within 1e-12 of one process's
each rank's rows by themselves: off by more than 1e-3
resumed from a checkpoint after two steps: within 1e-12
"""

import copy
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode


# ---- the lines to copy ---------------------------------------------------------------
def make_optimizers(hidden, others, lr=0.02, adamw_lr=3e-4):
    """Return Muon for the matrices in `hidden`, and AdamW for all other parameters.

    hidden, others: modules, sharded already.
    """
    matrices = [p for p in hidden.parameters() if p.ndim == 2]
    rest = [p for p in hidden.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=lr)
    return [muon, torch.optim.AdamW([*rest, *others.parameters()], lr=adamw_lr)]


# ---- the proof -----------------------------------------------------------------------
class Model(nn.Module):
    """Two hidden layers and a head. Maps [N, 30] to [N, 4]."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Sequential(nn.Linear(30, 48), nn.SiLU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 4)
        self.to(device)

    def forward(self, inputs):
        return self.head(self.hidden(inputs))


def make(device, sharded):
    """Return a model and its optimizers."""
    model = Model(device)
    if sharded:
        fully_shard(model.hidden)
        fully_shard(model)
    return model, make_optimizers(model.hidden, model.head)


def batch(step, device, rank=0, world_size=1):
    """Return a rank's part of a step's inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 30, generator=generator)
    targets = torch.randn(24, 4, generator=generator)
    return [part[rank::world_size].to(device) for part in (inputs, targets)]


def steps(model, optimizers, numbers, device, *place):
    """Take some steps; place: rank and world size, if this rank takes its part."""
    for step in numbers:
        inputs, targets = batch(step, device, *place)
        nn.functional.mse_loss(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_rows(model, device, rank, world_size):
    """Train as one process, but orthogonalize this rank's rows by themselves.

    Returns this rank's rows of the matrices.
    """
    matrices = [p for p in model.hidden.parameters() if p.ndim == 2]
    rows = [p.detach().chunk(world_size)[rank].clone() for p in matrices]
    muon = torch.optim.Muon(rows, lr=0.02)
    _, others = make_optimizers(model.hidden, model.head)
    for step in range(3):
        inputs, targets = batch(step, device)
        nn.functional.mse_loss(model(inputs), targets).backward()
        for row, matrix in zip(rows, matrices, strict=True):
            row.grad = matrix.grad.chunk(world_size)[rank]
        muon.step()
        others.step()
        model.zero_grad()
        for row, matrix in zip(rows, matrices, strict=True):
            gathered = [torch.empty_like(part) for part in matrix.chunk(world_size)]
            dist.all_gather(gathered, row)
            matrix.data.copy_(torch.cat(gathered))
    return model


def whole(model):
    """Return all weights of a model, sharded or not, as one vector."""
    return nn.utils.parameters_to_vector(
        [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    ).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    # Muon computes in bfloat16, however torch says it; here, only rounding is left.
    torch.bfloat16, torch.Tensor.bfloat16 = torch.float64, torch.Tensor.clone
    place = dist.get_rank(), dist.get_world_size()
    alone = make(device, sharded=False)
    steps(*alone, range(3), device)
    expected = whole(alone[0])

    model, optimizers = make(device, sharded=True)
    steps(model, optimizers, range(2), device, *place)
    state = copy.deepcopy(get_state_dict(model, optimizers))  # as on a disk
    inputs, targets = batch(2, device, *place)
    nn.functional.mse_loss(model(inputs), targets).backward()
    with CommDebugMode() as counter:
        optimizers[0].step()
    optimizers[1].step()
    assert (whole(model) - expected).abs().max() < 1e-12

    resumed, its_optimizers = make(device, sharded=True)
    weights, moments = state
    set_state_dict(
        resumed, its_optimizers, model_state_dict=weights, optim_state_dict=moments
    )
    steps(resumed, its_optimizers, [2], device, *place)
    assert (whole(resumed) - expected).abs().max() < 1e-12
    wrong = whole(by_rows(Model(device), device, *place))
    assert ((wrong - expected).abs().max() > 1e-3) == (place[1] > 1)
    if place[0] == 0:
        print("three steps in float64: within 1e-12 of one process's")
        print("each rank's rows by themselves: off by more than 1e-3")
        print("resumed from a checkpoint after two steps: within 1e-12")
        counts = counter.get_comm_counts().values()
        print(
            f"collectives of a step of Muon, two matrices: {sum(counts)}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
