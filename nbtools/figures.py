"""The pictures in the notebooks. Only numbers that a function is given are measured."""

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


def asked_after_a_step():
    """Draw two ranks that agree after a step that one of them has received a signal."""
    axis = canvas(2.9, (-1.3, 8.6), (-0.9, 2.5))
    for rank, y in ((0, 1.5), (1, 0)):
        axis.text(-0.5, y, f"rank {rank}", ha="right", va="center", weight="bold")
        box(axis, 1, y, "       step 36       ")
        box(axis, 6.6, y, "save" if rank == 0 else "wait", "tab:orange")
        arrow(axis, (2.4, y), (5.9, y))
    axis.plot(1, -0.4, "^", color="tab:red", ms=9)
    axis.text(1, -0.8, "SIGTERM", color="tab:red", ha="center")
    arrow(axis, (4, 0.1), (4, 1.4), "tab:red", "<->")
    text = "all-reduce: 0 + 1 signals,\nso all stop here"
    axis.text(4, 2.0, text, ha="center", color="tab:red")
    for text in axis.texts:
        text.set_size(14)
    plt.show()


def from_the_signal_to_the_next_start():
    """Draw what happens in a job before its time limit, and in a preempted one."""
    axis = canvas(5.8, (-1.9, 11.9), (-0.8, 6.6))
    stop, slurm = "tab:red", "tab:blue"
    for low, title in ((3.6, "the time limit is near"), (0, "the job is preempted")):
        axis.text(-1.8, low + 2.55, title, weight="bold", color=stop)
        for name, y in (("Slurm", 2), ("batch script", 1), ("ranks", 0)):
            axis.text(-0.5, low + y, name, ha="right", va="center")
        for x, text in ((3.4, "step 36"), (5.7, "checkpoint")):
            box(axis, x, low, text)
        axis.plot([4.4, 4.4], [low - 0.3, low + 0.3], color=stop, lw=1)
        axis.text(4.4, low - 0.65, "all ranks agree", color=stop, ha="center")
        axis.text(7.7, low, "exit 143", ha="center", va="center")
        axis.plot([2.3, 7.5], [low + 1, low + 1], ":", color="gray")
        axis.text(5, low + 1.1, "waits until srun has ended", color="gray", ha="center")
        arrow(axis, (7.6, low + 0.2), (7.9, low + 0.7))
        for x, text in ((9.1, "PENDING"), (11, "RUNNING")):
            box(axis, x, low + 2, text, slurm)
        arrow(axis, (11, low + 1.7), (11, low + 0.4))
        axis.text(11, low, "resumed from\nstep 36", ha="center", va="center")
        box(axis, 1.7, low + 1, "trap", "tab:orange")
    box(axis, 0.2, 5.6, "USR1", stop)
    arrow(axis, (0.2, 5.3), (1.3, 4.7), stop)
    arrow(axis, (1.8, 4.3), (2.3, 3.9), stop)
    axis.text(2.35, 4.12, "scancel --signal=TERM", color=stop)
    box(axis, 8.1, 4.6, "requeue", "tab:orange")
    arrow(axis, (8.3, 4.9), (8.7, 5.3))
    box(axis, 0.2, 2, "TERM", stop)
    arrow(axis, (0.2, 1.7), (1.3, 1.1), stop)
    arrow(axis, (0.1, 1.7), (1.0, 0.1), stop)
    axis.text(8.2, 1, "exit 143", ha="center", va="center")
    axis.plot([0.9, 8.3], [2, 2], ":", color="gray")
    text = "KillWait, and then SIGKILL to what is left"
    axis.text(5, 2.1, text, color="gray", ha="center")
    for text in axis.texts:
        text.set_size(12.5)
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


def fork_and_spawn():
    """Draw what a forked and a spawned process have of their parent."""
    axis = canvas(4.6, (0, 10), (-0.2, 5))

    def process(x, width, title, lines):
        axis.add_patch(plt.Rectangle((x, 0.9), width, 3.3, fill=False, ec="black"))
        axis.text(x + width / 2, 4.35, title, ha="center", size=13, weight="bold")
        for row, (text, color) in enumerate(lines):
            style = {"boxstyle": "round,pad=0.35", "facecolor": color, "alpha": 0.35}
            y = 3.6 - 0.72 * row
            axis.text(x + width / 2, y, text, ha="center", va="center", bbox=style)

    here, copied, missing, new = "tab:green", "tab:blue", "tab:red", "tab:orange"
    parent = [("main thread", here), ("torch's threads", here)]
    parent += [("memory, open files", here), ("CUDA, once used", here)]
    process(3.9, 2.2, "parent", parent)
    forked = [("main thread", copied), ("no other thread", missing)]
    forked += [("a copy of the memory", copied), ("CUDA: only an error", missing)]
    process(0.2, 2.4, "forked", forked)
    spawned = [("a new interpreter", new), ("imports the script", new)]
    spawned += [("function, arguments:", new), ("from a pickle", new)]
    process(7.4, 2.4, "spawned", spawned)
    for x, end, text in ((3.8, 2.75, "copy"), (6.2, 7.3, "start")):
        arrow(axis, (x, 2.5), (end, 2.5))
        axis.text((x + end) / 2, 2.65, text, ha="center")
    below = {"ha": "center", "va": "center"}
    axis.text(1.4, 0.4, "fast; may wait forever\nfor a thread it lacks", **below)
    axis.text(8.6, 0.4, "takes seconds; safe\nwith threads and CUDA", **below)
    plt.show()


