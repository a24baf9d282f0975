"""The pictures in this stage's notebooks. Only given numbers are measured."""

import math

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas


def ddp_step_on_four_gpus():
    """Draw one step of DistributedDataParallel: a process per GPU, four buckets."""
    compute, talk = COLORS["compute"], COLORS["gradients"]
    _, axis = plt.subplots(figsize=(10, 2.6))
    steps = [("forward, loss", 4, 2), ("backward", 6, 7), ("optimizer", 1.5, 11.85)]
    for row in range(4):
        for start, length in ((0, 4), (4, 6), (11.1, 1.5)):
            axis.barh(row + 0.16, length, 0.5, start, color=compute, edgecolor="white")
        for bucket in range(4):
            start = 5.5 + 1.5 * bucket  # when backward has completed the bucket
            axis.barh(row - 0.27, 1.1, 0.34, start, color=talk, edgecolor="white")
            if row == 3:
                text = f"{bucket + 1}"
                axis.text(start + 0.55, 2.73, text, ha="center", va="center", size=9)
    for name, _, middle in steps:
        axis.text(middle, 3.55, name, ha="center", fontsize=9)
    for color, label in (
        (compute, "all GPUs compute"),
        (talk, "all-reduce of a bucket of gradients"),
    ):
        axis.barh(0, 0, color=color, label=label)
    axis.legend(loc="center right", fontsize=9, frameon=False)
    axis.set(xlim=(0, 20), xticks=[], yticks=range(4))
    axis.set_yticklabels(["GPU 3", "GPU 2", "GPU 1", "GPU 0"])
    axis.set_xlabel("time (drawn, not measured)")
    axis.spines[["top", "right"]].set_visible(False)
    plt.show()


def star_and_ring():
    """Draw an all-reduce by way of rank 0 and in a ring, and what each sends."""
    places = [(0, 1), (1, 0), (0, -1), (-1, 0)]
    _, (star, ring, curves) = plt.subplots(1, 3, figsize=(10, 2.6))
    for axis, title in ((star, "all through rank 0"), (ring, "a ring")):
        axis.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal", title=title)
        axis.axis("off")
    for rank, (x, y) in enumerate(places):
        if rank:
            arrow(star, (x * 0.8, y * 0.8), (0.06 * x, 0.8 + 0.06 * y), style="<->")
        after_x, after_y = places[(rank + 1) % 4]
        near, far = 0.77, 0.23
        arrow(
            ring,
            (near * x + far * after_x, near * y + far * after_y),
            (far * x + near * after_x, far * y + near * after_y),
        )
        for axis in (star, ring):
            busiest = axis is star and rank == 0
            box(axis, x, y, f"{rank}", "tab:red" if busiest else "tab:green")
    processes = range(2, 17)
    curves.plot(processes, [n - 1 for n in processes], color="tab:red")
    curves.plot(processes, [2 * (n - 1) / n for n in processes], color="tab:green")
    curves.text(10.4, 11.8, "by rank 0: n − 1", color="tab:red", ha="right")
    text = "by each rank of a ring:\n2(n − 1)/n"
    curves.text(8, 2.6, text, color="tab:green", size=9)
    curves.set(title="copies of the gradients sent", xlabel="processes n")
    curves.set(xlim=(2, 16), ylim=(0, 16), xticks=(2, 4, 8, 16), yticks=(0, 2, 8, 16))
    curves.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()


def three_meetings():
    """Draw how two torchruns and their ranks find each other on two machines."""
    axis = canvas(4.6, (-0.4, 20.4), (-0.3, 7.2))
    for x, width, name in ((0, 7.6, "machine1"), (15.4, 4.6, "machine2")):
        frame = plt.Rectangle((x, 0), width, 6.4, facecolor="none", edgecolor="gray")
        axis.add_patch(frame)
        axis.text(x + width / 2, 6.8, name, ha="center", va="center", weight="bold")
    for x in (1.4, 18):
        box(axis, x, 5.3, "torchrun", "tab:gray")
    box(axis, 5.7, 5.3, "29500\n(endpoint)", "tab:orange")
    box(axis, 5.6, 3.3, "MASTER_PORT", "tab:orange")
    box(axis, 1.4, 1.2, "ranks\n0 and 1", "tab:blue")
    box(axis, 18, 1.7, "\nranks\n2 and 3\n", "tab:blue")
    center = {"ha": "center", "va": "center"}
    for end, x, y in (((4.4, 5.3), 3.5, 5.6), ((3.9, 3.6), 2.3, 3.9)):
        arrow(axis, (2.5, 5.3 if y > 5 else 4.9), end, "tab:gray")
        axis.text(x, y, "opens", color="gray", **center)
    arrow(axis, (2.4, 1.8), (4.2, 2.8))
    for start, end, text, style in (
        ((16.9, 5.3), (7, 5.3), "1  the torchruns meet", "->"),
        ((17, 2.6), (7.4, 3.3), "2  the ranks meet", "->"),
        ((17, 0.9), (2.4, 0.9), "3  each rank connects\nto the others", "<->"),
    ):
        arrow(axis, start, end, style=style)
        above = 0.7 if "\n" in text else 0.4
        axis.text(11.5, (start[1] + end[1]) / 2 + above, text, **center)
    plt.show()


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
            center = {"ha": "center", "va": "center", "size": 11}
            axis.text(x, low + 1.75, text, bbox=style, **center)
            arrow(axis, (x, low + 1.25), (x, low + 0.8))
            box(axis, x, low + 0.45, f"GPU {local_rank}", "tab:gray")
    plt.show()


