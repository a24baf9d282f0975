"""The pictures in this stage's notebooks. Only given numbers are measured."""

from fractions import Fraction

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import canvas
from nbtools.drawing import picture

OTHERS = "0.92"  # what another rank has


def matrix(axis, x, y, width, height, color, text="", alpha=0.45, size=11):
    """Draw a matrix, or a part of one, with its name in it."""
    style = {"facecolor": color, "edgecolor": "white", "lw": 2, "alpha": alpha}
    axis.add_patch(plt.Rectangle((x, y), width, height, **style))
    middle = x + width / 2, y + height / 2
    axis.text(*middle, text, ha="center", va="center", size=size)


def add_up(axis, x, heights, target):
    """Draw an all-reduce: what two ranks have at x is added up, and both get it."""
    middle = x + 1.7, sum(heights) / 2
    for height in heights:
        arrow(
            axis, (x, height), (middle[0] - 0.5, middle[1] + (height > middle[1]) - 0.5)
        )
        arrow(
            axis,
            (middle[0] + 0.5, middle[1] + (height > middle[1]) - 0.5),
            (target, height),
        )
    circle = plt.Circle(middle, 0.7, facecolor="white", edgecolor="black", lw=1.5)
    axis.add_patch(circle)
    axis.text(*middle, "+", ha="center", va="center", size=18)


def two_products(axis, top, names, color, heading):
    """Draw two matrix products on two ranks: one by columns, the next by rows."""
    source, first, between, second, target, way = names

    def sign(x, y, text):
        axis.text(x, y, text, ha="center", va="center", size=15)

    middles = (top - 2.2, top - 6.0)
    axis.text(-2.2, top, heading, weight="bold", va="center", size=12)
    for rank, middle in enumerate(middles):
        bottom = middle - 1
        axis.text(-0.2, middle, f"rank {rank}", ha="right", va="center", size=11)
        matrix(axis, 0, bottom, 2, 2, color, source)
        sign(2.6, middle, "·")
        for part in range(2):
            style = (COLORS["weights"], first.format(part + 1))
            style = style if part == rank else (OTHERS, "")
            matrix(axis, 3.2 + 2 * part, bottom, 2, 2, *style)
        sign(7.9, middle, "=")
        matrix(axis, 8.6, bottom, 2, 2, color, between[0].format(rank + 1))
        arrow(axis, (10.8, middle), (12.9, middle))
        axis.text(11.8, middle + 0.5, way, ha="center", size=10)
        matrix(axis, 13.1, bottom, 2, 2, color, between[1].format(rank + 1))
        sign(15.6, middle, "·")
        for part in range(2):
            style = (COLORS["weights"], second.format(part + 1))
            style = style if part == rank else (OTHERS, "")
            matrix(axis, 16.1, middle - 1.7 * part, 2, 1.6, *style)
        sign(18.7, middle, "=")
        matrix(axis, 19.3, bottom, 2, 2, color, "partial\nsums", 0.2, 10)
        matrix(axis, 25.2, bottom, 2, 2, color, target)
    add_up(axis, 21.5, middles, 25)
    axis.text(23.2, top - 0.6, "all-reduce", ha="center", va="center", size=11)


@picture
def two_products_on_two_ranks():
    """Draw a pair of layers on two ranks, forward and backward."""
    axis = canvas(7, (-2.5, 27.5), (-1.2, 17.4))
    names = ("x", "A{}", ("x A{}", "h{}"), "B{}", "y", "GELU")
    two_products(axis, 16.8, names, COLORS["activations"], "forward: y = GELU(x A) B")
    names = ("dy", "B{}ᵀ", ("dh{}", "da{}"), "A{}ᵀ", "dx", "GELU'")
    heading = "backward, for the gradient dx of x"
    two_products(axis, 7.4, names, COLORS["gradients"], heading)


def rows_of_qkv(axis, left, top, parts, heading, verdict):
    """Draw the rows of `qkv`: which part each of two ranks gets.

    parts: (kind, head) of each slice of the rows, from the top
    """
    shades = {"q": 0.25, "k": 0.5, "v": 0.75}
    axis.text(left + 1.6, top + 0.5, heading, ha="center", size=11, weight="bold")
    height = 0.52
    for n, (kind, head) in enumerate(parts):
        gap = 0.35 if n >= len(parts) / 2 else 0
        place = (left, top - (n + 1) * height - gap, 3.2, height)
        matrix(
            axis, *place, COLORS["weights"], f"{kind} of head {head}", shades[kind], 10
        )
    half = len(parts) / 2 * height
    for rank, text in enumerate(verdict):
        y = top - rank * (half + 0.35) - half / 2
        axis.text(left + 3.4, y, f"rank {rank}:\n{text}", va="center", size=11)