def a_machine_leaves_and_comes_back():
    """Draw two launchers and their ranks: one machine dies, and later joins again."""
    axis = canvas(4.6, (-2.2, 20.6), (-1.5, 5.6))
    style = {"ha": "center", "va": "center"}
    rows = {"A: launcher": 3.6, "A: rank": 2.6, "B: launcher": 0.4, "B: rank": 1.4}
    for name, y in rows.items():
        axis.text(-0.3, y, name, ha="right", va="center", weight="bold")
    for row, start, end in (
        ("A: launcher", 0, 20.4),
        ("B: launcher", 0, 5.05),
        ("B: launcher", 14.6, 20.4),
    ):
        y = rows[row]
        axis.plot([start, end], [y, y], color="tab:gray", lw=1)
        for n in range(int(start * 2) + 1, int(end * 2) + 1, 2):  # heartbeats
            axis.plot([n / 2] * 2, [y - 0.16, y + 0.16], color="tab:gray", lw=2)
    for row, start, end in (
        ("A: rank", 0.3, 5.3),
        ("B: rank", 0.3, 5.05),
        ("A: rank", 10.2, 15.4),
        ("A: rank", 16, 20.4),
        ("B: rank", 16, 20.4),
    ):
        axis.barh(rows[row], end - start, 0.5, start, color="tab:blue", alpha=0.35)
    for x, step in ((2.3, 5), (4.3, 10), (11.6, 15), (12.8, 20), (14, 25), (15.2, 30)):
        axis.plot(x, rows["A: rank"], "o", color="tab:green", ms=11)
        if step in (10, 30):
            text = f"step {step}"
            axis.text(x, 3.1, text, color="tab:green", fontsize=9, **style)
    for y in (rows["B: launcher"], rows["B: rank"]):
        axis.plot(5.1, y, "x", color="tab:red", ms=11, mew=3)
    axis.text(5.5, 0.9, "B is killed", color="tab:red", va="center")
    axis.plot(5.35, rows["A: rank"], "x", color="tab:red", ms=8, mew=2)
    axis.text(14.4, 0.9, "B is back", color="tab:blue", ha="right", va="center")
    arrow(axis, (14.6, 0.65), (15.4, 2.3), "tab:blue")
    for start, end, text in (
        (5.3, 8.3, "3 heartbeats\nof B missed"),
        (8.3, 10.2, "last\ncall"),
    ):
        axis.barh(4.75, end - start - 0.1, 1.2, start, color="tab:orange", alpha=0.35)
        axis.text((start + end) / 2, 4.75, text, fontsize=9, **style)
    for start, end, text in (
        (0.3, 5.3, "two ranks"),
        (10.2, 15.4, "one rank,\nfrom step 10"),
        (16, 20.4, "two ranks,\nfrom step 30"),
    ):
        axis.text((start + end) / 2, 4.75, text, color="tab:blue", **style)
    axis.plot([0.3] * 2, [-0.86, -0.54], color="tab:gray", lw=2)
    axis.text(0.6, -0.7, "heartbeat", va="center")
    axis.plot(4, -0.7, "o", color="tab:green", ms=11)
    axis.text(4.4, -0.7, "checkpoint", va="center")
    axis.text(20.4, -0.7, "time (drawn, not measured)", ha="right", va="center")
    plt.show()


def two_layouts_of_buckets():
    """Draw where DDP puts a gradient before and after it has arranged its buckets."""
    axis = canvas(3.9, (-2.6, 12.2), (-0.9, 4.4))
    style = {"ha": "center", "va": "center"}
    colors = {"first": "tab:orange", "middle": "tab:blue", "last": "tab:gray"}
    sizes = {"first": 3.6, "middle": 5.6, "last": 2.4}
    layouts = [
        (2.8, "first step", [["first", "middle", "last"]]),
        (0.4, "later steps", [["last", "middle"], ["first"]]),
    ]
    for y, title, buckets in layouts:
        axis.text(-0.25, y + 0.35, title, ha="right", va="center", weight="bold")
        x = 0
        for bucket in buckets:
            begin = x
            for name in bucket:
                place = (x, y)
                bar = plt.Rectangle(place, sizes[name], 0.75, color=colors[name])
                bar.set(alpha=0.75 if name == "first" else 0.4, ec="white")
                axis.add_patch(bar)
                axis.text(x + sizes[name] / 2, y + 0.37, f"{name} layer", **style)
                x += sizes[name]
            third = (x - begin) / 3
            for n, text in enumerate(("a+b+c", "b+c+a", "c+a+b")):
                left = begin + n * third
                ends = ([left, left + third], [y - 0.15] * 2)
                axis.plot(*ends, color="black", marker="|", lw=1)
                axis.text(left + third / 2, y - 0.45, text, fontsize=11, **style)
            axis.text((begin + x) / 2, y + 1, "one bucket", fontsize=11, **style)
            x += 0.5
    plt.show()


