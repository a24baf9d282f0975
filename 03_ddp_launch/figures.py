"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture

# A page shows a picture of 10 inches at three quarters of its width: as 9 points.
readable = plt.rc_context({"font.size": 12})


@picture
@readable
def ddp_step_on_four_gpus(narrow=False):
    """Draw one step of DistributedDataParallel: a process per GPU, four buckets.

    narrow: so that a phone can show it.
    """
    compute, talk = COLORS["compute"], COLORS["gradients"]
    _, axis = plt.subplots(figsize=(6, 4) if narrow else (10, 3.4))
    steps = [("forward, loss", 4, 2), ("backward", 6, 7), ("optimizer", 1.8, 12.5)]
    buckets = [(4.9, 0.5), (6.1, 1.3), (8.1, 1.3), (10.1, 1.3)]  # the first is small
    for start, length in buckets:
        style = {"color": talk, "alpha": 0.25, "zorder": 0}
        axis.add_patch(plt.Rectangle((start, -0.33), length, 3.3, **style))
    for row in range(4):
        for start, length in ((0, 4), (4, 6), (11.6, 1.8)):
            axis.barh(row + 0.2, length, 0.42, start, color=compute, edgecolor="white")
        for number, (start, length) in enumerate(buckets, start=1):
            axis.barh(row - 0.18, length, 0.3, start, color=talk, edgecolor="white")
            place = {"ha": "center", "va": "center", "size": 12}
            axis.text(start + length / 2, row - 0.19, f"{number}", **place)
            if row:
                axis.text(start + length / 2, row - 0.47, "+", weight="bold", **place)
    for name, _, middle in steps:
        axis.text(middle, 3.55, name, ha="center")
    for color, label in (
        (compute, "each GPU computes"),
        (talk, "a bucket of gradients: added up over all GPUs"),
    ):
        axis.barh(0, 0, color=color, label=label)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.06)}
    above["ncols"] = 1 if narrow else 2
    axis.legend(frameon=False, **above)
    axis.set(xlim=(0, 13.6), ylim=(-0.55, 3.5), xticks=[], yticks=range(4))
    axis.set_yticklabels(["GPU 3", "GPU 2", "GPU 1", "GPU 0"])
    axis.set_xlabel("time (drawn, not measured; not to scale)")
    axis.spines[["top", "right"]].set_visible(False)


@picture
@readable
def collectives():
    """Draw what three ranks hold before and after four collectives; ?: undefined."""
    _, axes = plt.subplots(1, 5, figsize=(10, 2.3))
    total = "1 + 2 + 3"
    held = {
        "before": ("1", "2", "3"),
        "broadcast": ("1", "1", "1"),
        "all-reduce": (total, total, total),
        "all-gather": ("1, 2, 3", "1, 2, 3", "1, 2, 3"),
        "reduce": (total, "?", "?"),
    }
    for axis, (title, values) in zip(axes.flat, held.items(), strict=False):
        axis.set(xlim=(-1, 1), ylim=(-0.5, 2.6))
        axis.set_title(title, size=13, weight="bold")
        axis.axis("off")
        for rank, value in enumerate(values):
            changed = value != f"{rank + 1}" and title != "before"
            color = "tab:green" if changed else "tab:gray"
            box(axis, 0, 2 - rank, value, "tab:red" if value == "?" else color)
            if title == "before":
                place = {"ha": "right", "va": "center"}
                axis.text(-0.35, 2 - rank, f"rank {rank}", **place)
    for axis in axes.flat[len(held) :]:
        axis.remove()
    plt.tight_layout()


@picture
@readable
def torchrun_ranks_and_gpus():
    """Draw two machines with four GPUs each: torchrun, its processes, their ranks."""
    axis = canvas(6.4, (0, 10), (-0.1, 7.9))
    for machine, low in ((1, 4.1), (2, 0)):
        frame = plt.Rectangle((0.05, low), 9.9, 3.7, fill=False, ls="--")
        axis.add_patch(frame)
        axis.text(0.25, low + 3.2, f"machine {machine}", weight="bold", size=13)
        box(axis, 5, low + 3.2, "torchrun", "tab:orange")
        for local_rank in range(4):
            rank, x = 4 * (machine - 1) + local_rank, 1.4 + 2.4 * local_rank
            arrow(axis, (5, low + 2.9), (x, low + 2.25), "tab:orange")
            style = {"boxstyle": "round,pad=0.5", "fc": "tab:green", "alpha": 0.35}
            text = f"RANK {rank}\nLOCAL_RANK {local_rank}"
            center = {"ha": "center", "va": "center", "size": 12}
            axis.text(x, low + 1.75, text, bbox=style, **center)
            arrow(axis, (x, low + 1.25), (x, low + 0.8))
            box(axis, x, low + 0.45, f"GPU {local_rank}", "tab:gray")


