"""The picture on the front page: one step of DistributedDataParallel on four GPUs.

`make pages` draws it, by the function that draws it in the notebook of DDP.
"""

import inspect
from importlib import import_module

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a screen

import matplotlib.pyplot as plt

from tools.stages import ROOT

PICTURE = ROOT / "docs/ddp_step.png"
FIGURE = import_module("03_ddp_launch.figures").ddp_step_on_four_gpus


def description():
    """Return how the picture is drawn, as text.

    It is stored in the file, so that a test can compare it.
    """
    return inspect.getsource(FIGURE)


def draw(path):
    """Draw the picture into a file."""
    plt.close("all")
    FIGURE()
    stored = {"Software": None, "Description": description()}
    plt.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored)
    plt.close("all")