def lines_of_a_job_file():
    """Draw which line of a job file runs where, and SLURM_PROCID in each place."""
    axis = canvas(4.4, (0, 12), (0.4, 6.3))
    style = {"ha": "center", "va": "center", "fontsize": 12}
    columns = [
        (0.1, 3.3, "login node", "tab:gray", "is not set"),
        (3.65, 4.5, "batch script:\nonce, on node1", "tab:orange", "is 0"),
        (8.4, 3.5, "tasks:\non both nodes", "tab:green", "is 0, 1, 2, 3"),
    ]
    for x, width, title, color, number in columns:
        axis.add_patch(plt.Rectangle((x, 1.7), width, 3.5, color=color, alpha=0.13))
        middle = x + width / 2
        axis.text(middle, 5.8, title, weight="bold", color=color, **style)
        axis.text(middle, 1, f"SLURM_PROCID\n{number}", **style)
    code = {**style, "family": "monospace", "fontsize": 11}
    axis.text(1.75, 4.6, "sbatch job.sbatch", **code)
    axis.text(1.75, 3.4, "reads the lines\nwith #SBATCH", **style)
    axis.text(5.9, 4.6, "MASTER_ADDR=...", **code)
    axis.text(5.9, 3.5, "export MASTER_ADDR", **code)
    axis.text(5.9, 2.4, "srun python train.py", **code)
    for n in range(4):
        axis.text(10.2, 4.6 - 0.73 * n, "python train.py", **code)
    arrow(axis, (3.1, 3.4), (3.9, 3.4))
    arrow(axis, (7.8, 2.4), (8.6, 2.4))
    plt.show()


def when_a_run_hangs():
    """Draw the questions to ask about a run that hangs, and where each answer leads."""
    axis = canvas(7.6, (0, 12), (-0.6, 8.8))
    questions = [
        (
            "Does the first step end?",
            "1",
            "the ranks do not find each other:\naddress, port; with NCCL also 4",
        ),
        (
            "Is every rank in a collective?",
            "2",
            "look at the rank that is not:\nit keeps the others waiting",
        ),
        ("Is it the same collective?", "3", "a branch that\nnot all ranks take"),
        (
            "Does the smoke test run\non these nodes?",
            "4",
            "the network, or the links\nbetween a node's GPUs",
        ),
    ]
    for n, (question, section, answer) in enumerate(questions):
        y = 8 - 2 * n
        box(axis, 2.7, y, question, "tab:blue")
        box(axis, 9.4, y, answer, "tab:orange")
        axis.text(6.9, y, section, weight="bold", size=15, ha="center", va="center")
        arrow(axis, (5, y), (6.5, y))
        axis.text(5.7, y + 0.2, "no", ha="center", color="tab:red")
        arrow(axis, (2.7, y - 0.55), (2.7, y - 1.4))
        axis.text(2.9, y - 1, "yes", va="center", color="tab:green")
    axis.text(0.6, 0, "5", weight="bold", size=15, ha="center", va="center")
    box(axis, 2.9, 0, "what NCCL leaves behind", "tab:orange")
    plt.show()


def a_rank_that_does_not_come():
    """Draw two ranks, one of which does not come to the all-reduce of step 4."""
    axis = canvas(3, (-1.6, 12.4), (-1.1, 2.6))
    style = {"ha": "center", "va": "center"}
    for name, y in (("rank 0", 1.5), ("rank 1", 0)):
        axis.text(-0.3, y, name, ha="right", weight="bold", va="center")
        for step in range(3):
            axis.barh(y, 0.6, 0.7, step, color="tab:green", alpha=0.45)
            axis.text(step + 0.3, y, f"{step + 1}", **style)
    for step in range(3):
        axis.barh(0.75, 0.3, 2.2, step + 0.65, color="tab:orange", alpha=0.5)
    axis.text(1.8, 2.25, "all-reduce", color="tab:orange", **style)
    axis.barh(1.5, 6, 0.7, 3.1, color="tab:red", alpha=0.3)
    axis.text(6.1, 1.5, "waits in the all-reduce of step 4", **style)
    axis.barh(0, 6.4, 0.7, 3, color="tab:gray", alpha=0.4)
    axis.text(6.2, 0, "reads from the file server", **style)
    axis.text(
        9.3, 1.5, "timeout:\nRuntimeError", color="tab:red", ha="left", va="center"
    )
    arrow(axis, (9.3, 1.05), (9.5, 0.35), "tab:red")
    axis.text(9.6, 0, "killed by srun,\nwithout an error", ha="left", va="center")
    axis.text(4.5, -0.85, "time (drawn, not measured)", **style)
    plt.show()


