"""The drawings in the notebooks. They show how something works; nothing in them is measured."""

import matplotlib.pyplot as plt


def box(axis, x, y, text, colour="tab:green"):
    style = {"boxstyle": "round,pad=0.6", "facecolor": colour, "alpha": 0.35}
    axis.text(x, y, text, ha="center", va="center", bbox=style)


def arrow(axis, start, end, colour="black", style="->"):
    axis.annotate("", end, start, arrowprops={"arrowstyle": style, "color": colour, "lw": 1.5})


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
    for name, length, colour in steps:
        for row in [3] if colour == alone else range(4):
            axis.barh(row, length, left=start, color=colour, edgecolor="white")
        axis.text(start + length / 2, 3.55, name, rotation=30, fontsize=8)
        start += length
    axis.set(yticks=range(4), yticklabels=["GPU 3", "GPU 2", "GPU 1", "GPU 0"], xticks=[])
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
    """Draw a parent that spawns two processes, which meet in a file."""
    axis = canvas(2.6, (-2, 9), (-0.7, 2.7))
    box(axis, 0, 1, "parent: python train.py\nreads flags, waits")
    box(axis, 7.5, 1, "a file in a new\ntemporary folder", "tab:orange")
    for rank, y in ((0, 2), (1, 0)):
        box(axis, 4, y, f"worker({rank}, args, folder)")
        arrow(axis, (1.5, 1), (2.7, y))
        arrow(axis, (5.3, y), (6.4, 1), "tab:orange", "<->")
    axis.text(2, 1, "spawn", ha="center", va="center")
    axis.text(5.5, 1, "meet", ha="center", va="center", color="tab:orange")
    plt.show()
