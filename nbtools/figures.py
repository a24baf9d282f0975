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
        axis.text(start + length / 2, 3.55, name, ha="center", fontsize=8)
        start += length
    axis.set(xlim=(0, 20), xticks=[], xlabel="time (drawn, not measured)")
    axis.set_yticks(range(4), ["GPU 3", "GPU 2", "GPU 1", "GPU 0"])
    axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
    axis.legend(handles, names.values(), ncols=3, frameon=False, **below)
    plt.show()


def ddp_step_on_four_gpus():
    """Draw one step of DistributedDataParallel: a process per GPU, four buckets."""
    compute, talk = "tab:green", "tab:orange"
    _, axis = plt.subplots(figsize=(10, 2.6))
    steps = [("forward, loss", 4, 2), ("backward", 6, 7), ("optimizer", 1.5, 11.85)]
    for row in range(4):
        for start, length in ((0, 4), (4, 6), (11.1, 1.5)):
            axis.barh(row + 0.16, length, 0.5, start, color=compute, edgecolor="white")
        for bucket in range(4):
            start = 5.5 + 1.5 * bucket  # when backward has completed the bucket
            axis.barh(row - 0.25, 1.1, 0.3, start, color=talk, edgecolor="white")
            if row == 3:
                text = f"{bucket + 1}"
                axis.text(start + 0.55, 2.73, text, ha="center", va="center", size=7)
    for name, _, middle in steps:
        axis.text(middle, 3.55, name, ha="center", fontsize=8)
    for color, label in (
        (compute, "all GPUs compute"),
        (talk, "all-reduce of a bucket of gradients"),
    ):
        axis.barh(0, 0, color=color, label=label)
    axis.legend(loc="center right", fontsize=8, frameon=False)
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


def a_parent_and_its_children():
    """Draw a parent that spawns two processes, which meet through a file."""
    axis = canvas(2.6, (-2, 9), (-0.7, 2.7))
    box(axis, 0, 1, "parent: python train.py\nparses flags, waits", "tab:gray")
    box(axis, 7.5, 1, "a file in a new\ntemporary folder", "tab:orange")
    for rank, y in ((0, 2), (1, 0)):
        box(axis, 4, y, f"worker({rank}, args, folder)")
        arrow(axis, (1.5, 1), (2.7, y))
        arrow(axis, (5.3, y), (6.4, 1), "tab:orange", "<->")
    arrow(axis, (4, 1.6), (4, 0.4), "tab:green", "<->")
    style = {"ha": "center", "va": "center"}
    axis.text(2, 1, "spawn", **style)
    axis.text(3.3, 1, "all-reduce,\nevery step", color="tab:green", **style)
    axis.text(5.2, 1, "rendezvous,\nonce", color="tab:orange", **style)
    plt.show()


def number_formats():
    """Draw the bits of four number formats, and the magnitudes that each can hold."""
    formats = {  # bits of exponent and fraction, smallest number, text
        "float32": (8, 23, 2.0**-149, "1e-45 to 3e38"),
        "TF32": (8, 10, 2.0**-126, "1e-38 to 3e38"),
        "bfloat16": (8, 7, 2.0**-133, "9e-41 to 3e38"),
        "float16": (5, 10, 2.0**-24, "6e-8 to 65,504"),
    }
    parts = {"sign": "tab:gray", "exponent": "tab:orange", "fraction": "tab:blue"}
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 2.9), width_ratios=(1.15, 1))
    for row, (name, (exponent, fraction, least, text)) in enumerate(formats.items()):
        start = 0
        for bits, color in zip((1, exponent, fraction), parts.values(), strict=True):
            for n in range(start, start + bits):
                left.barh(row, 0.9, left=n, color=color, alpha=0.6)
            start += bits
        info = torch.finfo(getattr(torch, name, torch.float32))
        ends = [math.log10(x) for x in (least, info.tiny, info.max)]
        right.barh(row, ends[2] - ends[1], left=ends[1], color="tab:green", alpha=0.6)
        right.barh(row, ends[1] - ends[0], left=ends[0], color="tab:green", alpha=0.25)
        if name == "float16":
            right.text(ends[2] + 2, row, text, va="center")
        else:
            right.text(0, row, text, ha="center", va="center")
    for part, color in parts.items():
        left.barh(0, 0, color=color, alpha=0.6, label=part)
    left.legend(loc="lower right", bbox_to_anchor=(1, 0.05))
    left.set(title="one box per bit", xticks=[])
    left.set_yticks(range(4), formats)
    right.set(title="magnitudes, powers of ten (pale: fewer digits)", yticks=[])
    for axis in (left, right):
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    plt.tight_layout()
    plt.show()


def allocation_step_task():
    """Draw a Slurm job on two nodes, with the tasks of one step, ranks and GPUs."""
    axis = canvas(4, (-0.3, 10.3), (-1.5, 4.2))

    def frame(x, y, width, height, text, color, **style):
        style = {"fill": False, "ec": color, **style}
        axis.add_patch(plt.Rectangle((x, y), width, height, **style))
        axis.text(x + 0.12, y + height - 0.33, text, color=color)

    job = "job: cores, memory and GPUs on two nodes, until it ends"
    frame(0, -1.4, 10, 5.5, job, "black", ls="--")
    for node, x in (("node1", 0.3), ("node2", 5.1)):
        frame(x, -1.2, 4.6, 4.7, node, "black")
        for local in (0, 1):
            rank, center = 2 * (node == "node2") + local, x + 1.3 + 2 * local
            box(
                axis, center, 1.05, f"task, rank {rank}\nPROCID {rank}\nLOCALID {local}"
            )
            arrow(axis, (center, 0.42), (center, -0.45))
            box(axis, center, -0.75, f"GPU {local}", "tab:gray")
    step = {"fill": True, "fc": "tab:blue", "alpha": 0.12}
    frame(0.5, 0.3, 9, 1.9, "job step: the tasks that one srun starts", "navy", **step)
    box(axis, 3.2, 3, "batch script: srun ...", "tab:orange")
    arrow(axis, (3.2, 2.72), (3.2, 2.2))
    plt.show()