def one_turn_of_a_job():
    """Draw the last minutes of a job with a time limit of four hours."""
    axis = canvas(4.4, (-2.6, 12.6), (-1.3, 4.7))
    style = {"ha": "center", "va": "center"}
    rows = {"Slurm": 3.4, "batch script": 2, "ranks": 0.6}
    for name, y in rows.items():
        axis.text(-0.4, y, name, ha="right", va="center", weight="bold")
    for x, text in ((0, "0:00"), (4.4, "3:54"), (10, "4:00"), (12, "4:00:30")):
        axis.plot([x, x], [-0.35, 4.3], ":", color="gray", lw=1)
        axis.text(x, -0.75, text, **style)
    axis.barh(rows["ranks"], 4.8, 0.8, 0, color="tab:green", alpha=0.45)
    axis.text(2.4, rows["ranks"], "train", **style)
    axis.barh(rows["batch script"], 4.4, 0.8, 0, color="tab:gray", alpha=0.3)
    axis.text(2.2, rows["batch script"], "waits for srun", **style)
    box(axis, 4.4, rows["Slurm"], "USR1", "tab:red")
    arrow(axis, (4.4, 3), (4.4, 2.5), "tab:red")
    axis.text(4.6, 1.4, "TERM", color="tab:red", va="center")
    arrow(axis, (4.4, 1.7), (4.5, 1.1), "tab:red")
    axis.barh(rows["ranks"], 1.6, 0.8, 4.85, color="tab:orange", alpha=0.5)
    axis.text(5.65, rows["ranks"], "save", **style)
    arrow(axis, (6.5, 1), (6.9, 1.6))
    box(axis, 7.4, rows["batch script"], "requeue", "tab:orange")
    arrow(axis, (7.5, 2.4), (7.6, 3))
    box(axis, 7.9, rows["Slurm"], "PENDING", "tab:blue")
    box(axis, 10, rows["Slurm"], "TERM", "tab:red")
    box(axis, 12, rows["Slurm"], "KILL", "tab:red")
    axis.text(11, 2.2, "only if\nsomething\nstill runs", color="tab:red", **style)
    plt.show()


def who_gets_sigterm():
    """Draw the processes of a job, and which of them SIGTERM reaches, two plugins."""
    slurm, torchrun, nobody = "tab:red", "tab:orange", "tab:gray"
    both = "tab:purple"
    names = {
        slurm: "from Slurm",
        torchrun: "from torchrun",
        both: "from both",
        nobody: "no SIGTERM",
    }
    chains = {
        "batch step": ["batch\nscript", "srun"],
        "job step,\njob.sbatch": ["rank", "loader\nworker"],
        "job step,\njob_torchrun\n.sbatch": ["torchrun", "rank", "loader\nworker"],
    }
    reached = {
        "proctrack/cgroup": [
            [slurm, nobody],
            [slurm, nobody],
            [slurm, torchrun, torchrun],
        ],
        "proctrack/linuxproc": [2 * [slurm], 2 * [slurm], [slurm, both, both]],
    }
    for plugin, colors in reached.items():
        axis = canvas(4.2, (-2.6, 9.6), (-1.4, 3.6))
        axis.text(-2.5, 3.3, plugin, size=15, weight="bold")
        for row, (step, chain) in enumerate(chains.items()):
            y = 2.3 - 1.25 * row
            axis.text(-2.5, y, step, size=11, va="center")
            row_of_colors = zip(
                ["slurmstepd", *chain], ["white", *colors[row]], strict=True
            )
            for n, (name, color) in enumerate(row_of_colors):
                style = {"boxstyle": "round,pad=0.5", "facecolor": color, "alpha": 0.45}
                where = {"ha": "center", "va": "center", "size": 14}
                axis.text(0.6 + 2.7 * n, y, name, bbox=style, **where)
                if n:
                    arrow(axis, (2.7 * n - 1, y), (2.7 * n - 0.2, y))
        used = [color for color in names if any(color in row for row in colors)]
        for n, color in enumerate(used):
            axis.plot(3 * n, -1.1, "s", color=color, alpha=0.45, ms=16)
            axis.text(3 * n + 0.25, -1.1, names[color], size=13, va="center")
        plt.show()


def signals_by_event(rows, processes):
    """Draw a table: which signal each of a job's processes got at each event.

    rows: {event: the signals, "-" for none}, in the order of `processes`.
    """
    colors = {"SIGTERM": "tab:red", "SIGUSR1": "tab:blue"}
    axis = canvas(0.8 + 0.75 * len(rows), (-4.3, len(processes)), (-len(rows), 1))
    for x, process in enumerate(processes):
        axis.text(x + 0.5, 0.4, process.replace(" ", "\n"), ha="center", size=13)
    for row, (event, signals) in enumerate(rows.items()):
        y = -row - 0.5
        axis.text(-0.15, y, event, ha="right", va="center", size=13)
        for x, signal in enumerate(signals):
            place = (x + 0.04, y - 0.44), 0.92, 0.88
            color = colors.get(signal, "lightgray")
            axis.add_patch(plt.Rectangle(*place, color=color, alpha=0.5, lw=0))
            text = signal.removeprefix("SIG").removesuffix("-")
            axis.text(x + 0.5, y, text, ha="center", va="center", size=13)
    plt.show()


