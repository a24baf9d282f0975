"""The trained model of this notebook and the images it is evaluated on."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.loader import collate
from common.model import make_model
from common.weights import load_weights


def load(path):
    """Return the digits' validation set, and a function: a batch's images to logits."""
    _, val_set = data.load("digits")
    model = make_model("small", channels=1, num_classes=10, image_size=8).eval()
    load_weights(model, path)

    @torch.no_grad()
    def predict(images):
        return model(data.normalize(images, "digits", torch.float32))

    return val_set, predict


def predict_all(path):
    """Return the logits and the targets of the whole validation set."""
    val_set, predict = load(path)
    images, targets = collate(val_set.__getitems__(list(range(len(val_set)))))
    return predict(images), targets
