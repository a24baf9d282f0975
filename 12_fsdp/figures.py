"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import picture
from nbtools.drawing import stretch


@picture
def a_step_of_fsdp():
    """Draw a step of FSDP with three blocks: what overlaps, and what is whole when."""
    forward, backward, gather, reduce = 1.5, 2.4, 1.2, 1.4
    root, head, computing = 1.4, 1.4, COLORS["compute"]
    compute, gathers, reduces = [], [(0, root, "root"), (root, gather, "1")], []
    weights, gradients = [(root, gather + forward, 1)], []
    start = root + gather
    for block in (1, 2, 3):
        compute.append((start, forward, f"F{block}", computing))
        if block < 3:
            gathers.append((start, gather, f"{block + 1}"))
            # the last block's are freed, and gathered again
            gap = 0.15 if block == 2 else 0
            weights.append((start, 2 * forward - gap, block + 1))
        start += forward
    compute.append((start, head, "loss", computing))
    gathers.append((start, gather, "3"))
    weights.append((start, head + backward, 3))
    loss = start + head / 2  # of which the second half is the backward pass of the head
    start += head
    for block in (3, 2, 1):
        compute.append((start, backward, f"B{block}", computing))
        gradients.append((start, backward + reduce, block))
        reduces.append((start + backward, reduce, f"{block}"))
        if block > 1:
            gathers.append((start, gather, f"{block - 1}"))
            weights.append((start, 2 * backward, block - 1))
        start += backward
    weights.append((0, start, 0))
    gradients.append((loss, start + reduce + root - loss, 0))
    reduces.append((start + reduce, root, "root"))
    start += reduce + root
    compute.append((start, 0.9, "step", COLORS["optimizer"]))
    size = {"figsize": (10, 5.4), "height_ratios": (3, 4)}
    _, (time, held) = plt.subplots(2, 1, sharex=True, **size)
    for begin, length, text, color in compute:
        stretch(time, 2, begin, length, text, color)
    for begin, length, text in gathers:
        stretch(time, 1, begin, length, text, COLORS["weights"])
    for begin, length, text in reduces:
        stretch(time, 0, begin, length, f"+ {text}", COLORS["gradients"])
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
    rows = ["root", "block 1", "block 2", "block 3"]
    held.set_yticks(range(4), rows, size=12)
    for kind in ("weights", "gradients"):
        held.barh(1, 0, color=COLORS[kind], alpha=0.5, label=f"whole {kind}")
    held.legend(loc="upper left", fontsize=12, frameon=False, ncols=2)
    held.set(ylim=(-0.5, 4.3), xticks=[])
    held.set_xlabel("time (drawn, not measured)", size=12)
    for axis in (time, held):
        axis.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
