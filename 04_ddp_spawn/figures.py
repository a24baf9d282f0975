"""The pictures in this stage's notebooks. Only given numbers are measured."""

from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
def a_parent_and_its_children():
    """Draw a parent that spawns two processes, which meet through a file."""
    axis = canvas(2.6, (-2, 9), (-0.7, 2.7))
    box(axis, 0, 1, "parent: python train.py\nparses flags, waits", "tab:gray")
    box(axis, 7.5, 1, "a file in a new\ntemporary folder", "tab:orange")
    for rank, y in ((0, 2), (1, 0)):
        box(axis, 4, y, f"worker({rank}, args, folder)")
        arrow(axis, (1.5, 1), (2.7, y))
        arrow(axis, (5.3, y), (6.4, 1), "tab:orange", "<->")
    arrow(axis, (4, 1.6), (4, 0.4), "tab:green", "<->")
    style = {"ha": "center", "va": "center"}
    axis.text(2.3, 1, "spawn", **style)
    axis.text(3.3, 1, "all-reduce,\nevery step", color="tab:green", **style)
    axis.text(5.2, 1, "rendezvous,\nonce", color="tab:orange", **style)