@picture
@readable
def mismatched_collectives():
    """Draw the calls of two ranks, of which one makes a collective too many."""
    axis = canvas(3.4, (0, 10), (-0.6, 3.6))
    for x, title in ((2.3, "rank 0"), (7.7, "rank 1")):
        axis.text(x, 3.2, title, ha="center", weight="bold", size=13)
    box(axis, 2.3, 2.1, "all_reduce(loss)\nloss = 1", "tab:red")
    box(axis, 2.3, 0.2, "all_reduce(gradient)\ngradient = 10")
    box(axis, 7.7, 2.1, "all_reduce(gradient)\ngradient = 20")
    box(axis, 7.7, 0.2, "has no second call", "tab:gray")
    arrow(axis, (3.5, 2.1), (6.4, 2.1), "tab:red", "<->")
    arrow(axis, (3.8, 0.2), (6.4, 0.2), "tab:gray")
    axis.text(5, 2.3, "1 + 20 = 21", color="tab:red", ha="center", size=13)
    axis.text(5, 0.4, "waits", color="tab:gray", ha="center", size=13)
    axis.text(0, 2.1, "1st call", va="center")
    axis.text(0, 0.2, "2nd call", va="center")


@picture
@readable
def three_against_four_batches():
    """Draw two epochs of two ranks, with three and with four batches per epoch."""
    axis = canvas(2.7, (-1.5, 10.4), (-1, 2.7))
    colors = {1: "tab:blue", 2: "tab:orange"}
    for rank, y in ((0, 1.5), (1, 0)):
        axis.text(-0.3, y, f"rank {rank}", ha="right", va="center", weight="bold")
        calls = [(epoch, n) for epoch in (1, 2) for n in range(1, 4 + rank)]
        for place, (epoch, batch) in enumerate(calls[: 6 + rank]):
            box(axis, 0.6 + 1.4 * place, y, f"batch {batch}", colors[epoch])
    for place in range(6):
        wrong = place > 2
        color = "tab:red" if wrong else "tab:green"
        x = 0.6 + 1.4 * place
        arrow(axis, (x, 0.4), (x, 1.1), color, "<->")
    axis.text(9, 1.5, "nobody", ha="center", va="center", color="gray")
    arrow(axis, (9, 0.4), (9, 1.2), "gray")
    for epoch, x in ((1, 0), (2, 1.9)):
        text = f"epoch {epoch}"
        axis.text(x, 2.3, text, color=colors[epoch], size=12, weight="bold")
    text = "averaged with a different batch"
    axis.text(6.2, -0.85, text, ha="center", color="tab:red", size=12)


@picture
@readable
def losses_by_batch(batches, losses, small):
    """Draw the loss of each rule by the global batch, with the range over the seeds.

    losses: {rule: three losses for each batch, the lowest first}; small: the loss of
    the smallest batch.
    """
    _, axis = plt.subplots(figsize=(10, 4.2))
    for place, (rule, three) in enumerate(losses.items()):
        low, middle, high = zip(*three, strict=True)
        beside = [batch * 1.03 ** (place - 1) for batch in batches]
        below = [m - n for m, n in zip(middle, low, strict=True)]
        above = [n - m for m, n in zip(middle, high, strict=True)]
        style = {"fmt": "o-", "capsize": 4, "label": rule}
        axis.errorbar(beside, middle, yerr=(below, above), **style)
    axis.axhline(small, color="k", linestyle="--", label="batch 15")
    axis.set(xscale="log", yscale="log", xlabel="global batch (log scale)")
    axis.set_ylabel("training loss, sixth epoch")
    axis.set_xticks(batches, labels=batches)
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
