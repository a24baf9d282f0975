"""Solutions of the exercises in 08_grad_accumulation.ipynb."""

from torch import nn


# ---- exercise 1 ----------------------------------------------------------------------
def steps_needed(batch_size, processes, room):
    return -(-batch_size // (processes * room))


# ---- exercise 2 ----------------------------------------------------------------------
def accumulate(model, images, target):
    total = sum(map(len, target))
    for some, labels in zip(images, target, strict=True):
        loss = nn.functional.cross_entropy(model(some), labels)
        (loss * len(labels) / total).backward()