def a_mixed_precision_step():
    """Draw one step in float16, with the type of the numbers at each arrow."""
    axis = canvas(5.6, (-0.9, 9.9), (-1.1, 5.1))
    full, half, only_fp16 = "tab:blue", "tab:orange", "tab:red"
    axis.add_patch(plt.Rectangle((-0.8, 3.2), 10.6, 1.85, color="tab:green", alpha=0.1))
    axis.text(-0.7, 4.72, "under autocast", color="tab:green", size=12)

    def node(x, y, text, color="tab:green"):
        style = {"boxstyle": "round,pad=0.5", "facecolor": color, "alpha": 0.3}
        axis.text(x, y, text, ha="center", va="center", size=12, bbox=style)

    def flow(start, end, kind):
        arrow(axis, start, end, kind)
        text = "16 bits" if kind == half else "float32"
        (x, y), across = start, start[1] == end[1]
        x, y = (x + end[0]) / 2, (y + end[1]) / 2
        place = {"ha": "center", "va": "bottom"} if across else {"ha": "left"}
        axis.text(x + (0 if across else 0.1), y + 0.05, text, color=kind, **place)

    for x, text in enumerate(("weights", "copies", "forward", "loss")):
        node(0.1 + 2.9 * x, 3.9, text)
    for x, kind in enumerate((full, half, half)):
        flow((0.8 + 2.9 * x, 3.9), (2.2 + 2.9 * x, 3.9), kind)
    lower = (("× scale", only_fp16), ("backward", "tab:green"))
    lower += ((".grad", "tab:green"), ("all-reduce", "tab:green"))
    for x, (text, color) in enumerate(lower):
        node(8.8 - 2.9 * x, 2.05, text, color)
    flow((8.8, 3.5), (8.8, 2.5), full)
    for x in range(3):
        flow((8.05 - 2.9 * x, 2.05), (6.75 - 2.9 * x, 2.05), full)
    axis.text(5.9, 2.62, "inside: 16 bits", color=half, ha="center")
    last = (("unscale_", only_fp16), ("clip", "tab:green"))
    last += (("step", "tab:green"), ("update", only_fp16))
    for x, (text, color) in enumerate(last):
        node(0.1 + 2.9 * x, 0.2, text, color)
    flow((0.1, 1.6), (0.1, 0.65), full)
    for x in range(2):
        flow((0.85 + 2.9 * x, 0.2), (2.3 + 2.9 * x, 0.2), full)
    arrow(axis, (6.5, 0.2), (7.95, 0.2))
    text = "red: float16 only; bfloat16 needs neither scale nor scaler"
    axis.text(4.5, -0.85, text, color=only_fp16, ha="center", size=12)
    plt.show()


def gradient_magnitudes(gradient):
    """Plot the magnitudes of a tensor's numbers, as they are and times 2^16."""
    sizes = gradient.flatten().abs().log2()
    _, axis = plt.subplots(figsize=(10, 2.8))
    for shift, label in ((0, "gradient"), (16, "gradient times 2^16")):
        axis.hist(sizes + shift, bins=80, range=(-50, 10), alpha=0.6, label=label)
    axis.axvspan(-25, -14, color="tab:red", alpha=0.1)
    axis.axvspan(-50, -25, color="tab:red", alpha=0.25)
    top = axis.get_ylim()[1]
    axis.text(-19.5, 1.15 * top, "float16 loses digits", ha="center")
    axis.text(-37.5, 1.15 * top, "float16 becomes zero", ha="center")
    axis.set(xlabel="log2 of the magnitude", yticks=[], xlim=(-50, 10))
    axis.set_ylim(0, 1.4 * top)
    axis.legend(loc="upper right")
    plt.show()


def loss_scales(scales):
    """Plot the loss scale of each step; a cross is where the next one is smaller."""
    skipped = [n for n, after in enumerate(scales[1:]) if after < scales[n]]
    _, axis = plt.subplots(figsize=(10, 2.6))
    axis.step(range(len(scales)), scales, where="post")
    crosses = [scales[n] for n in skipped]
    axis.plot(skipped, crosses, "rx", ms=9, mew=2, label="overflow: step skipped")
    axis.set_yscale("log", base=2)
    axis.set(xlabel="step", title="loss scale")
    axis.legend()
    plt.show()


