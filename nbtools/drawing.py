"""Shapes that the pictures of all stages are drawn of, and their labels in Chinese.

A picture stands in its stage's figures.py. Only numbers that it is given are measured.
"""

import contextlib
import functools
import inspect
import json
import os
import re
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib import font_manager
from matplotlib.text import Text

ROOT = Path(__file__).resolve().parents[1]

# One color for one kind of thing, in all stages.
COLORS = {
    "weights": "tab:blue",
    "gradients": "tab:orange",
    "buckets": "tab:red",
    "optimizer": "tab:purple",
    "AdamW": "tab:purple",
    "copies": "tab:cyan",
    "activations": "tab:green",
    "logits": "tab:olive",
    "compute": "tab:gray",
}

# Chinese for the labels that pictures of several stages have; {} is any text. A stage's
# own are in its figures.py.
CHINESE = {
    "activations": "激活值",
    "backward": "反向",
    "buckets": "梯度桶",
    "checkpoint": "检查点",
    "copies": "副本",
    "first step": "第一个 step",
    "forward": "前向",
    "gradients": "梯度",
    "learning rate": "学习率",
    "machine {}": "机器 {}",
    "optimizer": "优化器",
    "time": "时间",
    "time (drawn, not measured)": "时间（示意，非实测）",
    "time (drawn, not measured; not to scale)": "时间（示意，非实测，不按比例）",
    "waits": "等待",
    "weights": "权重",
    "MiB on each rank": "每个 rank 上的张量（MiB）",
    "1 rank": "1 个 rank",
    "{} ranks": "{} 个 rank",
    "{} ranks, {}": "{} 个 rank，{}",
    "added at the worst moment": "最坏时刻另外增加的",
    "only the root": "只有根模块（only the root）",
    "ends apart": "首尾单独成组（ends apart）",
    "no reshard": "不重新分片（no reshard）",
}
FONTS = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei"),
    *("SimHei", "Noto Sans CJK JP"),
)


# ---- a picture in two languages ------------------------------------------------------
def picture(draw):
    """Return a function that draws a picture and shows it, in the notebook's language.

    The output keeps which function drew it, and from what. So it can be drawn again
    without the run, in Chinese for example. The arguments are what JSON has.
    """

    @functools.wraps(draw)
    def shown(*args, **options):
        given = inspect.signature(draw).bind(*args, **options).arguments
        path = Path(inspect.getsourcefile(inspect.unwrap(draw))).resolve()
        source = f"{path.relative_to(ROOT)}:{draw.__name__}"
        metadata = {"picture": source, "arguments": json.dumps(given)}
        # Jupyter says so, and runs the English notebook, too.
        chinese = ".zh-CN." in os.environ.get("JPY_SESSION_NAME", "")
        with drawn(draw, given, chinese and chinese_font()):
            display(plt.gcf(), metadata=metadata)
            plt.close()

    return shown


@functools.cache
def chinese_font():
    """Return the first of FONTS that is installed, or None."""
    known = font_manager.fontManager
    if not {*FONTS} & {*known.get_font_names()}:  # matplotlib's list may be old
        for path in font_manager.findSystemFonts():
            with contextlib.suppress(OSError, RuntimeError):  # it cannot read some
                known.addfont(path)
    installed = {*known.get_font_names()}
    return next((name for name in FONTS if name in installed), None)


@contextlib.contextmanager
def drawn(draw, arguments, font=None):
    """Draw a picture; with a font, in Chinese. It is the current figure inside."""
    with plt.rc_context({"font.family": ["DejaVu Sans", font]} if font else {}):
        draw(**arguments)
        if font:
            translate(plt.gcf(), table_of(draw))
        yield


def table_of(draw):
    """Return the Chinese of the labels that a picture may have, its own first."""
    own = inspect.unwrap(draw).__globals__.get("CHINESE", {})
    return own | CHINESE | own


def labels(figure):
    """Return the objects that are a picture's words."""
    return [
        text for text in figure.findobj(Text) if re.search("[a-z]{2}", text.get_text())
    ]


def translate(figure, table):
    """Give a picture its Chinese labels; those that the table lacks stay."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            before = [label.get_text() for label in axis.get_ticklabels()]
            after = [in_chinese(label, table) for label in before]
            if after != before:
                axis.set_ticklabels(after)
    for label in labels(figure):
        chinese = in_chinese(label.get_text(), table)
        if chinese != label.get_text():
            # Most Chinese fonts have no bold: only the Latin letters would be.
            label.set(text=chinese, weight="normal")


def in_chinese(label, table):
    """Return a label in Chinese; {} in the table stands for any text."""
    for english, chinese in table.items():
        pattern = re.escape(english).replace(r"\{\}", "(.+)")
        if match := re.fullmatch(pattern, label):
            return chinese.format(*match.groups())
    return label


# ---- shapes --------------------------------------------------------------------------
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


def panels(number, height, narrow, **options):
    """Return the axes of panels beside each other, or for a phone below each other."""
    if narrow:
        options.pop("width_ratios", None)
        return plt.subplots(number, 1, figsize=(6, number * height), **options)[1]
    return plt.subplots(1, number, figsize=(10, height), **options)[1]


def stretch(axis, row, start, length, text, color):
    """Draw a stretch of time with a word in it."""
    axis.barh(row, length, left=start, height=0.7, color=color, alpha=0.45, ec="white")
    axis.text(start + length / 2, row, text, ha="center", va="center", fontsize=9)


@picture
def memory_by_rank(rows):
    """Draw how many MiB of each kind a rank holds, as stacked bars.

    rows: {label: {kind: MiB}}, with the same kinds in each row.
    """
    _, axis = plt.subplots(figsize=(10, 0.45 * len(rows) + 1.5))
    kinds = list(next(iter(rows.values())))
    left = [0.0] * len(rows)
    for kind in kinds:
        sizes = [float(row[kind]) for row in rows.values()]
        color = COLORS.get(kind, "0.85")
        style = {"color": color, "alpha": 0.6, "ec": "white", "label": kind}
        axis.barh(range(len(rows)), sizes, 0.75, left, **style)
        left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    axis.set_yticks(range(len(rows)), rows, size=12)
    axis.set_xlabel("MiB on each rank", size=12)
    axis.tick_params(axis="x", labelsize=12)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower center", "bbox_to_anchor": (0.45, 1)}
    axis.legend(ncols=4, frameon=False, fontsize=12, **above)
    plt.tight_layout()
