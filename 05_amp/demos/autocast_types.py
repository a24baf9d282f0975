"""Print in which type the layers of the stages' network compute under autocast.

python 05_amp/demos/autocast_types.py
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.model import make_model

torch.manual_seed(0)
model = make_model("small", channels=1, num_classes=10, image_size=8)
inputs, targets = torch.randn(48, 1, 8, 8), torch.randint(10, (48,))


def types_of(values):
    return " ".join(sorted({str(value.dtype) for value in values}))


def print_types(module, inputs, output):
    name = type(module).__name__
    print(f"{name:10} {types_of(inputs)} -> {types_of([output])}")


for number in (0, 1, 2, 8):
    model[number].register_forward_hook(print_types)
with torch.autocast("cpu", torch.bfloat16):
    loss = nn.functional.cross_entropy(model(inputs), targets)
loss.backward()
print("loss      ", loss.dtype)
print("weights   ", types_of(model.parameters()))
print("gradients ", types_of(weight.grad for weight in model.parameters()))
