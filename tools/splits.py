"""The picture of docs/what_can_be_split.md: a small transformer, cut in six ways.

`make pages` draws it.
"""

import matplotlib.pyplot as plt

RANKS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
WHOLE = "0.88"

# How a grid of 4 x 8 cells is dealt out to four ranks: the rank of (row, column), or
# None if every rank has the whole. A row of weights is a block, a column is a part of
# its width; a row of the batch is a sequence, a column some of its tokens.
ROWS = (lambda row, _column: row, "rows")
COLUMNS = (lambda _row, column: column // 2, "columns")
STRIPS = (None, "strips")  # within each block
NOT = (lambda _row, _column: None, "whole")

WAYS = {
    "data (DDP)": (ROWS, NOT, NOT, "sent: gradients"),
    "optimizer state (ZeRO-1)": (ROWS, NOT, ROWS, "sent: gradients, new weights"),
    "weights, gradients, state (FSDP)": (
        ROWS,
        STRIPS,
        STRIPS,
        "sent: weights before use, gradients",
    ),
    "matrix products in a layer (tensor)": (
        NOT,
        COLUMNS,
        COLUMNS,
        "sent: sums of activations and of their gradients",
    ),
    "the stack of layers (pipeline)": (
        NOT,
        ROWS,
        ROWS,
        "sent: activations to the next rank, their gradients back",
    ),
    "the sequence (context)": (COLUMNS, NOT, NOT, "sent: keys and values; gradients"),
}


def draw_grid(axis, left, size, split, name):
    """Draw 4 rows of 8 cells, in the colors of the ranks that have them."""
    deal, kind = split
    for row in range(4):
        y = 3 - row
        if kind == "strips":
            for rank, color in enumerate(RANKS):
                place = (left, y + 0.06 + 0.22 * (3 - rank))
                shape = plt.Rectangle(place, 8 * size, 0.22, fc=color, alpha=0.55)
                axis.add_patch(shape)
            continue
        for column in range(8):
            rank = deal(row, column)
            color = WHOLE if rank is None else RANKS[rank]
            alpha = 1 if rank is None else 0.55
            place = (left + column * size, y + 0.06)
            axis.add_patch(plt.Rectangle(place, size, 0.88, fc=color, alpha=alpha))
    for row in range(4):
        frame = plt.Rectangle((left, row + 0.06), 8 * size, 0.88, fill=False, ec="0.4")
        axis.add_patch(frame)
    axis.text(left + 4 * size, 4.15, name, ha="center", size=10.5)


def six_ways():
    """Draw all of WAYS, on the same axes."""
    made, axes = plt.subplots(3, 2, figsize=(9.5, 8.6))
    for axis, (title, way) in zip(axes.flat, WAYS.items(), strict=True):
        batch, weights, state, sent = way
        draw_grid(axis, 0, 0.62, batch, "batch: 4 sequences")
        draw_grid(axis, 6, 0.62, weights, "weights: 4 blocks")
        draw_grid(axis, 12, 0.35, state, "AdamW's state")
        axis.text(7.4, -0.6, sent, ha="center", size=11)
        axis.set_title(title, size=12, weight="bold")
        axis.set(xlim=(-0.3, 15.2), ylim=(-1, 4.7))
        axis.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=color, alpha=0.55) for color in RANKS]
    handles.append(plt.Rectangle((0, 0), 1, 1, fc=WHOLE, ec="0.4"))
    names = [f"rank {rank}" for rank in range(4)] + ["every rank has or uses all of it"]
    made.legend(handles, names, ncols=5, frameon=False, loc="lower center", fontsize=11)
    made.tight_layout(rect=(0, 0.04, 1, 1), h_pad=1.5)
