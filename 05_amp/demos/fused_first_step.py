"""A loss scale that is too high for the first step, and SGD with fused=True.

python 05_amp/demos/fused_first_step.py

The momentum of a fused SGD is then memory that nobody has initialized. What that holds
is chance, so torch is told to fill such memory, with nan.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.counting import Waits

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
}


def train(optimizer_class, options):
    """Take three steps, the first of which overflows; return what is to be printed."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = optimizer_class([weight], lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu")
    weights, waits = [], Waits()
    for factor in (torch.inf, 1, 1):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        with waits:
            scaler.step(optimizer)
        scaler.update()
        weights.append(weight.item())
    shown = " ".join(f"{value:5.2f}" for value in weights)
    return f"weight after each step: {shown}   waits in scaler.step: {waits.count} of 3"


for name, (optimizer_class, options) in OPTIMIZERS.items():
    print(f"{name:13} {train(optimizer_class, options)}")
