"""The networks for images: a small one of our own, and torchvision's by name."""

import torch
import torchvision
from torch import nn


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al., 2016), with group norm."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.activation = nn.SiLU()
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.activation(self.norm1(self.conv1(x)))
        return self.activation(self.norm2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Sequential):
    """A residual network of three blocks, for images of at least 8 x 8 pixels.

    Maps float images [B, channels, H, W] to logits [B, num_classes].

    It has group norm (Wu and He, 2018) instead of batch norm. Batch norm takes its
    statistics over the images of one process, so splitting a batch changes what the
    network computes. Group norm looks at one image at a time.

    Its activation is SiLU instead of ReLU. The order of an addition, and so its last
    bit, depends on the number of processes, and at the kink of a ReLU one bit decides
    between a gradient of 0 and of 1. In float32 two runs then diverge within a few
    epochs; with SiLU they agree to five digits.
    """

    def __init__(self, channels, num_classes, width=16):
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            Block(width, width, stride=1),
            Block(width, 2 * width, stride=2),
            Block(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )


def from_torchvision(name, channels, num_classes, image_size):
    """Return a torchvision classifier; see `make_model`."""
    model = torchvision.models.get_model(name, num_classes=num_classes)
    if isinstance(model, torchvision.models.ResNet) and image_size <= 64:
        # The usual stem for small images, which a ResNet's first layers would shrink to
        # a quarter of their size.
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def make_model(name, channels, num_classes, image_size):
    """Return the small network, or torchvision's classifier of that name.

    Maps float images [B, channels, image_size, image_size] to logits [B, num_classes].
    Raises ValueError if the network cannot take such images, or returns something else.
    """
    if name == "small":
        return SmallResNet(channels, num_classes)
    try:
        model = from_torchvision(name, channels, num_classes, image_size)
        shape = (2, channels, image_size, image_size)
        with torch.no_grad():
            model.eval()(torch.zeros(shape))
        model.train()  # a new module is in training mode
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"cannot take images of {shape[1:]} ({error})") from error
    if name in ("googlenet", "inception_v3"):
        raise ValueError("in training it has more outputs than one")
    return model
