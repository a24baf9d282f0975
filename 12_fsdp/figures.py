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
            weights.append((start, 2 * forward, block + 1))
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


def what_can_be_split():
    """Draw where training can be cut: the batch, the model, and what is stored."""
    _, (batch, model, stored) = plt.subplots(1, 3, figsize=(11, 4.2))
    style = {"edgecolor": "white", "lw": 2, "alpha": 0.35}

    def cut(axis, ends, text, place, color, **options):
        (x, y), (to_x, to_y) = ends
        axis.plot([x, to_x], [y, to_y], "--", color=color, lw=3)
        axis.text(*place, text, color=color, size=13, ha="center", **options)

    for row in range(4):
        for column in range(8):
            square = plt.Rectangle((column, row), 1, 1, facecolor="tab:gray", **style)
            batch.add_patch(square)
    cut(batch, ((-0.4, 2), (8.4, 2)), "data\nparallel", (10.2, 1.6), "tab:blue")
    cut(batch, ((4, -0.4), (4, 4.4)), "context parallel", (4, 4.7), "tab:purple")
    batch.text(4, -1.1, "tokens of a sequence", ha="center", size=12)
    batch.text(-0.7, 2, "sequences", rotation=90, ha="center", va="center", size=12)
    for block in range(4):
        shape = plt.Rectangle((0, block + 0.08), 6, 0.84, facecolor="tab:gray", **style)
        model.add_patch(shape)
        model.text(1.5, block + 0.5, f"block {block + 1}", ha="center", va="center")
    cut(model, ((-0.4, 2), (6.4, 2)), "pipeline\nparallel", (8, 1.6), "tab:red")
    cut(model, ((3, -0.4), (3, 4.4)), "tensor parallel", (3, 4.7), "tab:green")
    model.text(3, -1.1, "width of a layer", ha="center", size=12)
    for row, (name, width) in enumerate(
        (("optimizer state", 8), ("gradients", 4), ("weights", 4))
    ):
        y = 1.5 * row - 0.1
        shape = plt.Rectangle((0, y), width, 0.7, facecolor="tab:gray", **style)
        stored.add_patch(shape)
        stored.text(0, y + 0.85, name, size=12)
        for part in range(1, 4):
            x = part * width / 4
            stored.plot([x, x], [y - 0.1, y + 0.8], "--", color="tab:orange", lw=3)
    stored.text(4, 4.7, "FSDP", color="tab:orange", size=13, ha="center")
    for axis, title, right in (
        (batch, "the batch", 12),
        (model, "the model", 9.5),
        (stored, "what each rank keeps", 9),
    ):
        axis.set(xlim=(-1.3, right), ylim=(-1.5, 5.6))
        axis.set_title(title, size=13, weight="bold")
        axis.axis("off")
    plt.tight_layout()
    plt.show()
