"""The networks: small ones of our own, and torchvision's by name."""

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


class Attention(nn.Module):
    """Causal self-attention: a position sees itself and those before it.

    Maps [B, T, width] to the same shape.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        # A head's queries, keys and values are next to each other, and the number of
        # heads is not fixed here: a slice of the rows of `qkv` can be whole heads.
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [B, heads, T, head_dim]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention, then a small network at each position; each adds to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer as in GPT-2 (Radford et al., 2019), without dropout.

    Maps int64 tokens [B, T], with T at most `context_length`, to logits
    [B, vocabulary, T]: at each position those of the token after it. This is the order
    that nn.functional.cross_entropy expects.

    Norms are in front of the layers, and positions are learned. Layer norm looks at one
    position at a time and GELU is smooth, so it computes the same on any number of
    processes; see SmallResNet.
    """

    def __init__(self, vocabulary, context_length, width=64, depth=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw all initial weights, also of a model that was made without memory.

        As in GPT-2: normal with a standard deviation of 0.02. Each block adds to its
        input twice; the layers that do are smaller by the root of the number of such
        additions, so that the sum does not grow with the depth.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                adds = name.endswith((".out", ".down"))
                std = 0.02 / (2 * len(self.blocks)) ** 0.5 if adds else 0.02
                nn.init.normal_(module.weight, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        # contiguous, because FSDP warns of an output that is a view
        return self.head(self.norm(x)).transpose(1, 2).contiguous()


def decay_groups(model, weight_decay):
    """Return an optimizer's parameter groups: matrices decay; biases and norms do not.

    Biases and the factors of norms are vectors, and few: decay does not make the model
    simpler there, and it holds norms below the scale that they should have.
    """
    parameters = list(model.parameters())
    return [
        {
            "params": [each for each in parameters if each.dim() >= 2],
            "weight_decay": weight_decay,
        },
        {
            "params": [each for each in parameters if each.dim() < 2],
            "weight_decay": 0.0,
        },
    ]


@torch.no_grad()
def generate(model, prompt, count, temperature=0.8, seed=0):
    """Return `count` bytes that a GPT on bytes draws, one by one, after `prompt`.

    prompt: bytes, at least one. Each byte is drawn by the probabilities that
    the model gives it after the bytes before, as many as it can look back to.
    temperature: below 1 the likely ones get likelier;
    at 0 the likeliest is taken. The numbers come from a generator of its own, on the
    CPU, so they are the same on every rank and every device.
    """
    training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    context_length = model.positions.num_embeddings
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(count):
        context = torch.tensor([tokens[-context_length:]], device=device)
        logits = model(context)[0, :, -1].double().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            chances = (logits / temperature).softmax(0)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(training)
    return bytes(tokens[len(prompt) :])


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
