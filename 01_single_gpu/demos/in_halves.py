"""Train on whole batches, and on batches in two parts, and compare the weights.

python 01_single_gpu/demos/in_halves.py

The gradients of the two parts are averaged before each optimizer step, as two processes
average theirs. Everything else is equal: the initial weights, the batches, their order.
"""

import functools
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.model import make_model

WHOLE, HALVES, UNEQUAL = (48,), (24, 24), (30, 18)


def exchange(model, old, new):
    """Put a new layer in the place of each layer of the type `old`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, old):
                setattr(parent, name, new(child))


@functools.cache
def train(sizes, dtype, change):
    """Train for two epochs, on batches in parts of these sizes; return the weights.

    change: a function that changes the model before it is trained.
    """
    torch.manual_seed(0)
    train_set, _ = data.load("digits")
    model = make_model("small", channels=1, num_classes=10, image_size=8)
    change(model)
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    order = torch.cat([torch.randperm(len(train_set)) for _ in range(2)])
    for batch in order.split(48):
        optimizer.zero_grad()
        for part in batch.split(sizes):
            images, targets = train_set.__getitems__(part.tolist())
            outputs = model(data.normalize(images, "digits", dtype))
            loss = nn.functional.cross_entropy(outputs, targets)
            (loss / len(sizes)).backward()  # the average of the parts' gradients
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def as_it_is(model):
    pass


def with_relu(model):
    exchange(model, nn.SiLU, lambda _: nn.ReLU())


def with_batch_norm(model):
    exchange(model, nn.GroupNorm, lambda layer: nn.BatchNorm2d(layer.num_channels))


def main():
    print("largest difference of a weight    float32   float64")
    for name, sizes, change in (
        ("our model", HALVES, as_it_is),
        ("with ReLU", HALVES, with_relu),
        ("with batch norm", HALVES, with_batch_norm),
        ("parts of 30 and 18 images", UNEQUAL, as_it_is),
    ):
        apart = [
            (train(WHOLE, dtype, change) - train(sizes, dtype, change)).abs().max()
            for dtype in (torch.float32, torch.float64)
        ]
        print(f"{name:31} {apart[0]:9.0e} {apart[1]:9.0e}")
        only_rounding = name in ("our model", "with ReLU")
        assert (apart[1] < 1e-10) == only_rounding
        assert name != "our model" or apart[0] < 1e-4


if __name__ == "__main__":
    main()