def memory_in_two_precisions(networks):
    """Plot what a training step of some networks needs, without autocast and with it.

    networks: {title: {kind of memory: (MiB in float32, MiB under autocast)}}.
    """
    _, axes = plt.subplots(1, len(networks), figsize=(10, 3.2))
    for axis, (title, kinds) in zip(axes, networks.items(), strict=True):
        for row, sizes in enumerate(kinds.values()):
            for size, place, color in zip(
                sizes, (-0.2, 0.2), ("tab:blue", "tab:orange"), strict=True
            ):
                axis.barh(row + place, size, 0.38, color=color, alpha=0.6)
                axis.text(size, row + place, f" {size:.1f}", va="center", size=11)
        axis.set_yticks(range(len(kinds)), kinds, size=12)
        most = max(max(sizes) for sizes in kinds.values())
        axis.set(title=title, xlim=(0, 1.2 * most), xlabel="MiB")
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    for label, color in (("float32", "tab:blue"), ("autocast", "tab:orange")):
        axes[0].barh(0, 0, color=color, alpha=0.6, label=label)
    axes[0].legend(loc="upper right", fontsize=11)
    plt.tight_layout()
    plt.show()


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
        axis.text(x, 1.0, f"step {step + 1}", ha="center", size=15, weight="bold")
    axis.plot([4.63, 4.63], [-3.5, 1.4], color="gray", lw=1, ls="--")
    names = {0: "one process", -1.8: "process 0 of 2", -3.05: "process 1 of 2"}
    for y, name in names.items():
        axis.text(-0.75, y, name, ha="right", va="center", size=15)
    plt.show()


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
    plt.show()


def memory_by_gpu(held):
    """Draw how many GB each GPU holds at its worst moment, as stacked bars.

    held: {GPU: {name: GB}}.
    """
    _, axis = plt.subplots(figsize=(10, 3.6))
    colors = {}
    for row, sizes in enumerate(held.values()):
        left = 0
        for name, size in sizes.items():
            new = name not in colors
            color = colors.setdefault(name, plt.cm.tab10(len(colors)))
            label = name if new and size <= 3 else None
            style = {"color": color, "alpha": 0.5, "ec": "white", "label": label}
            axis.barh(row, size, 0.7, left, **style)
            if size > 3:
                where = {"ha": "center", "va": "center", "size": 13}
                axis.text(left + size / 2, row, name.replace(" ", "\n"), **where)
            left += size
        total = f" {left:.1f} GB"
        axis.text(left, row, total, va="center", size=15, weight="bold")
    axis.set_yticks(range(len(held)), held, size=15)
    axis.set(xticks=[], xlim=(0, 1.15 * max(sum(s.values()) for s in held.values())))
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.legend(loc="lower right", frameon=False, fontsize=14)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    plt.tight_layout()
    plt.show()


def a_window_and_its_targets():
    """Draw a window of a text, its targets, and which bytes each position may see."""
    window = "Each rank"
    length = len(window) - 1
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3), width_ratios=(1.5, 1))
    for row, (name, letters, color) in enumerate(
        (("targets", window[1:], "tab:green"), ("inputs", window[:-1], "tab:blue"))
    ):
        left.text(-0.7, row, name, ha="right", va="center", size=13)
        for place, letter in enumerate(letters):
            square = plt.Rectangle((place - 0.45, row - 0.3), 0.9, 0.6)
            square.set(facecolor=color, alpha=0.35)
            left.add_patch(square)
            shown = letter.replace(" ", "\u2423")
            left.text(place, row, shown, ha="center", va="center", size=15)
    for place in range(length):
        arrow(left, (place, 0.66), (place, 0.36))
    left.set(xlim=(-2.4, length), ylim=(-0.9, 1.9))
    left.set_title(f"{length} predictions in one window", size=13)
    left.axis("off")
    for row in range(length):
        for column in range(length):
            color = "tab:blue" if column <= row else "white"
            square = plt.Rectangle((column, length - 1 - row), 1, 1)
            square.set(facecolor=color, edgecolor="gray", alpha=0.45)
            right.add_patch(square)
        for x, y, letter in (
            (-0.4, length - 0.5 - row, window[row + 1]),
            (row + 0.5, length + 0.4, window[row]),
        ):
            letter = letter.replace(" ", "\u2423")
            right.text(x, y, letter, ha="center", va="center", size=12)
    right.text(-1.6, length / 2, "to predict", rotation=90, va="center", size=12)
    right.text(length / 2, length + 1.3, "may see", ha="center", size=12)
    right.set(xlim=(-1.8, length + 0.2), ylim=(-0.2, length + 2.2), aspect="equal")
    right.axis("off")
    plt.tight_layout()
    plt.show()