def mismatched_collectives():
    """Draw the calls of two ranks, of which one makes a collective too many."""
    axis = canvas(3.2, (0, 10), (-0.5, 3.6))
    for x, title in ((2.3, "rank 0"), (7.7, "rank 1")):
        axis.text(x, 3.2, title, ha="center", weight="bold", size=13)
    box(axis, 2.3, 2.2, "all_reduce(loss)", "tab:red")
    box(axis, 2.3, 0.4, "all_reduce(gradient)")
    box(axis, 7.7, 2.2, "all_reduce(gradient)")
    box(axis, 7.7, 0.4, "has no second call", "tab:gray")
    arrow(axis, (3.3, 2.2), (6.5, 2.2), "tab:red", "<->")
    arrow(axis, (3.5, 0.4), (6.6, 0.4), "tab:gray")
    text = {"ha": "center", "size": 12}
    axis.text(5, 2.45, "added together: 21", color="tab:red", **text)
    axis.text(5, 0.65, "waits", color="tab:gray", **text)
    axis.text(0.1, 2.2, "1st", va="center", size=12)
    axis.text(0.1, 0.4, "2nd", va="center", size=12)
    plt.show()


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
    plt.show()


def running_means_of_two_ranks():
    """Draw batch norm's running mean on two ranks, over two steps under DDP."""
    _, axis = plt.subplots(figsize=(10, 3))
    for rank, color, values in (
        (0, "tab:blue", (0, 0, 0.5, 0.5, 0.75)),
        (1, "tab:orange", (0, 0, 5.5, 0.5, 5.75)),
    ):
        axis.plot(range(5), values, "o-", color=color, lw=2, label=f"rank {rank}")
        axis.text(4.08, values[-1], f"rank {rank}", color=color, va="center", size=12)
    arrow(axis, (3, 5.2), (3, 0.9), "tab:red")
    text = "DDP copies\nrank 0's"
    axis.text(3.06, 3.4, text, color="tab:red", size=12)
    axis.set(xlim=(-0.2, 4.5), ylim=(-0.6, 6.6), ylabel="running mean")
    begins = "forward\nbegins"
    labels = ["made", begins, "step 1\ndone", begins, "step 2\ndone"]
    axis.set_xticks(range(5), labels)
    axis.spines[["top", "right"]].set_visible(False)
    plt.show()


def fails_ends_is_noticed():
    """Draw when two ranks raise, end, and are noticed by torchrun, in two runs."""
    _, axes = plt.subplots(2, 1, figsize=(10, 4.6), sharex=True)
    for axis, slow in zip(axes, (0, 1), strict=True):
        ends = {rank: 8.5 if rank == slow else 4 for rank in (0, 1)}
        for rank, raises in ((1, 1.5), (0, 2)):
            y, end = 1 - rank, min(ends.values()) + 1.2 if rank == slow else ends[rank]
            axis.barh(y, raises, 0.45, 0, color="tab:green", alpha=0.45)
            axis.barh(y, end - raises, 0.45, raises, color="tab:gray", alpha=0.35)
            name = "IndexError" if rank == 1 else "connection error"
            axis.text(raises + 0.08, y, name, va="center", size=11)
            axis.plot(raises, y, "x", color="tab:red", ms=11, mew=3)
            if rank == slow:
                axis.text(end + 0.1, y, "ended by torchrun", va="center", size=11)
            else:
                axis.plot(end, y, "s", color="black", ms=9)
                text = "ends: torchrun notices it first"
                axis.text(end + 0.2, y, text, va="center", size=11, weight="bold")
        axis.set(xlim=(0, 8.5), ylim=(-0.5, 1.5), xticks=[])
        axis.set_yticks((0, 1), ("rank 1", "rank 0"))
        title = "rank 0 takes longest to end" if slow == 0 else "--slow-rank 1"
        axis.set_title(title, loc="left", size=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time (drawn, not measured); x: the rank raises")
    plt.tight_layout()
    plt.show()


def cosine_cut_off(k=4):
    """Draw the learning rate of a run on k times as many GPUs, built in two ways."""
    _, axis = plt.subplots(figsize=(10, 2.8))
    whole = [0.5 * (1 + math.cos(math.pi * x / 100)) for x in range(101)]
    cut = [0.5 * (1 + math.cos(math.pi * x / 100 / k)) for x in range(101)]
    axis.plot(whole, color="tab:green", lw=2)
    axis.plot(cut, color="tab:red", lw=2)
    text = "built for the old number of steps"
    axis.text(99, 1.0, text, color="tab:red", ha="right", va="bottom", size=12)
    text = "built for len(train_loader) steps"
    axis.text(48, 0.62, text, color="tab:green", ha="left", size=12)
    axis.set(xlim=(0, 100), ylim=(0, 1.15), yticks=(0, 1), xticks=(0, 100))
    axis.set_xticklabels(("first step", f"last step, on {k} GPUs"))
    axis.set_ylabel("lr / peak")
    axis.spines[["top", "right"]].set_visible(False)
    plt.show()
