"""The drawings in the notebooks. They explain; nothing in them is measured."""

import math

import matplotlib.pyplot as plt
import torch


def box(axis, x, y, text, color="tab:green"):
    style = {"boxstyle": "round,pad=0.6", "facecolor": color, "alpha": 0.35}
    axis.text(x, y, text, ha="center", va="center", bbox=style)


def arrow(axis, start, end, color="black", style="->"):
    axis.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": color, "lw": 1.5}
    )


def canvas(height, xlim, ylim):
    """Return the axis of an empty picture, as wide as a page."""
    _, axis = plt.subplots(figsize=(10, height))
    axis.set(xlim=xlim, ylim=ylim)
    axis.axis("off")
    return axis


def one_process_and_four_gpus():
    """Draw one step of training with one process that feeds all GPUs."""
    both, alone, copy = "tab:green", "tab:red", "tab:orange"
    steps = [
        ("copy model, split batch", 2, copy),
        ("forward", 4, both),
        ("collect outputs", 1, copy),
        ("loss", 1, alone),
        ("send back", 1, copy),
        ("backward", 6, both),
        ("add up gradients", 2, copy),
        ("optimizer", 1.5, alone),
    ]
    _, axis = plt.subplots(figsize=(10, 2.6))
    start = 0
    for name, length, color in steps:
        for row in [3] if color == alone else range(4):
            axis.barh(row, length, left=start, color=color, edgecolor="white")
        axis.text(start + length / 2, 3.55, name, rotation=30, fontsize=8)
        start += length
    axis.set(
        yticks=range(4), yticklabels=["GPU 3", "GPU 2", "GPU 1", "GPU 0"], xticks=[]
    )
    axis.set_xlabel("time (drawn, not measured)")
    axis.spines[["top", "right"]].set_visible(False)
    plt.show()


def one_process_per_device():
    """Draw two processes that exchange their gradients."""
    axis = canvas(2.6, (-1.2, 9.2), (-0.6, 2.1))
    for rank, y in ((0, 1.5), (1, 0)):
        axis.text(-0.4, y, f"rank {rank}", ha="right", va="center", weight="bold")
        boxes = {"its images": 0.5, "model": 3, "gradients": 5.5, "optimizer step": 8.3}
        for name, x in boxes.items():
            box(axis, x, y, name)
        for start, end in ((1.3, 2.4), (3.6, 4.7), (6.3, 7.3)):
            arrow(axis, (start, y), (end, y))
    arrow(axis, (5.5, 0.35), (5.5, 1.15), "tab:red", "<->")
    axis.text(5.6, 0.75, "all-reduce: sum, divided by 2", color="tab:red", va="center")
    plt.show()


def a_parent_and_its_children():
    """Draw a parent that spawns two processes, which meet through a file."""
    axis = canvas(2.6, (-2, 9), (-0.7, 2.7))
    box(axis, 0, 1, "parent: python train.py\nparses flags, waits")
    box(axis, 7.5, 1, "a file in a new\ntemporary folder", "tab:orange")
    for rank, y in ((0, 2), (1, 0)):
        box(axis, 4, y, f"worker({rank}, args, folder)")
        arrow(axis, (1.5, 1), (2.7, y))
        arrow(axis, (5.3, y), (6.4, 1), "tab:orange", "<->")
    axis.text(2, 1, "spawn", ha="center", va="center")
    axis.text(5.5, 1, "rendezvous", ha="center", va="center", color="tab:orange")
    plt.show()


def three_number_formats():
    """Draw the bits of float32, bfloat16 and float16, and the range of each."""
    formats = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 2.4), width_ratios=(1.15, 1))
    for row, (name, (exponent, fraction)) in enumerate(formats.items()):
        start = 0
        for bits, color in (
            (1, "tab:gray"),
            (exponent, "tab:orange"),
            (fraction, "tab:blue"),
        ):
            for n in range(bits):
                left.barh(row, 0.9, left=start + n, color=color, alpha=0.6)
            start += bits
        info = torch.finfo(getattr(torch, name))
        ends = [
            math.log10(x)
            for x in (info.smallest_normal * info.eps, info.tiny, info.max)
        ]
        right.barh(row, ends[2] - ends[1], left=ends[1], color="tab:green", alpha=0.6)
        right.barh(row, ends[1] - ends[0], left=ends[0], color="tab:green", alpha=0.25)
        text = f"{10 ** (ends[0] % 1):.0f}e{math.floor(ends[0])} to {info.max:.0e}"
        right.text(0, row, text.replace("e+", "e"), ha="center", va="center")
    left.set(title="bits: sign, exponent (range), fraction (precision)", xticks=[])
    left.set_yticks(range(3), formats)
    right.set(title="magnitudes, powers of ten (pale: with fewer digits)", yticks=[])
    for axis in (left, right):
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    plt.tight_layout()
    plt.show()


