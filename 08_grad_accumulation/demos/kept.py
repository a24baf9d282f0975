"""Measure what ResNet-18 keeps for its backward pass.

python 08_grad_accumulation/demos/kept.py
"""

import weakref

import torch
import torchvision


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


def main():
    model = torchvision.models.resnet18()
    weights = sum(weight.nbytes for weight in model.parameters()) / 2**20
    print(f"weights {weights:.0f} MiB; gradients the same, and momentum the same")
    for size in (2, 4, 8):
        images = torch.randn(size, 3, 224, 224)
        kept = most_kept(model, lambda images=images: model(images).sum())
        print(f"{size} images: {kept:4.0f} MiB kept for the backward pass")


if __name__ == "__main__":
    main()