def counts_of_two_shards():
    """Draw eleven images on two ranks, and two ways to get one accuracy from them."""
    axis = canvas(2.6, (-1.3, 14.6), (-0.8, 2.4))
    for rank, (y, color) in enumerate(((1.6, "tab:blue"), (0, "tab:orange"))):
        axis.text(-0.6, y, f"rank {rank}", ha="right", va="center", weight="bold")
        shard = range(rank, 11, 2)
        for place, n in enumerate(shard):
            style = {"boxstyle": "square,pad=0.3", "facecolor": color, "alpha": 0.35}
            mark = "\u2717" if n in (2, 5, 9) else "\u2713"
            text = f"{n}\n{mark}"
            axis.text(0.7 * place, y, text, ha="center", va="center", bbox=style)
        correct = 5 - 2 * rank
        box(axis, 6.1, y, f"{correct} correct\n{len(shard)} images", color)
        arrow(axis, (shard[-1] // 2 * 0.7 + 0.5, y), (5.1, y), color)
    arrow(axis, (7.1, 1.6), (8.1, 1.6), "tab:green")
    arrow(axis, (7.1, 0.2), (8.1, 1.4), "tab:green")
    box(axis, 9.4, 1.6, "8 correct\n11 images")
    arrow(axis, (10.7, 1.6), (11.5, 1.6), "tab:green")
    axis.text(11.7, 1.6, "72.7 %", color="tab:green", va="center", weight="bold")
    axis.text(8.1, 2.2, "all-reduce, then divide", color="tab:green")
    arrow(axis, (7.1, 1.4), (8.1, 0.2), "tab:red")
    arrow(axis, (7.1, 0), (8.1, 0), "tab:red")
    box(axis, 9.4, 0, "83.3 % and\n60.0 %", "tab:red")
    arrow(axis, (10.7, 0), (11.5, 0), "tab:red")
    axis.text(11.7, 0, "71.7 %", color="tab:red", va="center", weight="bold")
    axis.text(8.1, -0.75, "divide, then average: wrong", color="tab:red")
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


def one_step_of_micro_batches():
    """Draw one optimizer step of three micro-batches, without no_sync and with it."""
    _, axes = plt.subplots(2, 1, figsize=(10, 3.4), sharex=True)
    forward, backward, reduce, ahead = 1, 2, 2.4, 1.2
    for axis, no_sync in zip(axes, (False, True), strict=True):
        start = 0
        for n in range(3):
            middle = start + forward
            stretch(axis, 1, start, forward, f"F{n + 1}", "tab:blue")
            stretch(axis, 1, middle, backward, f"B{n + 1}", "tab:green")
            start = middle + backward
            if n == 2 or not no_sync:
                stretch(axis, 0, start - ahead, reduce, "all-reduce", "tab:red")
                start += reduce - ahead
        stretch(axis, 1, start, 0.8, "step", "tab:orange")
        title = "with no_sync: 1 all-reduce"
        if not no_sync:
            title = "without no_sync: 3 all-reduces"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(yticks=(0, 1), yticklabels=("network", "each rank"), xticks=[])
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time (drawn, not measured)")
    plt.tight_layout()
    plt.show()


def stretch(axis, row, start, length, text, color):
    """Draw a stretch of time with a word in it."""
    axis.barh(row, length, left=start, height=0.7, color=color, alpha=0.45, ec="white")
    axis.text(start + length / 2, row, text, ha="center", va="center", fontsize=9)


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


def a_sharded_step():
    """Draw one step of FSDP with two blocks, and the weights that a rank holds."""
    _, axes = plt.subplots(2, 1, figsize=(10, 3.6), sharex=True)
    time, held = axes
    gather, reduce, start = 1.2, 1.5, 0
    for name in ("F1", "F2", "B2", "B1"):
        length, color = (1, "tab:blue") if name[0] == "F" else (2, "tab:green")
        stretch(time, 0, start, gather, f"gather {name[1]}", "tab:orange")
        stretch(time, 1, start + gather, length, name, color)
        held.barh(0.9, gather + length, 0.8, start, color="tab:orange", alpha=0.45)
        middle = start + (gather + length) / 2
        held.text(middle, 0.9, f"block {name[1]}", ha="center", va="center", size=9)
        start += gather + length
        if name[0] == "B":
            text = f"reduce-\nscatter {name[1]}"
            stretch(time, 0, start, reduce, text, "tab:red")
            start += reduce
    stretch(time, 1, start, 1, "step", "tab:gray")
    held.barh(0.25, start + 1, 0.5, 0, color="tab:gray", alpha=0.45)
    text = "shards of both blocks: the only weights at rest"
    held.text((start + 1) / 2, 0.25, text, ha="center", va="center", size=9)
    held.axhline(1.6, color="black", lw=1, ls="--")
    held.text(start + 1, 1.65, "what DDP holds: both blocks", ha="right", size=9)
    time.set(yticks=(0, 1), yticklabels=("network", "each rank"), xticks=[])
    held.set(ylim=(0, 2), yticks=[], ylabel="weights")
    held.set_xlabel("time (drawn, not measured)")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()
