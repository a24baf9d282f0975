"""Draw how two ranks write a checkpoint, and how three ranks read it."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nbtools import figures

FILES = [(1.7, "__0_0.distcp\nrows 0-127"), (0.3, "__1_0.distcp\nrows 128-255")]
READERS = [(2.1, "rank 0\nrows 0-85"), (1, "rank 1\nrows 86-171")]
READERS += [(-0.1, "rank 2\nrows 172-255")]


def folder(axis, x, name):
    """Draw a folder with the two ranks' files."""
    style = {"fill": False, "edgecolor": "0.5", "linestyle": "--"}
    axis.add_patch(plt.Rectangle((x - 1.15, -0.4), 2.3, 3.15, **style))
    axis.text(x, 2.45, name, ha="center", weight="bold", family="monospace")
    for y, text in FILES:
        figures.box(axis, x, y, text, "tab:blue")


def draw():
    axis = figures.canvas(3.2, (-0.9, 11.4), (-1, 3.2))
    for rank, (y, _) in enumerate(FILES):
        figures.box(axis, 0, y, f"rank {rank}")
        figures.arrow(axis, (0.5, y), (2, y))
    folder(axis, 3.1, ".step-6.tmp")
    figures.arrow(axis, (4.3, 1), (5.7, 1), "tab:red")
    axis.text(5, 1.15, "rename", color="tab:red", ha="center")
    axis.text(5, 0.6, "when all\nhave written", ha="center", va="center", fontsize=8)
    folder(axis, 6.9, "step-6")
    for y, text in READERS:
        figures.box(axis, 10.5, y, text, "tab:orange")
    for file, reader in ((0, 0), (0, 1), (1, 1), (1, 2)):
        start, end = FILES[file][0], READERS[reader][0]
        figures.arrow(axis, (8, start), (9.5, end))
    axis.text(1.5, -0.85, "saved by 2 ranks", ha="center")
    axis.text(9, -0.85, "loaded by 3 ranks", ha="center")
    plt.show()
