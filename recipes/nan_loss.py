"""The loss of one rank is nan: how do all ranks notice, and stop or skip together?

Run backward all the same. DDP averages the gradients, so one rank's nan is then in the
gradient of every rank, and all ranks compute the same norm from it: if it is not
finite, all of them skip the step, or all of them stop. This takes no collective, only
the wait for the norm, which clipping computes anyway. Do not skip backward on the one
rank: its next all-reduce is then paired with this step's of the others, so gradients of
different steps are averaged, without an error, and in the end the others wait in vain.
Batch norm's running statistics have taken in a nan of the inputs by then: with batch
norm, load the last checkpoint instead of skipping.

$ torchrun --standalone --nproc-per-node=2 recipes/nan_loss.py
by the norm: every rank skipped step 5, and the weights are the same and finite
by each rank's own loss: rank 0 trained on the mean of steps [1, 2, 3, 4, 5.5, 6.5, 7.5]
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def backward_and_step(loss, model, optimizer):
    """Return whether a step was taken: on every rank, or on none."""
    optimizer.zero_grad()
    loss.backward()  # on every rank, whatever its loss is
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    if norm.isfinite():  # the same on all ranks, since the gradients are the same
        optimizer.step()
        return True
    return False  # to stop instead: sys.exit("...") here, on all ranks


# ---- the proof -----------------------------------------------------------------------
FAULTY_STEP, STEPS = 5, 8


def by_norm(device):
    """Train, with a nan on the last rank; return the steps taken and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(device)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    taken = []
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        inputs = torch.randn(12, 8)[dist.get_rank() :: dist.get_world_size()]
        if step == FAULTY_STEP and dist.get_rank() == dist.get_world_size() - 1:
            inputs[0, 0] = torch.nan
        loss = wrapped(inputs.to(device)).square().mean()
        if backward_and_step(loss, wrapped, optimizer):
            taken.append(step)
    return taken, [weight.tolist() for weight in model.parameters()]


def by_own_loss(device):
    """Return the gradients that a rank gets if the last one skips backward for itself.

    The gradient of step k is k, so the average shows which steps it is of.
    """
    model = nn.Linear(1, 1, bias=False).to(device)
    wrapped = DistributedDataParallel(model)
    gradients = []
    for step in range(1, STEPS + 1):
        faulty = dist.get_rank() == dist.get_world_size() - 1
        if step == FAULTY_STEP and faulty and dist.get_world_size() > 1:
            continue  # wrong: the others are in backward
        if len(gradients) == STEPS - 1:
            break  # otherwise the others wait for a backward that never comes
        model.zero_grad()
        wrapped(torch.full((1, 1), float(step), device=device)).sum().backward()
        gradients.append(round(model.weight.grad.item(), 2))
    return gradients


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everybody = [None] * world_size
    dist.all_gather_object(everybody, by_norm(device))
    steps, weights = everybody[0]
    assert all(result == everybody[0] for result in everybody)
    assert steps == [step for step in range(1, STEPS + 1) if step != FAULTY_STEP]
    assert all(torch.tensor(weight).isfinite().all() for weight in weights)
    gradients = by_own_loss(device)
    for step, gradient in enumerate(gradients, start=1):
        behind = step >= FAULTY_STEP and world_size > 1
        expected = step + 1 / world_size if behind else step
        assert gradient == round(expected, 2)
    if rank == 0:
        print(f"by the norm: every rank skipped step {FAULTY_STEP},", end=" ")
        print("and the weights are the same and finite")
        print("by each rank's own loss: rank 0 trained on the mean of steps", end=" ")
        print([int(g) if g == int(g) else g for g in gradients])


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
