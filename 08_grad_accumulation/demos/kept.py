"""Measure what a model keeps for its backward passes. counted.py imports it."""

import weakref

import torch


class Kept:
    """What autograd holds in place of a tensor, until it has used it."""

    def __init__(self, tensor):
        self.tensor = tensor


def most_kept(model, function):
    """Call a function; return the most MiB that it kept for its backward passes.

    The weights are not counted: they are in memory anyway.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes, most = {}, 0

    def keep(tensor):
        nonlocal most
        storage = tensor.untyped_storage()
        kept = Kept(tensor)
        if storage.data_ptr() not in weights:
            sizes[id(kept)] = (storage.data_ptr(), storage.nbytes())
            weakref.finalize(kept, sizes.pop, id(kept))
            # Two tensors can share their memory: count each address once.
            most = max(most, sum(dict(sizes.values()).values()))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        function()
    return most / 2**20