@picture
def attention_on_two_ranks():
    """Draw attention split by heads, and how the rows of `qkv` have to be ordered."""
    axis = canvas(8, (-1.8, 26), (-0.4, 18.2))
    # the flow through attention
    top, middles = 17.4, (15.2, 11.6)
    axis.text(
        -1.8, top + 0.3, "attention, with four heads: 1 to 4", weight="bold", size=12
    )
    for rank, middle in enumerate(middles):
        heads = (1, 2) if rank == 0 else (3, 4)
        axis.text(-0.2, middle, f"rank {rank}", ha="right", va="center", size=11)
        matrix(axis, 0, middle - 0.9, 1.6, 1.8, COLORS["activations"], "x")
        arrow(axis, (1.7, middle), (2.5, middle))
        text = f"qkv:\nrows of\n{heads[0]} and {heads[1]}"
        matrix(axis, 2.6, middle - 1.2, 3, 2.4, COLORS["weights"], text, size=10)
        for n, head in enumerate(heads):
            y = middle + 0.7 - 1.4 * n
            arrow(axis, (5.7, middle), (6.5, y))
            text = f"q, k, v of head {head}"
            matrix(axis, 6.6, y - 0.55, 4.6, 1.1, COLORS["activations"], text)
            arrow(axis, (11.3, y), (13.2, y))
            matrix(axis, 13.3, y - 0.55, 1.7, 1.1, COLORS["activations"], f"y{head}")
            arrow(axis, (15.1, y), (15.9, middle))
        text = f"out:\ncolumns of\n{heads[0]} and {heads[1]}"
        matrix(axis, 16, middle - 1.2, 3, 2.4, COLORS["weights"], text, size=10)
        matrix(
            axis,
            19.1,
            middle - 0.9,
            1.7,
            1.8,
            COLORS["activations"],
            "partial\nsums",
            0.2,
            9,
        )
        matrix(axis, 24.3, middle - 0.9, 1.6, 1.8, COLORS["activations"], "y")
    axis.text(12.2, 16.8, "attention", ha="center", size=10)
    add_up(axis, 20.9, middles, 24.2)
    axis.text(22.6, 16.8, "all-reduce", ha="center", size=11)
    # the rows of qkv
    by_head = [(kind, head) for head in (1, 2, 3, 4) for kind in "qkv"]
    by_kind = [(kind, head) for kind in "qkv" for head in (1, 2, 3, 4)]
    heading = "rows of qkv, head by head"
    rows_of_qkv(axis, 0.5, 7, by_head, heading, ("whole heads", "whole heads"))
    heading = "all q, then all k, then all v"
    right = ("all q, and\nk of two heads", "k of two heads,\nand all v: no error")
    rows_of_qkv(axis, 13, 7, by_kind, heading, right)


@picture
def a_mesh_of_ranks(rows=4, columns=2, machines=2):
    """Draw ranks as a grid of groups, and which of them are on one machine."""
    axis = canvas(4.2, (-3.1, 3 * columns + 4.1), (-1, rows + 1.3))
    shades = (0.25, 0.6)
    per_machine = rows // machines
    for row in range(rows):
        y = rows - 1 - row + 0.5 * (row < per_machine)
        for column in range(columns):
            style = {"facecolor": COLORS["weights"], "edgecolor": "white", "lw": 3}
            style["alpha"] = shades[column]
            axis.add_patch(plt.Rectangle((3 * column, y), 3, 0.9, **style))
            text = f"rank {row * columns + column}"
            middle = 3 * column + 1.5, y + 0.45
            axis.text(*middle, text, ha="center", va="center", size=11)
        text = f"samples {row + 1}"
        axis.text(-0.3, y + 0.45, text, ha="right", va="center", size=11)
    for column in range(columns):
        text = f"shard {column + 1}"
        axis.text(3 * column + 1.5, rows + 0.75, text, ha="center", size=11)
    axis.text(-0.3, rows + 0.75, "of layers:", ha="right", size=11)
    right = 3 * columns
    for machine in range(machines):
        y = rows - (machine + 1) * per_machine + 0.5 * (machine == 0)
        style = {"fill": False, "edgecolor": "black", "lw": 1.5, "ls": "--"}
        frame = ((-2.4, y - 0.08), right + 2.6, per_machine + 0.06)
        axis.add_patch(plt.Rectangle(*frame, **style))
        text = f"machine {machine + 1}"
        place = -2.7, y + per_machine / 2
        axis.text(*place, text, ha="center", va="center", rotation=90, size=11)
    arrow(axis, (0.1, -0.35), (right - 0.1, -0.35), style="<->")
    text = '"tp": activations, within a machine'
    axis.text(right / 2, -0.85, text, ha="center", va="center", size=11)
    arrow(axis, (right + 0.6, 0.1), (right + 0.6, rows + 0.3), style="<->")
    text = '"dp": weights and\ngradients (FSDP),\nacross machines'
    axis.text(right + 0.9, rows / 2 + 0.2, text, va="center", size=11)


