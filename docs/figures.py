"""The picture of what_can_be_split.md: a model that is cut in seven ways."""

import matplotlib.pyplot as plt

# Four shades of one map: the colors of the other pictures are for kinds of things.
RANKS = tuple(plt.get_cmap("viridis")(place) for place in (0.1, 0.4, 0.7, 0.97))
WHOLE = "0.88"

# How a grid of 4 x 8 cells is dealt out to four ranks: the rank of (row, column), or
# None if every rank has the whole. A row of weights is a block, a column is a part of
# its width; a row of the batch is a sequence, a column some of its tokens.
ROWS = (lambda row, _column: row, "rows")
COLUMNS = (lambda _row, column: column // 2, "columns")
STRIPS = (None, "strips")  # within each block
NOT = (lambda _row, _column: None, "whole")
# attention on the left, and an expert for each rank on the right
EXPERTS = (lambda _row, column: column - 4 if column >= 4 else None, "experts")

# how the batch, the weights, the gradients and AdamW's state are split; what is sent
WAYS = {
    "data (DDP)": (ROWS, NOT, NOT, NOT, "gradients"),
    "optimizer state (ZeRO-1)": (ROWS, NOT, NOT, ROWS, "gradients, new weights"),
    "weights, gradients, state (FSDP)": (
        *(ROWS, STRIPS, STRIPS, STRIPS),
        "weights before use, gradients",
    ),
    "matrix products in a layer (tensor)": (
        *(NOT, COLUMNS, COLUMNS, COLUMNS),
        "sums of activations and of their gradients",
    ),
    "the stack of layers (pipeline)": (
        *(NOT, ROWS, ROWS, ROWS),
        "activations to the next rank, their gradients back",
    ),
    "the sequence (context)": (COLUMNS, NOT, NOT, NOT, "keys and values; gradients"),
    "the experts (expert)": (
        *(ROWS, EXPERTS, EXPERTS, EXPERTS),
        "tokens to their experts and back; gradients of the rest",
    ),
}
NAMES = ("batch", "weights", "gradients", "AdamW's state")
PLACES, SIZE = (0, 4.6, 8.6, 12.6), 0.43  # the left end of each grid; a cell's width


def draw_grid(axis, left, split, name):
    """Draw 4 rows of 8 cells, in the colors of the ranks that have them."""
    deal, kind = split
    for row in range(4):
        y = 3 - row
        if kind == "strips":
            for rank, color in enumerate(RANKS):
                place = (left, y + 0.06 + 0.22 * (3 - rank))
                shape = plt.Rectangle(place, 8 * SIZE, 0.22, fc=color, alpha=0.7)
                axis.add_patch(shape)
            continue
        for column in range(8):
            rank = deal(row, column)
            color = WHOLE if rank is None else RANKS[rank]
            alpha = 1 if rank is None else 0.7
            place = (left + column * SIZE, y + 0.06)
            axis.add_patch(plt.Rectangle(place, SIZE, 0.88, fc=color, alpha=alpha))
    for row in range(4):
        frame = plt.Rectangle((left, row + 0.06), 8 * SIZE, 0.88, fill=False, ec="0.4")
        axis.add_patch(frame)
    axis.text(left + 4 * SIZE, 4.15, name, ha="center", size=11)


def seven_ways():
    """Draw all of WAYS, and in the last place which color is whose."""
    made, axes = plt.subplots(4, 2, figsize=(11, 11))
    for axis in axes.flat:
        axis.set(xlim=(-0.3, 16.3), ylim=(-1, 4.7))
        axis.axis("off")
    for axis, (title, way) in zip(axes.flat, WAYS.items(), strict=False):
        *splits, sent = way
        for left, split, name in zip(PLACES, splits, NAMES, strict=True):
            draw_grid(axis, left, split, name)
        axis.text(8, -0.65, f"sent: {sent}", ha="center", size=11.5)
        axis.set_title(title, size=13, weight="bold")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=color, alpha=0.7) for color in RANKS]
    handles.append(plt.Rectangle((0, 0), 1, 1, fc=WHOLE, ec="0.4"))
    names = [f"rank {rank}" for rank in range(4)] + ["every rank has or uses all of it"]
    style = {"frameon": False, "loc": "center", "fontsize": 13, "labelspacing": 1}
    axes.flat[-1].legend(handles, names, **style)
    made.tight_layout(h_pad=1.5)
