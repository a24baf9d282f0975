"""Muon and FSDP2: does it work on sharded weights, and what does a step send?

`torch.optim.Muon` does: it computes with DTensors, which gather what a product of
matrices needs. Give it the matrices of the hidden layers, and AdamW all the rest:
embeddings, the head, biases, norms. An optimizer that orthogonalizes each rank's rows
by themselves, on `parameter.to_local()`, trains other weights without an error. The
price is communication in each optimizer step: a dozen collectives for each matrix. For
large models, there are variants that let each rank do whole matrices. A checkpoint
keeps both optimizers, by the names of the weights: pass them as a list to
`get_state_dict` (not run here).

$ torchrun --standalone --nproc-per-node=2 recipes/muon_fsdp.py
three steps in float64: within 1e-12 of one process's
a step of each rank's rows by themselves: off by more than 1e-3
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
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


def train(model, device, rank=0, world_size=1):
    """Take three steps on a rank's part of the samples.

    Returns all weights as one vector, and the collectives of the last step of Muon.
    """
    optimizers = make_optimizers(model.hidden, model.head)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(24, 30, generator=generator)[rank::world_size].to(device)
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        with CommDebugMode() as counter:
            optimizers[0].step()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    weights = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    vector = nn.utils.parameters_to_vector(weights)
    return vector, sum(counter.get_comm_counts().values())


def step_of_muon(weight, gradient):
    """Return a matrix after a step of Muon with this gradient."""
    weight = nn.Parameter(weight.detach().clone())
    weight.grad = gradient
    torch.optim.Muon([weight], lr=0.02).step()
    return weight.detach()


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
    expected, _ = train(Model(device), device)
    model = Model(device)
    fully_shard(model.hidden)
    fully_shard(model)
    found, collectives = train(model, device, *place)
    assert (found - expected).abs().max() < 1e-12
    assert place[1] == 1 or 16 <= collectives <= 40  # of two matrices

    weight, gradient = torch.randn(
        2, 48, 30, generator=torch.Generator().manual_seed(7)
    )
    rows = zip(weight.chunk(place[1]), gradient.chunk(place[1]), strict=True)
    by_rows = torch.cat([step_of_muon(*each) for each in rows])
    wrong = (by_rows - step_of_muon(weight, gradient)).abs().max()
    assert (wrong > 1e-3) == (place[1] > 1)
    if place[0] == 0:
        print("three steps in float64: within 1e-12 of one process's")
        print("a step of each rank's rows by themselves: off by more than 1e-3")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
