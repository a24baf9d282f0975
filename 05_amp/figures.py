"""The pictures in this stage's notebooks. Only given numbers are measured."""

import itertools
import math

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import canvas
from nbtools.drawing import panels
from nbtools.drawing import picture


@picture
def number_formats():
    """Draw the bits of four number formats, and the magnitudes that each can hold."""
    formats = {  # bits of exponent and fraction, smallest number, text
        "float32": (8, 23, 2.0**-149, "1e-45 to 3e38"),
        "TF32": (8, 10, None, "only inside products"),
        "bfloat16": (8, 7, 2.0**-133, "9e-41 to 3e38"),
        "float16": (5, 10, 2.0**-24, "6e-8 to 65,504"),
    }
    parts = {"sign": "tab:gray", "exponent": "tab:orange", "fraction": "tab:blue"}
    left, right = panels(2, 3.2, width_ratios=(1.15, 1))
    for row, (name, (exponent, fraction, least, text)) in enumerate(formats.items()):
        start = 0
        for bits, color in zip((1, exponent, fraction), parts.values(), strict=True):
            for n in range(start, start + bits):
                left.barh(row, 0.9, left=n, color=color, alpha=0.6)
            start += bits
        if least is None:
            right.text(0, row, text, ha="center", va="center", size=12, style="italic")
            continue
        bias = 2 ** (exponent - 1) - 1
        smallest, largest = 2.0 ** (1 - bias), (2 - 2.0**-fraction) * 2.0**bias
        ends = [math.log10(x) for x in (least, smallest, largest)]
        right.barh(row, ends[2] - ends[1], left=ends[1], color="tab:green", alpha=0.6)
        right.barh(row, ends[1] - ends[0], left=ends[0], color="tab:green", alpha=0.25)
        place = {"x": ends[2] + 2} if name == "float16" else {"x": 0, "ha": "center"}
        right.text(y=row, s=text, va="center", size=12, **place)
    for part, color in parts.items():
        left.barh(0, 0, color=color, alpha=0.6, label=part)
    left.legend(loc="lower right", bbox_to_anchor=(1, 0.02), fontsize=12)
    left.set(title="one box per bit", xticks=[])
    left.set_yticks(range(4), formats, size=12)
    right.set_title("powers of ten (pale: fewer digits)")
    right.set_yticks([])
    right.tick_params(axis="x", labelsize=12)
    for axis in (left, right):
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    plt.tight_layout()


@picture
def a_mixed_precision_step(scaled=False):
    """Draw the types in one step in bfloat16, or with `scaled` in float16."""
    full, half = 1.9, 0  # the height of the two rows
    steps = [  # a row, what is written, and its kind; None: only float16 has it
        (full, "weights", "weights"),
        (half, "forward", "compute"),
        (full, "loss", "compute"),
        (full, "× scale", None),
        (half, "backward", "compute"),
        (full, "all-reduce\nto .grad", "gradients"),
        (full, "÷ scale", None),
        (full, "step", "optimizer"),
    ]
    steps = [each for each in steps if scaled or each[2]]
    # The box of the all-reduce is wider than the others.
    places = [n + scaled * 0.15 * max(0, n - 4) for n in range(len(steps))]
    axis = canvas(2.9, (-0.75, places[-1] + 0.6), (-0.9, 2.75))
    for row, name in ((full, "float32"), (half, "16 bits")):
        axis.axhspan(row - 0.62, row + 0.62, color="0.5", alpha=0.1)
        axis.text(-0.7, row + 0.36, name, size=12, weight="bold")
    for x, (row, text, kind) in zip(places, steps, strict=True):
        color = COLORS[kind] if kind else "white"
        style = {"boxstyle": "round,pad=0.4", "facecolor": color, "alpha": 0.4}
        style |= {"edgecolor": "black" if kind else "tab:red", "lw": 1 if kind else 2}
        axis.text(x, row, text, ha="center", va="center", size=12, bbox=style)
    for n, ((row, text, _), (below, other, _)) in enumerate(itertools.pairwise(steps)):
        x, end = places[n], places[n + 1]
        if row == below:
            arrow(axis, (end - 0.57, row), (end - 0.43, row))
        else:
            away, there = (0.52 if "\n" in each else 0.3 for each in (text, other))
            down = 1 if row > below else -1
            start = (x + 0.15, row - down * away)
            arrow(axis, start, (end - 0.15, below + down * there))
    axis.text(0.62, 0.88, "copies", size=12, weight="bold")
