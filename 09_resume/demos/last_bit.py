"""Interrupt a run, resume it, and compare its weights to the last bit.

torchrun --standalone --nproc-per-node=3 09_resume/demos/last_bit.py

It does so with three ways to make the DDP object, and with none, one or two backward
passes before the first step of every run.
"""

import copy
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, INTERRUPTED = 20, 10


def warm_up_ddp(wrapped, inputs):
    """Have DDP arrange its buckets before the first step, by a backward pass."""
    wrapped.eval()  # otherwise batch norm counts these inputs, and dropout draws
    wrapped(inputs).sum().backward()
    wrapped.zero_grad()
    wrapped.train()


def make_model():
    """Return a network with weights that depend on nothing."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def start(warm_ups, **options):
    """Return a new model, the same under DDP, and its optimizer."""
    model = make_model()
    # 0.1 MB instead of 25: otherwise all of this small model is one bucket
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(warm_ups):
        warm_up_ddp(wrapped, torch.zeros(1, 64))
    return model, wrapped, optimizer


def train(interrupted, *args, **options):
    """Return the weights after STEPS steps, as one vector."""
    model, wrapped, optimizer = start(*args, **options)
    for step in range(STEPS):
        if step == interrupted:
            states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            model, wrapped, optimizer = start(*args, **options)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        torch.manual_seed(1000 * dist.get_rank() + step)  # each rank has its own batch
        inputs, targets = torch.randn(16, 64), torch.randint(10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def main():
    dist.init_process_group("gloo")
    for option in ("", "static_graph", "find_unused_parameters"):
        for warm_ups in (0, 1, 2):
            options = {option: True} if option else {}
            whole = train(None, warm_ups, **options)
            difference = whole - train(INTERRUPTED, warm_ups, **options)
            if dist.get_rank() == 0:
                name = option or "default"
                worst = difference.abs().max()
                print(f"{name:22} {warm_ups} warm-ups: off by {worst:.0e}", flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
