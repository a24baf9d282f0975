"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
def order_dealt_to_two(order):
    """Draw the first two batches of an epoch, of four samples each, and two ranks.

    order: the indices of the first eight samples.
    """
    colors = "tab:blue", "tab:orange"
    axis = canvas(3.6, (-2.6, 10.6), (-3.6, 1.6))
    for place, index in enumerate(order):
        rank, step = place % 2, place // 4
        x = 1.25 * place + 0.5 * step
        style = {"boxstyle": "round,pad=0.3", "fc": colors[rank], "alpha": 0.4}
        text = {"ha": "center", "va": "center", "size": 15, "bbox": style}
        axis.text(x, 0, f"{index}", **text)
        y = -1.8 - 1.25 * rank
        arrow(axis, (x, -0.4), (x, y + 0.4), colors[rank])
        axis.text(x, y, f"{index}", **text)
    for step, x in enumerate((1.9, 7.4)):
        title = f"step {step + 1}: a global batch of 4"
        axis.text(x, 1.0, title, ha="center", size=15, weight="bold")
    axis.plot([4.63, 4.63], [-3.5, 1.4], color="gray", lw=1, ls="--")
    names = {0: "one process", -1.8: "process 0 of 2", -3.05: "process 1 of 2"}
    for y, name in names.items():
        axis.text(-0.75, y, name, ha="right", va="center", size=15)


@picture
def loading_and_training(load=160, train=100):
    """Draw how batches are loaded and trained on, without workers and with two.

    load, train: the milliseconds of a batch, from which the picture is computed.
    """
    _, axes = plt.subplots(2, 1, figsize=(10, 5.2), height_ratios=(1, 3))
    loads, trains = "tab:orange", "tab:green"

    def piece(axis, row, start, length, batch, color):
        axis.barh(row, length, 0.8, start, color=color, alpha=0.5, ec="white")
        middle = start + length / 2
        axis.text(middle, row, f"{batch}", ha="center", va="center", size=14)

    alone, together = axes
    for batch in range(4):
        start = batch * (load + train)
        piece(alone, 0, start, load, batch + 1, loads)
        piece(alone, 0, start + load, train, batch + 1, trains)
    free, end = [0, 0], 0
    for batch in range(8):
        worker = batch % 2
        piece(together, 2 - worker, free[worker], load, batch + 1, loads)
        free[worker] += load
        end = max(end, free[worker])
        piece(together, 0, end, train, batch + 1, trains)
        end += train
    for axis, title, rows in (
        (
            alone,
            f"no workers, and each step is waited for: {load + train} ms per batch",
            ["the process"],
        ),
        (together, f"two workers: {max(load // 2, train)} ms per batch", ["training"]),
    ):
        rows += ["worker 2", "worker 1"] if axis is together else []
        axis.set_yticks(range(len(rows)), rows, size=14)
        axis.set_title(title, loc="left", size=15, weight="bold")
        axis.set(xlim=(0, 4 * (load + train)), xticks=[])
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axis.tick_params(length=0)
    for text, color in (("load a batch", loads), ("train on it", trains)):
        together.barh(0, 0, color=color, alpha=0.5, label=text)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}
    together.legend(ncols=2, frameon=False, fontsize=14, **below)
    plt.tight_layout()
