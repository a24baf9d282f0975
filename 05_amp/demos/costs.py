"""What a step needs in float32 and under autocast: operations, and memory.

python 05_amp/demos/costs.py

Counted on a CPU: the operations that compute or copy in a forward and a backward pass,
and the bytes that the forward pass keeps for the backward pass, without the float32
weights, which are there in any case.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.model import SmallResNet
from harness.counting import Count


class Operations(Count):
    count = 0

    def note(self, operation, *_):
        self.count += not operation.is_view  # a view only describes memory differently


class NormInFloat32(nn.GroupNorm):
    """Group norm as autocast runs it on a GPU."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def convolutions(as_on_a_gpu=False):
    """Return the stages' network, and a batch of 48 images and labels."""
    model = SmallResNet(channels=1, num_classes=10)
    for module in model.modules():
        if as_on_a_gpu and isinstance(module, nn.GroupNorm):
            module.__class__ = NormInFloat32
    return model, torch.randn(48, 1, 8, 8), torch.randint(10, (48,))


def wide_layers():
    """Return four linear layers of 1024 x 1024 and one more, and a batch of 8."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    return model, torch.randn(8, 1024), torch.randint(10, (8,))


def costs(model, inputs, targets, autocast):
    """Return the number of operations, and the MiB that are kept."""
    model.zero_grad()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Operations() as counted:
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
    return counted.count, sum(kept.values()) / 2**20


print("                             operations   MiB of activations")
for name, network in (
    ("convolutions, batch of 48", convolutions()),
    ("  norms as on a GPU", convolutions(as_on_a_gpu=True)),
    ("wide layers, batch of 8", wide_layers()),
):
    (before, small), (after, large) = (costs(*network, each) for each in (False, True))
    print(f"{name:28} {before:3} -> {after:3}   {small:10.1f} -> {large:.1f}")