def a_step_of_fsdp():
    """Draw a step of FSDP with three blocks: what overlaps, and what is whole when."""
    forward, backward, gather, reduce = 1.5, 2.4, 1.2, 1.4
    compute, gathers, reduces, start = [], [(0, 1)], [], gather
    weights, gradients = [(0, gather + forward, 1)], []
    for block in (1, 2, 3):
        compute.append((start, forward, f"F{block}", "tab:blue"))
        if block < 3:
            gathers.append((start, block + 1))
            weights.append((start, 2 * forward, block + 1))
        start += forward
    compute.append((start, gather, "loss", "tab:gray"))
    gathers.append((start, 3))
    weights.append((start, gather + backward, 3))
    start += gather
    for block in (3, 2, 1):
        compute.append((start, backward, f"B{block}", "tab:green"))
        gradients.append((start, backward + reduce, block))
        reduces.append((start + backward, block))
        if block > 1:
            gathers.append((start, block - 1))
            weights.append((start, 2 * backward, block - 1))
        start += backward
    start += reduce
    compute.append((start, 0.9, "step", "tab:gray"))
    _, (time, held) = plt.subplots(2, 1, figsize=(10, 5), sharex=True)
    for begin, length, text, color in compute:
        stretch(time, 2, begin, length, text, color)
    for begin, block in gathers:
        stretch(time, 1, begin, gather, f"{block}", "tab:orange")
    for begin, block in reduces:
        stretch(time, 0, begin, reduce, f"{block}", "tab:red")
    for text in time.texts:
        text.set_size(12)
    time.set_yticks(range(3), ["reduce-scatter", "all-gather", "compute"], size=12)
    for spans, color, shift in (
        (weights, "tab:orange", 0.2),
        (gradients, "tab:red", -0.2),
    ):
        for begin, length, block in spans:
            style = {"height": 0.36, "color": color, "alpha": 0.5}
            held.barh(block + shift, length, left=begin, **style)
    held.set_yticks((1, 2, 3), [f"block {block}" for block in (1, 2, 3)], size=12)
    for color, label in (("tab:orange", "weights"), ("tab:red", "gradients")):
        held.barh(1, 0, color=color, alpha=0.5, label=f"whole {label}")
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


def memory_by_rank(rows):
    """Draw how many MiB of each kind a rank holds, as stacked bars.

    rows: {label: {kind: MiB}}, with the same kinds in each row.
    """
    _, axis = plt.subplots(figsize=(10, 0.45 * len(rows) + 1.5))
    kinds = list(next(iter(rows.values())))
    left = torch.zeros(len(rows))
    for n, kind in enumerate(kinds):
        sizes = torch.tensor([float(row[kind]) for row in rows.values()])
        color = "0.85" if kind.startswith("most") else plt.cm.tab10(n)
        style = {"color": color, "alpha": 0.6, "ec": "white", "label": kind}
        axis.barh(range(len(rows)), sizes, 0.75, left, **style)
        left += sizes
    axis.set_yticks(range(len(rows)), rows, size=12)
    axis.set_xlabel("MiB on each rank", size=12)
    axis.tick_params(axis="x", labelsize=12)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower center", "bbox_to_anchor": (0.45, 1)}
    axis.legend(ncols=4, frameon=False, fontsize=12, **above)
    plt.tight_layout()
    plt.show()


def shards_written_and_read():
    """Draw how two ranks write a checkpoint, and how three ranks read it."""
    axis = canvas(4.4, (-1, 11.2), (-0.9, 4.1))
    files = [(1.8, "__0_0.distcp\nrows 0-127"), (0.4, "__1_0.distcp\nrows 128-255")]
    style = {"fill": False, "edgecolor": "0.5", "linestyle": "--"}
    for x, name in ((2.9, ".step-6.tmp"), (7, "step-6")):
        axis.add_patch(plt.Rectangle((x - 1.25, -0.3), 2.5, 4.2, **style))
        font = {"size": 13, "family": "monospace", "weight": "bold"}
        axis.text(x, 3.5, name, ha="center", **font)
        box(axis, x, 2.9, ".metadata", "tab:purple")
        for y, text in files:
            box(axis, x, y, text, "tab:blue")
    for rank, (y, _) in enumerate(files):
        box(axis, -0.3, y, f"rank {rank}")
        arrow(axis, (0.25, y), (1.75, y))
    arrow(axis, (0.1, 2.15), (2.1, 2.85), "tab:purple")
    axis.text(0.75, 2.65, "last", color="tab:purple", ha="center", size=13)
    arrow(axis, (4.2, 1.5), (5.7, 1.5), "tab:red")
    axis.text(4.95, 1.65, "rename", color="tab:red", ha="center", size=13)
    readers = [(2.9, "rank 0\nrows 0-85"), (1.5, "rank 1\nrows 86-171")]
    readers += [(0.1, "rank 2\nrows 172-255")]
    for y, text in readers:
        box(axis, 10.2, y, text, "tab:orange")
    for start, end in ((1.8, 2.8), (1.8, 1.6), (0.4, 1.4), (0.4, 0.1)):
        arrow(axis, (8.15, start), (9.25, end))
    axis.text(0.7, -0.8, "saved by 2 ranks", ha="center", size=13)
    axis.text(9.7, -0.8, "loaded by 3 ranks", ha="center", size=13)
    plt.show()


