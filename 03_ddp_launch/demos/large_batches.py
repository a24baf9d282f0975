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
def train(batch_size, lr, seed=0):
    """Return the training loss of each epoch and the validation error in percent."""
    torch.manual_seed(seed)
    # neither batch norm nor dropout, so there is no need for model.eval()
    model = SmallResNet(1, 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = len(images) // batch_size  # per epoch
    scheduler = warmup_cosine(optimizer, steps)
    losses = []
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
        losses.append(total / steps)
    with torch.no_grad():
        wrong = model(val_images).argmax(1) != val_labels
    return losses, 100 * wrong.double().mean().item()


def losses_of(batch_size, lr):
    """Return the last training loss with each of the SEEDS, the lowest first."""
    runs = [train(batch_size, lr, seed=seed) for seed in SEEDS]
    return sorted(losses[-1] for losses, _ in runs)


def show(name, batch_size, lr):
    """Print the middle of three runs, and in brackets the lowest and the highest.

    Returns the three losses.
    """
    low, loss, high = losses = losses_of(batch_size, lr)
    runs = [train(batch_size, lr, seed=seed) for seed in SEEDS]
    least, wrong, most = sorted(error for _, error in runs)
    text = f"loss {loss:.3f} ({low:.3f} to {high:.3f})"
    print(f"{name:32} {text}, {wrong:.1f} % wrong ({least:.1f} to {most:.1f})")
    return losses
