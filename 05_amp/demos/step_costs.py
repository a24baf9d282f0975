"""What a training step needs, in float32 and under autocast: operations and memory.

is_it_faster.ipynb imports it. All of it is computed on a CPU, with a CPU's lists of
which operation autocast runs in which type.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.model import SmallResNet
from harness.counting import Count


class NormInFloat32(nn.GroupNorm):
    """Group norm as autocast runs it on a GPU."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class Operations(Count):
    """Counts operations that compute or copy, and those that convert to another type.

    Views, which only describe a tensor's memory in another way, do not count.
    """

    count = conversions = 0

    def note(self, operation, *_):
        self.count += not operation.is_view
        self.conversions += operation is torch.ops.aten._to_copy.default


def small_resnet():
    """Return the stages' network, and a batch of 48 images and labels."""
    torch.manual_seed(0)
    model = SmallResNet(channels=1, num_classes=10)
    return model, torch.randn(48, 1, 8, 8), torch.randint(10, (48,))


def wide_layers():
    """Return four linear layers of 1024 x 1024 and one more, and a batch of 8."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    return model, torch.randn(8, 1024), torch.randint(10, (8,))


def small_resnet_as_on_a_gpu():
    """Return the stages' network again, with group norm in float32."""
    model, *batch = small_resnet()
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.__class__ = NormInFloat32
    return model, *batch


def forward(model, inputs, targets, dtype):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return nn.functional.cross_entropy(model(inputs), targets)


def operations(network, dtype):
    """Return how many operations a forward and backward pass has; the conversions."""
    batch = network()
    with Operations() as counted:
        forward(*batch, dtype).backward()
    return counted.count, counted.conversions


def kept_bytes(network, dtype):
    """Return the bytes that the forward pass keeps for the backward pass.

    The float32 weights do not count, which are there in any case.
    """
    model, *batch = network()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward(model, *batch, dtype)
    loss.backward()
    return sum(kept.values())


def memory(network):
    """Return {kind: (MiB in float32, MiB under autocast with bfloat16)}."""
    model, *batch = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    forward(model, *batch, torch.bfloat16).backward()
    optimizer.step()
    tensors = {
        "weights": list(model.parameters()),
        "gradients": [each.grad for each in model.parameters()],
        "optimizer": [state["momentum_buffer"] for state in optimizer.state.values()],
    }
    sizes = {
        kind: [sum(each.nbytes for each in group)] * 2  # autocast changes nothing
        for kind, group in tensors.items()
    }
    sizes["activations"] = [
        kept_bytes(network, dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    return {kind: [size / 2**20 for size in pair] for kind, pair in sizes.items()}
