"""Solutions of the exercises in 08_grad_accumulation.ipynb."""

from torch import nn


# ---- exercise 1 ----------------------------------------------------------------------
# It is the smallest number that divides the local batch and whose micro-batches fit. A
# loop over powers of two misses 3.
def steps_needed(batch_size, processes, room):
    local_batch_size = batch_size // processes
    for n in range(1, local_batch_size + 1):
        if local_batch_size % n == 0 and local_batch_size // n <= room:
            return n


# ---- exercise 2 ----------------------------------------------------------------------
# Each backward pass frees its micro-batch, and adds to .grad. A micro-batch weighs as
# much as it has samples, because the last ones can be smaller.
def backward(model, inputs, targets, n):
    split = inputs.tensor_split(n), targets.tensor_split(n)
    for some, labels in zip(*split, strict=True):
        loss = nn.functional.cross_entropy(model(some), labels)
        (loss * len(labels) / len(targets)).backward()
