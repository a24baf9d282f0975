"""The networks: a small one of our own, and torchvision's by name."""

import torch
import torchvision
from torch import nn

from common.args import fail


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

    Maps float images [B, channels, H, W] to logits [B, classes].

    It has group norm (Wu and He, 2018) instead of batch norm. Batch norm takes its
    statistics over the images of one process, so splitting a batch changes what the
    network computes. Group norm looks at one image at a time.

    Its activation is SiLU instead of ReLU. The order of an addition, and so its last
    bit, depends on the number of processes, and at the kink of a ReLU one bit decides
    between a gradient of 0 and of 1. In float32 two runs then diverge within a few
    epochs; with SiLU they agree to five digits.
    """

    def __init__(self, channels, classes, width=16):
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            Block(width, width, stride=1),
            Block(width, 2 * width, stride=2),
            Block(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )


def replace(model, old, new):
    """Replace the module `old` in `model` by `new`."""
    name = next(name for name, module in model.named_modules() if module is old)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def from_torchvision(args, channels, classes, size):
    """Return a torchvision model for images [B, channels, size, size]."""
    # Without the auxiliary classifiers of these two there is one output, and one loss.
    options = {}
    if args.arch in ("googlenet", "inception_v3"):
        options["aux_logits"] = False
        if not args.pretrained:
            options["init_weights"] = True
    if args.arch.startswith("vit"):
        options["image_size"] = size
    if args.pretrained:
        try:
            model = torchvision.models.get_model(
                args.arch, weights="DEFAULT", **options
            )
        except (OSError, RuntimeError, ValueError) as error:
            fail(f"--pretrained: no weights for {args.arch} ({error})")
        last = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1]
        if isinstance(last, nn.Linear):
            replace(model, last, nn.Linear(last.in_features, classes))
        else:
            replace(model, last, nn.Conv2d(last.in_channels, classes, last.kernel_size))
    else:
        model = torchvision.models.get_model(args.arch, num_classes=classes, **options)

    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    if channels != first.in_channels:
        replace(model, first, conv_like(first, channels))
    # The usual stem for small images, which a ResNet's first layers would shrink to a
    # quarter of their size.
    is_resnet = isinstance(model, torchvision.models.ResNet)
    if is_resnet and size <= 64 and not args.pretrained:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def conv_like(conv, channels):
    """Return `conv` for other input channels, each with the mean of its weights."""
    new = nn.Conv2d(
        channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        bias=conv.bias is not None,
    )
    with torch.no_grad():
        new.weight.copy_(
            conv.weight.mean(dim=1, keepdim=True) * conv.in_channels / channels
        )
        if conv.bias is not None:
            new.bias.copy_(conv.bias)
    return new


def make_model(args, data_set):
    """Return the network that --arch names, for the images and classes of `data_set`.

    Maps float images [B, C, H, W] to logits [B, classes]. A network that cannot take
    images of that size ends the program with one line.
    """
    channels, size, _ = data_set[0][0].shape
    if args.arch == "small":
        return SmallResNet(channels, data_set.classes)
    try:
        model = from_torchvision(args, channels, data_set.classes, size)
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, size, size))
    except (AssertionError, RuntimeError, ValueError) as error:
        fail(
            f"--arch {args.arch}: cannot take images of {size} x {size} pixels"
            f" ({error})"
        )
    return model
