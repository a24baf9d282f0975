"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import stretch


def one_step_of_micro_batches():
    """Draw one optimizer step of three micro-batches, without no_sync and with it."""
    _, axes = plt.subplots(2, 1, figsize=(10, 3.4), sharex=True)
    forward, backward, reduce, ahead = 1, 2, 2.4, 1.2
    for axis, no_sync in zip(axes, (False, True), strict=True):
        start = 0
        for n in range(3):
            middle = start + forward
            stretch(axis, 1, start, forward, f"F{n + 1}", COLORS["compute"])
            stretch(axis, 1, middle, backward, f"B{n + 1}", COLORS["compute"])
            start = middle + backward
            if n == 2 or not no_sync:
                stretch(
                    axis, 0, start - ahead, reduce, "all-reduce", COLORS["gradients"]
                )
                start += reduce - ahead
        stretch(axis, 1, start, 0.8, "step", COLORS["optimizer"])
        title = "with no_sync: 1 all-reduce"
        if not no_sync:
            title = "without no_sync: 3 all-reduces"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(yticks=(0, 1), yticklabels=("network", "each rank"), xticks=[])
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time (drawn, not measured)")
    plt.tight_layout()
    plt.show()
