"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture
from nbtools.drawing import stretch


@picture
def shards_written_and_read():
    """Draw how two ranks write a checkpoint, and how three ranks read it."""
    axis = canvas(4.4, (-1, 11.2), (-0.9, 4.1))
    files = [(1.8, "__0_0.distcp\nrows 0-127"), (0.4, "__1_0.distcp\nrows 128-255")]
    style = {"fill": False, "edgecolor": "0.5", "linestyle": "--"}
    for x, name in ((2.9, ".step-6.tmp"), (7, "step-6")):
        axis.add_patch(plt.Rectangle((x - 1.25, -0.3), 2.5, 4.2, **style))
        font = {"size": 13, "family": "monospace", "weight": "bold"}
        axis.text(x, 3.5, name, ha="center", **font)
        box(axis, x, 2.9, ".metadata", "tab:gray")
        for y, text in files:
            box(axis, x, y, text, COLORS["weights"])
    for rank, (y, _) in enumerate(files):
        box(axis, -0.3, y, f"rank {rank}", "0.9")
        arrow(axis, (0.25, y), (1.75, y))
    arrow(axis, (0.1, 2.15), (2.1, 2.85), "tab:gray")
    axis.text(0.75, 2.65, "last", color="0.4", ha="center", size=13)
    arrow(axis, (4.2, 1.5), (5.7, 1.5))
    axis.text(4.95, 1.65, "rename", ha="center", size=13)
    readers = [(2.9, "rank 0\nrows 0-85"), (1.5, "rank 1\nrows 86-171")]
    readers += [(0.1, "rank 2\nrows 172-255")]
    for y, text in readers:
        box(axis, 10.2, y, text, "0.9")
        arrow(axis, (7.65, 2.9), (9.25, y + 0.25), "0.7")  # each looks up in the index
    for start, end in ((1.8, 2.8), (1.8, 1.6), (0.4, 1.4), (0.4, 0.1)):
        arrow(axis, (8.15, start), (9.25, end))
    axis.text(0.7, -0.8, "saved by 2 ranks", ha="center", size=13)
    axis.text(9.7, -0.8, "loaded by 3 ranks", ha="center", size=13)


@picture
def a_save_that_blocks_and_one_that_does_not():
    """Draw a few steps around a checkpoint, saved by dcp.save and by dcp.async_save."""
    _, axes = plt.subplots(2, 1, figsize=(10, 4.4), sharex=True)
    step_color, write_color = COLORS["compute"], "tab:brown"
    rows = (("dcp.save", (5.6, 6.6, 7.6), ()),)
    rows += (("dcp.async_save", (2.4, 3.6, 4.8, 6, 7.2), (7, 8, 9, 10)),)
    for axis, (title, starts, slower) in zip(axes, rows, strict=True):
        for start, step in ((0, 5), (1, 6)):
            stretch(axis, 1, start, 1, f"{step}", step_color)
        if slower:
            stretch(axis, 1, 2, 0.4, "", COLORS["copies"])
            axis.text(2.2, 1, "copy", ha="center", va="center", rotation=90)
            stretch(axis, 0, 2.4, 4, "write", write_color)
            text = f"steps {slower[0]} to {slower[-1]} take longer"
            axis.text(6.6, 0, text, va="center")
        else:
            for part in range(4):  # a few shards at a time
                stretch(axis, 1, 2 + 0.9 * part, 0.1, "", COLORS["copies"])
                stretch(axis, 1, 2.1 + 0.9 * part, 0.8, "write", write_color)
        for step, start in enumerate(starts, start=7):
            length = 1.2 if step in slower else 1
            stretch(axis, 1, start, length, f"{step}", step_color)
        arrow(axis, (2, 1.55), (starts[0], 1.55), style="|-|")
        axis.text(starts[0] + 0.1, 1.6, "training stands still", va="center")
        for text in axis.texts:
            text.set_size(12)
        axis.set_title(title, loc="left", size=13, weight="bold", family="monospace")
        axis.set(xlim=(0, 9.3), ylim=(-0.6, 2), xticks=[])
        axis.set_yticks((0, 1), ("thread", "training"), size=12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time (drawn, not measured)", size=12)
    plt.tight_layout()


# What the labels are in Chinese; {} is any text. More are in nbtools/drawing.py.
CHINESE = {
    "{}\nrows {}": "{}\n第 {} 行",
    "saved by {} ranks": "由 {} 个 rank 保存",
    "loaded by {} ranks": "由 {} 个 rank 加载",
    "last": "最后",
    "rename": "改名",
    "copy": "复制",
    "steps {} to {} take longer": "第 {} 到 {} 步变慢",
    "thread": "线程",
    "training stands still": "训练暂停",
    "training": "训练",
    "write": "写入",
}
