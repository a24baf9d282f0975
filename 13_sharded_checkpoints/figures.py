"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
def shards_written_and_read():
    """Draw how two ranks write a checkpoint, and how three ranks read it."""
    axis = canvas(4.4, (-1, 11.2), (-0.9, 4.1))
    files = [(1.8, "__0_0.distcp\nrows 0-127"), (0.4, "__1_0.distcp\nrows 128-255")]
    style = {"fill": False, "edgecolor": "0.5", "linestyle": "--"}
    for x, name in ((2.9, ".step-6.tmp"), (7, "step-6")):
        axis.add_patch(plt.Rectangle((x - 1.25, -0.3), 2.5, 4.2, **style))
        font = {"size": 13, "family": "monospace", "weight": "bold"}
        axis.text(x, 3.5, name, ha="center", **font)
        box(axis, x, 2.9, ".metadata", "tab:gray")
        for y, text in files:
            box(axis, x, y, text, COLORS["weights"])
    for rank, (y, _) in enumerate(files):
        box(axis, -0.3, y, f"rank {rank}", "0.9")
        arrow(axis, (0.25, y), (1.75, y))
    arrow(axis, (0.1, 2.15), (2.1, 2.85), "tab:gray")
    axis.text(0.75, 2.65, "last", color="0.4", ha="center", size=13)
    arrow(axis, (4.2, 1.5), (5.7, 1.5))
    axis.text(4.95, 1.65, "rename", ha="center", size=13)
    readers = [(2.9, "rank 0\nrows 0-85"), (1.5, "rank 1\nrows 86-171")]
    readers += [(0.1, "rank 2\nrows 172-255")]
    for y, text in readers:
        box(axis, 10.2, y, text, "0.9")
        arrow(axis, (7.65, 2.9), (9.25, y + 0.25), "0.7")  # each looks up in the index
    for start, end in ((1.8, 2.8), (1.8, 1.6), (0.4, 1.4), (0.4, 0.1)):
        arrow(axis, (8.15, start), (9.25, end))
    axis.text(0.7, -0.8, "saved by 2 ranks", ha="center", size=13)
    axis.text(9.7, -0.8, "loaded by 3 ranks", ha="center", size=13)
