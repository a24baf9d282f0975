"""The trained model of this notebook and the images it is evaluated on."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.loader import collate
from common.model import make_model
from common.weights import load_weights


class Digits(nn.Module):
    """The network of the stages with trained weights; takes images as the set has them.

    In evaluation mode, and without gradients.
    """

    def __init__(self, path):
        super().__init__()
        self.network = make_model("small", channels=1, num_classes=10, image_size=8)
        load_weights(self.network, path)
        self.eval().requires_grad_(False)

    def forward(self, images):
        return self.network(data.normalize(images, "digits", torch.float32))


def load(path):
    """Return the digits' validation set, and the model."""
    _, val_set = data.load("digits")
    return val_set, Digits(path)


def predict_all(path):
    """Return the logits and the targets of the whole validation set."""
    val_set, model = load(path)
    images, targets = collate(val_set.__getitems__(list(range(len(val_set)))))
    return model(images), targets
