"""Accumulate over four micro-batches in several ways; compare the gradients.

python 08_grad_accumulation/demos/factors.py
"""

import torch
from torch import nn

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(15, 10).double(), torch.arange(15) % 3
NORM = 0.1


def make_model(norm=nn.LayerNorm):
    torch.manual_seed(0)
    layers = nn.Linear(10, 32), norm(32), nn.SiLU(), nn.Linear(32, 3)
    return nn.Sequential(*layers).double()


def by_size(size):
    return size / len(TARGETS)


def gradient(model, n=4, factor=by_size, clip=None):
    """Return the gradient that n micro-batches add up to.

    factor: a function of a micro-batch's size, by which its mean loss is multiplied;
    clip: "each" clips after every micro-batch, "once" after the last one.
    """
    parts = INPUTS.tensor_split(n), TARGETS.tensor_split(n)
    for some, labels in zip(*parts, strict=True):
        loss = nn.functional.cross_entropy(model(some), labels)
        (loss * factor(len(labels))).backward()
        if clip == "each":
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
    if clip == "once":
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def compare(name, ours, whole, right=False):
    length, off = ours.norm() / whole.norm(), (ours - whole).norm() / whole.norm()
    print(f"{name:28} {length:.3f} times the right length, off by {off:.0e}")
    assert (off < 1e-12) == right


def main():
    print("micro-batches of", [len(part) for part in TARGETS.tensor_split(4)])
    whole = gradient(make_model(), n=1)
    ways = {"loss * 1": lambda _: 1, "loss * 1 / 4": lambda _: 1 / 4}
    for name, factor in ways.items():
        compare(name, gradient(make_model(), factor=factor), whole)
    compare("loss * size / 15", gradient(make_model()), whole, right=True)
    each, once = (gradient(make_model(), clip=clip) for clip in ("each", "once"))
    clipped = gradient(make_model(), n=1, clip="once")
    compare("clipped after each of them", each, clipped)
    compare("clipped once, at the end", once, clipped, right=True)
    batch_norm = [gradient(make_model(nn.BatchNorm1d), n) for n in (4, 1)]
    compare("batch norm", *batch_norm)


if __name__ == "__main__":
    main()
