"""Multiply the losses of micro-batches by different factors; compare the gradients.

python 08_grad_accumulation/demos/factors.py
"""

import torch
from torch import nn

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(15, 10).double(), torch.arange(15) % 3


def gradient(model, n, factor):
    """Return the gradient that n micro-batches add up to.

    factor: a function of a micro-batch's size, by which its mean loss is multiplied.
    """
    model.zero_grad()
    parts = zip(INPUTS.tensor_split(n), TARGETS.tensor_split(n), strict=True)
    for some, labels in parts:
        loss = nn.functional.cross_entropy(model(some), labels)
        (loss * factor(len(labels))).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def by_size(size):
    return size / len(TARGETS)


def main():
    model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3)).double()
    whole = gradient(model, 1, by_size)
    print("micro-batches of", [len(part) for part in TARGETS.tensor_split(4)])
    factors = {"1": lambda _: 1, "1 / 4": lambda _: 1 / 4, "size / 15": by_size}
    for name, factor in factors.items():
        ours = gradient(model, 4, factor)
        length, off = ours.norm() / whole.norm(), (ours - whole).norm() / whole.norm()
        print(f"loss * {name:9}: {length:.3f} times the right length, off by {off:.0e}")
        assert (off < 1e-12) == (factor is by_size)


if __name__ == "__main__":
    main()