def a_save_that_blocks_and_one_that_does_not():
    """Draw a few steps around a checkpoint, saved by dcp.save and by dcp.async_save."""
    _, axes = plt.subplots(2, 1, figsize=(10, 4.4), sharex=True)
    rows = (("dcp.save", 1, 3.2, (5.6, 6.6, 7.6)),)
    rows += (("dcp.async_save", 0, 4, (2.4, 3.6, 4.8, 6, 7.2)),)
    for axis, (title, row, length, starts) in zip(axes, rows, strict=True):
        for start, step in ((0, 5), (1, 6)):
            stretch(axis, 1, start, 1, f"{step}", "tab:green")
        stretch(axis, 1, 2, 0.4, "", "tab:orange")
        axis.text(2.2, 1.62, "copy", ha="center", color="tab:orange")
        stretch(axis, row, 2.4, length, "write", "tab:red")
        for step, start in enumerate(starts, start=7):
            slower = 1.2 if start + 0.1 < 2.4 + length and row == 0 else 1
            stretch(axis, 1, start, slower, f"{step}", "tab:green")
        for text in axis.texts:
            text.set_size(12)
        axis.set_title(title, loc="left", size=13, weight="bold", family="monospace")
        axis.set(xlim=(0, 9.3), ylim=(-0.6, 2), xticks=[])
        axis.set_yticks((0, 1), ("thread", "training"), size=12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time (drawn, not measured)", size=12)
    plt.tight_layout()
    plt.show()


def two_products_on_two_ranks():
    """Draw a column-parallel and a row-parallel product, and the sum after them."""
    colors = ("tab:blue", "tab:orange")
    axis = canvas(4.6, (0, 26), (-1.4, 9.8))

    def matrix(x, y, width, height, color, text="", alpha=0.4):
        style = {"facecolor": color, "edgecolor": "white", "lw": 2, "alpha": alpha}
        axis.add_patch(plt.Rectangle((x, y), width, height, **style))
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center")

    def sign(x, y, text):
        axis.text(x, y, text, ha="center", va="center", size=16)

    for rank, (color, bottom) in enumerate(zip(colors, (5.2, 0), strict=True)):
        middle = bottom + 1.5
        axis.text(-0.2, middle, f"rank {rank}", ha="right", va="center", color=color)
        matrix(0, bottom + 0.5, 2, 2, "tab:gray", "x")
        sign(2.6, middle, "·")
        for part, own in enumerate(colors):
            of_rank = own if part == rank else "lightgray"
            text = f"A{part + 1}" if part == rank else ""
            matrix(3.2 + 2 * part, bottom + 0.5, 2, 2, of_rank, text)
        sign(7.9, middle, "=")
        matrix(8.6, bottom + 0.5, 2, 2, color, f"x A{rank + 1}")
        sign(11.6, middle, "→")
        matrix(12.6, bottom + 0.5, 2, 2, color, f"h{rank + 1}")
        sign(15.1, middle, "·")
        for part, own in enumerate(colors):
            of_rank = own if part == rank else "lightgray"
            text = f"B{part + 1}" if part == rank else ""
            matrix(15.6, bottom + 1.5 - 2 * part + 0.25, 2, 1.75, of_rank, text)
        sign(18.2, middle, "=")
        matrix(18.8, bottom + 0.5, 2, 2, color, "partial\nsums", 0.25)
        matrix(24, bottom + 0.5, 2, 2, "tab:gray", "y")
        for other in (6.7, 1.5):  # each rank has the sum of both
            arrow(axis, (21, other), (23.9, middle))
    axis.text(22.4, 9.2, "all-reduce", ha="center", va="center")
    for x, text in (
        (6, "column parallel: some columns of A"),
        (11.6, "GELU"),
        (16.8, "row parallel: these rows of B"),
    ):
        axis.text(x, 9.2, text, ha="center", va="center")
    plt.show()


def a_mesh_of_ranks(rows=4, columns=2):
    """Draw ranks as a grid of tensor-parallel and data-parallel groups."""
    axis = canvas(3.4, (-3, 12), (-0.8, rows + 0.6))
    shades = plt.get_cmap("tab10")
    for row in range(rows):
        y = rows - 1 - row
        for column in range(columns):
            style = {"facecolor": shades(column), "edgecolor": "white", "lw": 3}
            axis.add_patch(plt.Rectangle((3 * column, y), 3, 0.9, alpha=0.4, **style))
            text = f"rank {row * columns + column}"
            axis.text(3 * column + 1.5, y + 0.45, text, ha="center", va="center")
        axis.text(-0.2, y + 0.45, f"samples {row + 1}", ha="right", va="center")
    for column in range(columns):
        text = f"shard {column + 1} of layers"
        axis.text(3 * column + 1.5, rows + 0.2, text, ha="center", va="center")
    right = 3 * columns
    arrow(axis, (0.2, -0.3), (right - 0.2, -0.3), style="<->")
    axis.text(right / 2, -0.65, '"tp": activations', ha="center", va="center")
    arrow(axis, (right + 0.3, 0.1), (right + 0.3, rows - 0.2), style="<->")
    axis.text(right + 0.5, rows / 2, '"dp": weights and gradients (FSDP)', va="center")
    plt.show()
