"""The training of stage 01 in one function, to be called with many batch sizes."""

import functools
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common import data
from common.model import SmallResNet

torch.set_num_threads(1)  # otherwise the last digits depend on the number of cores

# far apart: the order of an epoch follows from seed + epoch
EPOCHS, SEEDS = 6, (0, 100, 200)

(images, labels), (val_images, val_labels) = data.digits()
images, val_images = (
    data.normalize(part, "digits", torch.float32) for part in (images, val_images)
)


def warmup_cosine(optimizer, steps):
    """Return a scheduler that warms up over one epoch, of so many steps."""

    def factor(step):
        if step < steps:
            return (step + 1) / steps
        progress = (step / steps - 1) / (EPOCHS - 1)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


@functools.cache
def train(batch_size, lr, seed):
    """Return the last epoch's training loss, and the validation error in percent."""
    torch.manual_seed(seed)
    # neither batch norm nor dropout, so there is no need for model.eval()
    model = SmallResNet(1, 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = len(images) // batch_size  # per epoch
    scheduler = warmup_cosine(optimizer, steps)
    for epoch in range(1, EPOCHS + 1):
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(images), generator=generator)
        total = 0.0
        for batch in order[: steps * batch_size].split(batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
    with torch.no_grad():
        wrong = model(val_images).argmax(1) != val_labels
    return total / steps, 100 * wrong.double().mean().item()


def losses_of(batch_size, lr):
    """Return the last training loss with each of the SEEDS, the lowest first."""
    return sorted(train(batch_size, lr, seed)[0] for seed in SEEDS)


def show(name, batch_size, lr):
    """Print the middle of three runs, and in brackets the lowest and the highest.

    Returns the three losses.
    """
    low, loss, high = losses = losses_of(batch_size, lr)
    least, wrong, most = sorted(train(batch_size, lr, seed)[1] for seed in SEEDS)
    text = f"loss {loss:.3f} ({low:.3f} to {high:.3f})"
    print(f"{name:32} {text}, {wrong:.1f} % wrong ({least:.1f} to {most:.1f})")
    return losses
