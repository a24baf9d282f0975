"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import canvas


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
