"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import stretch


def a_step_of_fsdp():
    """Draw a step of FSDP with three blocks: what overlaps, and what is whole when."""
    forward, backward, gather, reduce = 1.5, 2.4, 1.2, 1.4
    computing = COLORS["compute"]
    compute, gathers, reduces, start = [], [(0, 1)], [], gather
    weights, gradients = [(0, gather + forward, 1)], []
    for block in (1, 2, 3):
        compute.append((start, forward, f"F{block}", computing))
        if block < 3:
            gathers.append((start, block + 1))
            # the last block's are freed, and gathered again
            gap = 0.15 if block == 2 else 0
            weights.append((start, 2 * forward - gap, block + 1))
        start += forward
    compute.append((start, gather, "loss", computing))
    gathers.append((start, 3))
    weights.append((start, gather + backward, 3))
    start += gather
    for block in (3, 2, 1):
        compute.append((start, backward, f"B{block}", computing))
        gradients.append((start, backward + reduce, block))
        reduces.append((start + backward, block))
        if block > 1:
            gathers.append((start, block - 1))
            weights.append((start, 2 * backward, block - 1))
        start += backward
    start += reduce
    compute.append((start, 0.9, "step", COLORS["optimizer"]))
    _, (time, held) = plt.subplots(2, 1, figsize=(10, 5), sharex=True)
    for begin, length, text, color in compute:
        stretch(time, 2, begin, length, text, color)
    for begin, block in gathers:
        stretch(time, 1, begin, gather, f"{block}", COLORS["weights"])
    for begin, block in reduces:
        stretch(time, 0, begin, reduce, f"{block}", COLORS["gradients"])
    for text in time.texts:
        text.set_size(12)
    time.set_yticks(range(3), ["reduce-scatter", "all-gather", "compute"], size=12)
    for spans, kind, shift in (
        (weights, "weights", 0.2),
        (gradients, "gradients", -0.2),
    ):
        for begin, length, block in spans:
            style = {"height": 0.36, "color": COLORS[kind], "alpha": 0.5}
            held.barh(block + shift, length, left=begin, **style)
    held.set_yticks((1, 2, 3), [f"block {block}" for block in (1, 2, 3)], size=12)
    for kind in ("weights", "gradients"):
        held.barh(1, 0, color=COLORS[kind], alpha=0.5, label=f"whole {kind}")
    held.legend(loc="upper left", fontsize=12, frameon=False, ncols=2)
    held.set(ylim=(0.4, 4.3), xticks=[])
    held.set_xlabel("time (drawn, not measured)", size=12)
    for axis in (time, held):
        axis.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()
