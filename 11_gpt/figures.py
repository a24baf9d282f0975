"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import panels
from nbtools.drawing import picture


@picture
def a_window_and_its_targets():
    """Draw a window of a text, its targets, and which bytes each position may see."""
    window = "Each rank"
    length = len(window) - 1
    left, right = panels(2, 3, width_ratios=(1.5, 1))
    for row, (name, letters, color) in enumerate(
        (("targets", window[1:], "tab:brown"), ("inputs", window[:-1], "tab:gray"))
    ):
        left.text(-0.7, row, name, ha="right", va="center", size=13)
        for place, letter in enumerate(letters):
            square = plt.Rectangle((place - 0.45, row - 0.3), 0.9, 0.6)
            square.set(facecolor=color, alpha=0.35)
            left.add_patch(square)
            shown = letter.replace(" ", "\u2423")
            left.text(place, row, shown, ha="center", va="center", size=15)
    for place in range(length):
        arrow(left, (place, 0.66), (place, 0.36))
    left.set(xlim=(-2.4, length), ylim=(-0.9, 1.9))
    left.set_title(f"{length} predictions in one window", size=13)
    left.axis("off")
    for row in range(length):
        for column in range(length):
            color = "tab:gray" if column <= row else "white"
            square = plt.Rectangle((column, length - 1 - row), 1, 1)
            square.set(facecolor=color, edgecolor="gray", alpha=0.45)
            right.add_patch(square)
        for x, y, letter in (
            (-0.4, length - 0.5 - row, window[row]),
            (row + 0.5, length + 0.4, window[row]),
        ):
            letter = letter.replace(" ", "\u2423")
            right.text(x, y, letter, ha="center", va="center", size=12)
    right.text(-1.6, length / 2, "an input", rotation=90, va="center", size=12)
    right.text(length / 2, length + 1.3, "sees these inputs", ha="center", size=12)
    right.set(xlim=(-1.8, length + 0.2), ylim=(-0.2, length + 2.2), aspect="equal")
    right.axis("off")
    plt.tight_layout()
