"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import picture
from nbtools.drawing import stretch


@picture
def one_step_of_micro_batches():
    """Draw one optimizer step of four micro-batches, without no_sync and with it."""
    _, axes = plt.subplots(2, 1, figsize=(7.5, 3.4), sharex=True)
    forward, backward, reduce, ahead = 1, 2, 2.4, 1.2
    for axis, no_sync in zip(axes, (False, True), strict=True):
        start = 0
        for n in range(4):
            middle = start + forward
            stretch(axis, 1, start, forward, f"F{n + 1}", COLORS["compute"])
            text = f"+B{n + 1}" if n else "B1"
            stretch(axis, 1, middle, backward, text, COLORS["compute"])
            start = middle + backward
            if n == 3 or not no_sync:
                stretch(
                    axis, 0, start - ahead, reduce, "all-reduce", COLORS["gradients"]
                )
                start += reduce - ahead
        stretch(axis, 1, start, 1.1, "step", COLORS["optimizer"])
        title = "with no_sync: 1 all-reduce"
        if not no_sync:
            title = "without no_sync: 4 all-reduces"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(yticks=(0, 1), yticklabels=("network", "each rank"), xticks=[])
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time (drawn, not measured; not to scale)")
    plt.tight_layout()
