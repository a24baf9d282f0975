"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import picture


@picture
def one_process_and_four_gpus():
    """Draw one step of training with one process that feeds all GPUs."""
    both, alone, copy = COLORS["compute"], "0.2", COLORS["copies"]
    steps = [
        ("copy model,\nsplit batch", 2, copy),
        ("forward", 4, both),
        ("gather\noutputs", 1.5, copy),
        ("loss", 1, alone),
        ("scatter\ngradients", 1.5, copy),
        ("backward", 6, both),
        ("add up\ngradients", 2, copy),
        ("optimizer\nstep", 1.5, alone),
    ]
    names = {
        both: "all GPUs compute",
        copy: "copies between GPUs",
        alone: "only GPU 0 computes",
    }
    _, axis = plt.subplots(figsize=(10, 2.8))
    start = 0
    for name, length, color in steps:
        for row in [3] if color == alone else range(4):
            axis.barh(row, length, left=start, color=color, edgecolor="white")
        axis.text(start + length / 2, 3.55, name, ha="center", fontsize=9)
        start += length
    axis.set(xlim=(0, 20), xticks=[], xlabel="time (not to scale)")
    axis.set_yticks(range(4), ["GPU 3", "GPU 2", "GPU 1", "GPU 0"])
    axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
    axis.legend(handles, names.values(), ncols=3, frameon=False, **below)


@picture
def memory_by_gpu(held):
    """Draw how many GB each GPU holds at its worst moment, as stacked bars.

    held: {GPU: {name: GB}}.
    """
    _, axis = plt.subplots(figsize=(10, 3.6))
    color_of = {
        "weights": COLORS["weights"],
        "Adam's state": COLORS["optimizer"],
        "activations": COLORS["activations"],
        "logits": COLORS["logits"],
        "log softmax": COLORS["logits"],
        "gradient of log softmax": COLORS["gradients"],
        "gradient of logits": COLORS["gradients"],
    }
    seen = set()
    for row, sizes in enumerate(held.values()):
        left = 0
        for name, size in sizes.items():
            label = name if size <= 3 and name not in seen else None
            seen.add(name)
            style = {"color": color_of[name], "alpha": 0.5, "ec": "white"}
            axis.barh(row, size, 0.7, left, label=label, **style)
            if size > 3:
                where = {"ha": "center", "va": "center", "size": 12}
                axis.text(left + size / 2, row, name.replace(" of ", " of\n"), **where)
            left += size
        total = f" {left:.1f} GB"
        axis.text(left, row, total, va="center", size=15, weight="bold")
    axis.set_yticks(range(len(held)), held, size=15)
    axis.set(xlim=(0, 1.15 * max(sum(s.values()) for s in held.values())))
    axis.set_xlabel("GB", size=14)
    axis.tick_params(axis="x", labelsize=12)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower right", frameon=False, fontsize=14)
    axis.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
