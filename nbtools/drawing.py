"""Shapes that the pictures of all stages are drawn of.

A picture stands in its stage's figures.py. Only numbers that it is given are measured.
"""

import functools
import inspect
import json
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import display

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


def picture(draw):
    """Return a function that draws a picture and shows it.

    The output keeps which function drew it, and from what. So tools/picture.py can draw
    it again without the run.
    """

    @functools.wraps(draw)
    def shown(*args, **options):
        given = inspect.signature(draw).bind(*args, **options).arguments
        path = Path(inspect.getsourcefile(inspect.unwrap(draw))).resolve()
        source = f"{path.relative_to(ROOT)}:{draw.__name__}"
        metadata = {"picture": source, "arguments": json.dumps(given)}
        draw(**given)
        display(plt.gcf(), metadata=metadata)
        plt.close()

    return shown


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


def panels(number, height, **options):
    """Return the axes of panels beside each other."""
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