def allocation_step_task():
    """Draw a Slurm job on two nodes, with the tasks of one step and their ranks."""
    axis = canvas(3.2, (-0.3, 10.3), (-0.6, 3.6))
    axis.add_patch(
        plt.Rectangle((0, -0.4), 10, 3.8, fill=False, ec="tab:gray", ls="--")
    )
    axis.text(
        0.15,
        3.1,
        "job = allocation: the nodes are yours until it ends",
        color="tab:gray",
    )
    axis.add_patch(plt.Rectangle((0.3, 0.8), 9.4, 2, color="tab:blue", alpha=0.12))
    axis.text(0.45, 2.45, "step: what one srun starts, on all nodes", color="tab:blue")
    for node, x in (("node1", 0.5), ("node2", 5.2)):
        axis.text(x + 2.1, -0.2, node, ha="center", weight="bold")
        for local in (0, 1):
            rank = 2 * (node == "node2") + local
            text = f"task\nPROCID={rank}\nLOCALID={local}"
            box(axis, x + 1.05 + 2.15 * local, 1.6, text)
    box(axis, 1.6, 0.35, "batch script (job.sbatch)", "tab:orange")
    plt.show()


def all_reduce_and_its_relatives():
    """Draw what four processes hold before and after reduce, all_reduce and gather."""
    _, axes = plt.subplots(1, 4, figsize=(11, 2.4))
    own = ["1", "2", "3", "4"]
    after = {
        "before": own,
        "reduce": ["10", "", "", ""],
        "all_reduce": ["10"] * 4,
        "gather": ["1 2 3 4", "", "", ""],
    }
    for axis, (title, values) in zip(axes, after.items(), strict=True):
        axis.set(xlim=(-1.3, 2.2), ylim=(-0.6, 3.6), title=title)
        axis.axis("off")
        for rank, value in enumerate(values):
            y = 3 - rank
            axis.text(-1.2, y, f"rank {rank}", va="center")
            color = "tab:green" if value else "tab:gray"
            box(axis, 1, y, value or "\u2013", color)
    plt.show()


def one_step_in_parts():
    """Draw an optimizer step of two processes, each with three micro-batches."""
    axis = canvas(2.4, (-1.4, 10.3), (-0.6, 2.2))
    for rank, y in ((0, 1.5), (1, 0)):
        axis.text(-0.6, y, f"rank {rank}", ha="right", va="center", weight="bold")
        for n in range(3):
            box(axis, 0.5 + 2.3 * n, y, f"micro-batch {n + 1}\nforward,\nbackward")
            if n:
                axis.text(2.3 * n - 0.65, y, "+", ha="center", va="center", size=14)
        box(axis, 9.3, y, "optimizer\nstep", "tab:orange")
        arrow(axis, (5.9, y), (8.5, y))
    arrow(axis, (6.9, 0.1), (6.9, 1.4), "tab:red", "<->")
    axis.text(7, 0.75, "one all-reduce", color="tab:red", va="center")
    plt.show()


def killed_and_started_again():
    """Draw a run that is killed, and the run that resumes from its checkpoint."""
    axis = canvas(2.2, (-1.4, 10.5), (-0.7, 1.9))
    for name, y, start, end in (("first run", 1.3, 0, 6.9), ("second run", 0, 6, 10.4)):
        axis.text(start - 0.2, y, name, ha="right", va="center", weight="bold")
        arrow(axis, (start, y), (end, y))
        axis.plot([6, 6.9], [y, y], color="tab:orange", lw=9, alpha=0.4)
    for x, y in ((2, 1.3), (4, 1.3), (6, 1.3), (8, 0), (10, 0)):
        axis.plot(x, y, "o", color="tab:green", ms=12)
    axis.text(2, 1.62, "checkpoint", color="tab:green", ha="center")
    axis.plot(6.95, 1.3, "x", color="tab:red", ms=12, mew=3)
    axis.text(7.15, 1.3, "killed", color="tab:red", va="center")
    arrow(axis, (6, 1.1), (6, 0.15), "tab:green")
    axis.text(5.9, 0.65, "resumes here", color="tab:green", ha="right", va="center")
    axis.text(6.1, -0.5, "taken twice, on the same images", color="tab:orange")
    plt.show()


