"""`make pages`: the pictures of docs/.

Each is a PNG that also stores a text, the source of what draws it, so that a test can
see whether the picture is stale.
"""

import functools
import inspect
from importlib import import_module

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a screen

import matplotlib.pyplot as plt
from PIL import Image

from tools import splits
from tools.stages import ROOT

FIGURE = import_module("03_ddp_launch.figures").ddp_step_on_four_gpus

# a picture: the function that draws it, and the function or module that has its source
PICTURES = {
    ROOT / "docs/ddp_step.png": (functools.partial(FIGURE, narrow=True), FIGURE),
    ROOT / "docs/what_can_be_split.png": (splits.seven_ways, splits),
}


def save(path, text):
    """Save matplotlib's current figure as a PNG that stores a text, and close it."""
    stored = {"Software": None, "Description": text}
    plt.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored)
    plt.close()


def stored_text(path):
    """Return the text that `save` stored in a PNG, or None."""
    with Image.open(path) as picture:
        return picture.text.get("Description")


def is_stale(path):
    """Return whether one of PICTURES was drawn by another source than today's."""
    _, source = PICTURES[path]
    return stored_text(path) != inspect.getsource(source)


def draw_all():
    for path, (draw, source) in PICTURES.items():
        draw()
        save(path, inspect.getsource(source))
