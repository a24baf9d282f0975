"""A small training run in float16 with a loss scaler, in one process, on a CPU.

fp16.ipynb imports it to make mistakes in it: `take_steps` calls a function for what
comes after the forward pass, and that function can be wrong.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.model import make_model

TRAIN_SET, _ = data.load("digits")


class Run:
    """A model, an optimizer and a scaler.

    scale: the loss scale to begin with; growth_interval: after so many steps without an
    overflow the scaler doubles it; adamw: train with AdamW and not with SGD.
    """

    def __init__(self, scale=2.0**16, growth_interval=2000, adamw=False):
        torch.manual_seed(0)
        self.model = make_model("small", channels=1, num_classes=10, image_size=8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        if adamw:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.003)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=growth_interval
        )

    def loss(self, step):
        """Return the loss of a batch of 20 of the first 300 images."""
        first = 20 * step % 300
        inputs, targets = TRAIN_SET.__getitems__(list(range(first, first + 20)))
        with torch.autocast("cpu", torch.float16):
            outputs = self.model(data.normalize(inputs, "digits", torch.float32))
            return nn.functional.cross_entropy(outputs, targets)


def correct(loss, run):
    """What comes after the forward pass, as it should be."""
    run.scaler.scale(loss).backward()
    run.scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()


def take_steps(number, finish, run):
    """Take steps; return the losses and the loss scales of each.

    finish(loss, run): what comes after the forward pass.
    """
    losses, scales = [], []
    for step in range(number):
        loss = run.loss(step)
        losses.append(loss.item())
        scales.append(run.scaler.get_scale())
        run.optimizer.zero_grad()
        finish(loss, run)
    return losses, scales