def timeline(orders):
    """Return (name, begin, end) of each process's passes, as early as they can be.

    orders: for each process the names of its passes in order, such as ["F0", "B0"]. A
    backward pass takes twice as long as a forward pass, and sending takes no time.
    """
    ends, rows = {}, [[] for _ in orders]
    while any(len(row) < len(order) for row, order in zip(rows, orders, strict=True)):
        for rank, (row, order) in enumerate(zip(rows, orders, strict=True)):
            if len(row) == len(order):
                continue
            name = order[len(row)]
            # what it needs comes from the process before, or in backward after it
            other = rank - 1 if name[0] == "F" else rank + 1
            if 0 <= other < len(orders) and (other, name) not in ends:
                continue
            begin = max(ends.get((other, name), 0), row[-1][2] if row else 0)
            ends[rank, name] = begin + (1 if name[0] == "F" else 2)
            row.append((name, begin, ends[rank, name]))
    return rows


@picture
def passes_of_schedules(printed):
    """Draw when the passes of each schedule begin and end.

    printed: {name of a schedule: what demos/pipeline.py has printed}
    """
    _, axes = plt.subplots(len(printed), figsize=(11, 6.2), sharex=True)
    colors = {"F": "tab:green", "B": "tab:orange"}  # as activations, and gradients
    idle = {"facecolor": "white", "edgecolor": "0.75", "hatch": "///", "lw": 0}
    for axis, (name, text) in zip(axes, printed.items(), strict=True):
        lines = [line for line in text.splitlines() if line.startswith("rank ")]
        rows = timeline([line.split("; ")[1].split() for line in lines])
        end = max(row[-1][2] for row in rows)
        axis.add_patch(plt.Rectangle((0, 0), end, len(rows), **idle))
        for rank, row in enumerate(rows):
            for each, begin, stop in row:
                place = ((begin, rank), stop - begin, 1)
                axis.add_patch(plt.Rectangle(*place, facecolor="white"))
                style = {"facecolor": colors[each[0]], "edgecolor": "0.3", "lw": 0.6}
                axis.add_patch(plt.Rectangle(*place, alpha=0.5, **style))
                middle = (begin + stop) / 2, rank + 0.5
                axis.text(*middle, each[1:], ha="center", va="center", size=11)
        numbers = [f"process {rank}" for rank in range(len(rows))]
        axis.set_yticks([rank + 0.5 for rank in range(len(rows))], numbers, size=11)
        axis.set(xlim=(0, end), ylim=(len(rows), 0), xticks=[])
        work = sum(stop - begin for row in rows for _, begin, stop in row)
        title = f"{name}: bubble {1 - Fraction(work, end * len(rows))}"
        axis.set_title(title, loc="left", weight="bold", size=12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time", size=11)
    styles = [{"facecolor": color, "alpha": 0.5} for color in colors.values()]
    handles = [plt.Rectangle((0, 0), 1, 1, **style) for style in (*styles, idle)]
    style = {"frameon": False, "fontsize": 11, "ncols": 3, "loc": "lower right"}
    kinds = ("forward", "backward", "waits")
    axes[0].legend(handles, kinds, bbox_to_anchor=(1, 1), **style)
    plt.tight_layout()