def a_vote_and_a_step():
    """Draw two ranks that agree on a signal while they take the next step."""
    axis = canvas(2.9, (-1.3, 10.6), (-0.9, 2.5))
    for rank, y in ((0, 1.5), (1, 0)):
        axis.text(-0.5, y, f"rank {rank}", ha="right", va="center", weight="bold")
        for step, x in ((36, 1), (37, 5)):
            box(axis, x, y, f"       step {step}       ")
        box(axis, 8.9, y, "save" if rank == 0 else "wait", "tab:orange")
        arrow(axis, (7.3, y), (8.3, y))
    axis.plot(1, -0.4, "^", color="tab:red", ms=9)
    axis.text(1, -0.8, "SIGTERM", color="tab:red", ha="center")
    arrow(axis, (3, 0.1), (3, 1.4), "tab:red", "<->")
    axis.text(3, 2.2, "cast the vote\n(nobody waits)", ha="center", color="tab:red")
    axis.plot([3, 7], [0.75, 0.75], ":", color="tab:red")
    arrow(axis, (6.9, 0.75), (7.05, 0.75), "tab:red")
    axis.text(7, 2.2, "read the result:\nall stop here", ha="center", color="tab:red")
    axis.plot([7, 7], [-0.3, 1.9], color="tab:red", lw=1)
    plt.show()


def from_the_signal_to_the_next_start():
    """Draw what happens in a job before its time limit, and in a preempted one."""
    axis = canvas(5.2, (-1.9, 11.4), (-0.6, 6.6))
    stop, slurm = "tab:red", "tab:blue"
    for low, title in ((3.6, "the time limit is near"), (0, "the job is preempted")):
        axis.text(-1.8, low + 2.55, title, weight="bold", color=stop)
        for name, y in (("Slurm", 2), ("batch script", 1), ("ranks", 0)):
            axis.text(-0.5, low + y, name, ha="right", va="center")
        for x, text in ((2.8, "step 30"), (4.4, "step 31"), (6.1, "checkpoint")):
            box(axis, x, low, text)
        for x, text in ((3.6, "vote"), (5.2, "read it")):
            axis.plot([x, x], [low - 0.3, low + 0.3], color=stop, lw=1)
            axis.text(x, low - 0.55, text, color=stop, ha="center")
        axis.text(7.65, low, "exit 143", ha="center", va="center")
        axis.plot([2.3, 7.5], [low + 1, low + 1], ":", color="gray")
        axis.text(5, low + 1.1, "waits until srun has ended", color="gray", ha="center")
        arrow(axis, (7.6, low + 0.2), (7.9, low + 0.7))
        for x, text in ((9.1, "PENDING"), (10.7, "RUNNING")):
            box(axis, x, low + 2, text, slurm)
        arrow(axis, (10.7, low + 1.7), (10.7, low + 0.3))
        axis.text(10.7, low, "resumed from\nstep 31", ha="center", va="center")
        box(axis, 1.7, low + 1, "trap", "tab:orange")
    box(axis, 0.2, 5.6, "USR1", stop)
    arrow(axis, (0.2, 5.3), (1.3, 4.7), stop)
    arrow(axis, (1.8, 4.3), (2.3, 3.9), stop)
    axis.text(2.2, 4.1, "scancel --signal=TERM", color=stop)
    box(axis, 8.1, 4.6, "requeue", "tab:orange")
    arrow(axis, (8.3, 4.9), (8.7, 5.3))
    box(axis, 0.2, 2, "TERM", stop)
    arrow(axis, (0.2, 1.7), (1.3, 1.1), stop)
    arrow(axis, (0.2, 1.7), (2.1, 0.05), stop)
    axis.text(8.1, 1, "exit 143", ha="center", va="center")
    axis.plot([0.9, 8.3], [2, 2], ":", color="gray")
    text = "KillWait, and then SIGKILL to what is left"
    axis.text(5, 2.1, text, color="gray", ha="center")
    plt.show()
