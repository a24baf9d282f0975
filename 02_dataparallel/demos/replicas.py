"""Do on a CPU what nn.DataParallel does on GPUs, and compare the gradients.

python 02_dataparallel/demos/replicas.py

nn.DataParallel makes replicas of a model on GPUs only. Here they are made on the CPU,
with the method of nn.Module that torch calls for it (torch/nn/parallel/replicate.py).
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.model import make_model


def replicate(module, copy):
    """Return a replica of a module, with `copy(tensor)` for each of its tensors."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replicate(child, copy))
    tensors = {**module._parameters, **module._buffers}
    for name, tensor in tensors.items():
        setattr(replica, name, None if tensor is None else copy(tensor))
    return replica


def data_parallel(model, inputs, gpus):
    """Return the model's outputs, computed as nn.DataParallel does on so many GPUs."""
    outputs = []
    for gpu, part in enumerate(inputs.chunk(gpus)):
        # GPU 0's replica shares the model's tensors. The others get copies, through
        # which the gradients flow back to the model.
        replica = replicate(model, torch.clone if gpu else lambda tensor: tensor)
        outputs.append(replica(part))
    return torch.cat(outputs)


def gradient(train_set, size, gpus):
    """Return the gradient of one batch of `size` images; gpus=0: of the bare model."""
    torch.manual_seed(0)
    model = make_model("small", channels=1, num_classes=10, image_size=8).double()
    inputs, targets = train_set.__getitems__(list(range(size)))
    inputs = data.normalize(inputs, "digits", torch.float64)
    outputs = data_parallel(model, inputs, gpus) if gpus else model(inputs)
    nn.functional.cross_entropy(outputs, targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main():
    train_set, _ = data.load("digits")
    print("largest difference between 4 replicas and the bare model")
    for size in (48, 61):
        parts = " + ".join(str(len(part)) for part in torch.arange(size).chunk(4))
        whole, split = (gradient(train_set, size, gpus) for gpus in (0, 4))
        apart = (whole - split).abs().max()
        print(f"gradient of a batch of {parts} images: {apart:.0e}")
        assert apart < 1e-10


if __name__ == "__main__":
    main()
