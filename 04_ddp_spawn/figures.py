"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas


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
    axis.text(2.3, 1, "spawn", **style)
    axis.text(3.3, 1, "all-reduce,\nevery step", color="tab:green", **style)
    axis.text(5.2, 1, "rendezvous,\nonce", color="tab:orange", **style)
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
    spawned = [("a new interpreter", new), ("threads of its own", new)]
    spawned += [("arguments: a pickle", new), ("CUDA of its own", new)]
    process(7.4, 2.4, "spawned", spawned)
    for x, end, text in ((3.8, 2.75, "copy"), (6.2, 7.3, "start")):
        arrow(axis, (x, 2.5), (end, 2.5))
        axis.text((x + end) / 2, 2.65, text, ha="center")
    below = {"ha": "center", "va": "center"}
    axis.text(1.4, 0.4, "fast; may wait forever\nfor a thread it lacks", **below)
    axis.text(8.6, 0.4, "takes seconds; safe\nwith threads and CUDA", **below)
    plt.show()
