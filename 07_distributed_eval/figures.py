"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas


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
