"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
@plt.rc_context({"font.size": 12})
def counts_of_two_shards():
    """Draw eleven images on two ranks, and two ways to get one accuracy from them."""
    axis = canvas(3.6, (-1.4, 12.6), (-3.3, 2.4))
    for rank, y in enumerate((1.8, 0.5)):
        axis.text(-1.3, y, f"rank {rank}", va="center", weight="bold")
        for place, n in enumerate(range(rank, 11, 2)):
            mark = "\u2717" if n in (2, 5, 9) else "\u2713"
            style = {"boxstyle": "square,pad=0.3", "facecolor": "0.85"}
            place = 0.4 + 0.95 * place
            text = f"{n} {mark}"
            axis.text(place, y, text, ha="center", va="center", bbox=style)
        text = f"{5 - 2 * rank} of {6 - rank} are right"
        axis.text(6, y, text, va="center")
    ways = (
        ("add up the counts, then divide", ("5 of 6", "3 of 5"), "8 of 11: 72.7 %"),
        ("divide, then average: wrong", ("83.3 %", "60.0 %"), "71.7 %"),
    )
    for left, (title, sent, result) in zip((-1.3, 6), ways, strict=True):
        color = "tab:red" if "wrong" in title else "tab:green"
        axis.text(left, -0.75, title, color=color, weight="bold")
        for y, text in zip((-1.6, -2.7), sent, strict=True):
            box(axis, left + 0.7, y, text, "0.85")
            arrow(axis, (left + 1.6, y), (left + 2.5, -2.15), color)
        axis.text(left + 2.7, -2.15, result, va="center", weight="bold", size=13)
