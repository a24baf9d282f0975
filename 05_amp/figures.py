"""The pictures in this stage's notebooks. Only given numbers are measured."""

import math

import matplotlib.pyplot as plt
import torch

from nbtools.drawing import arrow
from nbtools.drawing import canvas


def number_formats():
    """Draw the bits of four number formats, and the magnitudes that each can hold."""
    formats = {  # bits of exponent and fraction, smallest number, text
        "float32": (8, 23, 2.0**-149, "1e-45 to 3e38"),
        "TF32": (8, 10, 2.0**-126, "1e-38 to 3e38"),
        "bfloat16": (8, 7, 2.0**-133, "9e-41 to 3e38"),
        "float16": (5, 10, 2.0**-24, "6e-8 to 65,504"),
    }
    parts = {"sign": "tab:gray", "exponent": "tab:orange", "fraction": "tab:blue"}
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 2.9), width_ratios=(1.15, 1))
    for row, (name, (exponent, fraction, least, text)) in enumerate(formats.items()):
        start = 0
        for bits, color in zip((1, exponent, fraction), parts.values(), strict=True):
            for n in range(start, start + bits):
                left.barh(row, 0.9, left=n, color=color, alpha=0.6)
            start += bits
        info = torch.finfo(getattr(torch, name, torch.float32))
        ends = [math.log10(x) for x in (least, info.tiny, info.max)]
        right.barh(row, ends[2] - ends[1], left=ends[1], color="tab:green", alpha=0.6)
        right.barh(row, ends[1] - ends[0], left=ends[0], color="tab:green", alpha=0.25)
        if name == "float16":
            right.text(ends[2] + 2, row, text, va="center")
        else:
            right.text(0, row, text, ha="center", va="center")
    for part, color in parts.items():
        left.barh(0, 0, color=color, alpha=0.6, label=part)
    left.legend(loc="lower right", bbox_to_anchor=(1, 0.05))
    left.set(title="one box per bit", xticks=[])
    left.set_yticks(range(4), formats)
    right.set(title="magnitudes, powers of ten (pale: fewer digits)", yticks=[])
    for axis in (left, right):
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    plt.tight_layout()
    plt.show()


def a_mixed_precision_step():
    """Draw one step in float16, with the type of the numbers at each arrow."""
    axis = canvas(5.6, (-0.9, 9.9), (-1.1, 5.1))
    full, half, only_fp16 = "tab:blue", "tab:orange", "tab:red"
    axis.add_patch(plt.Rectangle((-0.8, 3.2), 10.6, 1.85, color="tab:green", alpha=0.1))
    axis.text(-0.7, 4.72, "under autocast", color="tab:green", size=12)

    def node(x, y, text, color="tab:green"):
        style = {"boxstyle": "round,pad=0.5", "facecolor": color, "alpha": 0.3}
        axis.text(x, y, text, ha="center", va="center", size=12, bbox=style)

    def flow(start, end, kind):
        arrow(axis, start, end, kind)
        text = "16 bits" if kind == half else "float32"
        (x, y), across = start, start[1] == end[1]
        x, y = (x + end[0]) / 2, (y + end[1]) / 2
        place = {"ha": "center", "va": "bottom"} if across else {"ha": "left"}
        axis.text(x + (0 if across else 0.1), y + 0.05, text, color=kind, **place)

    for x, text in enumerate(("weights", "copies", "forward", "loss")):
        node(0.1 + 2.9 * x, 3.9, text)
    for x, kind in enumerate((full, half, half)):
        flow((0.8 + 2.9 * x, 3.9), (2.2 + 2.9 * x, 3.9), kind)
    lower = (("× scale", only_fp16), ("backward", "tab:green"))
    lower += ((".grad", "tab:green"), ("all-reduce", "tab:green"))
    for x, (text, color) in enumerate(lower):
        node(8.8 - 2.9 * x, 2.05, text, color)
    flow((8.8, 3.5), (8.8, 2.5), full)
    for x in range(3):
        flow((8.05 - 2.9 * x, 2.05), (6.75 - 2.9 * x, 2.05), full)
    axis.text(5.9, 2.62, "inside: 16 bits", color=half, ha="center")
    last = (("unscale_", only_fp16), ("clip", "tab:green"))
    last += (("step", "tab:green"), ("update", only_fp16))
    for x, (text, color) in enumerate(last):
        node(0.1 + 2.9 * x, 0.2, text, color)
    flow((0.1, 1.6), (0.1, 0.65), full)
    for x in range(2):
        flow((0.85 + 2.9 * x, 0.2), (2.3 + 2.9 * x, 0.2), full)
    arrow(axis, (6.5, 0.2), (7.95, 0.2))
    text = "red: float16 only; bfloat16 needs neither scale nor scaler"
    axis.text(4.5, -0.85, text, color=only_fp16, ha="center", size=12)
    plt.show()


def gradient_magnitudes(gradient):
    """Plot the magnitudes of a tensor's numbers, as they are and times 2^16."""
    sizes = gradient.flatten().abs().log2()
    _, axis = plt.subplots(figsize=(10, 2.8))
    for shift, label in ((0, "gradient"), (16, "gradient times 2^16")):
        axis.hist(sizes + shift, bins=80, range=(-50, 10), alpha=0.6, label=label)
    axis.axvspan(-25, -14, color="tab:red", alpha=0.1)
    axis.axvspan(-50, -25, color="tab:red", alpha=0.25)
    top = axis.get_ylim()[1]
    axis.text(-19.5, 1.15 * top, "float16 loses digits", ha="center")
    axis.text(-37.5, 1.15 * top, "float16 becomes zero", ha="center")
    axis.set(xlabel="log2 of the magnitude", yticks=[], xlim=(-50, 10))
    axis.set_ylim(0, 1.4 * top)
    axis.legend(loc="upper right")
    plt.show()


def loss_scales(scales):
    """Plot the loss scale of each step; a cross is where the next one is smaller."""
    skipped = [n for n, after in enumerate(scales[1:]) if after < scales[n]]
    _, axis = plt.subplots(figsize=(10, 2.6))
    axis.step(range(len(scales)), scales, where="post")
    crosses = [scales[n] for n in skipped]
    axis.plot(skipped, crosses, "rx", ms=9, mew=2, label="overflow: step skipped")
    axis.set_yscale("log", base=2)
    axis.set(xlabel="step", title="loss scale")
    axis.legend()
    plt.show()


def memory_in_two_precisions(networks):
    """Plot what a training step of some networks needs, without autocast and with it.

    networks: {title: {kind of memory: (MiB in float32, MiB under autocast)}}.
    """
    _, axes = plt.subplots(1, len(networks), figsize=(10, 3.2))
    for axis, (title, kinds) in zip(axes, networks.items(), strict=True):
        for row, sizes in enumerate(kinds.values()):
            for size, place, color in zip(
                sizes, (-0.2, 0.2), ("tab:blue", "tab:orange"), strict=True
            ):
                axis.barh(row + place, size, 0.38, color=color, alpha=0.6)
                axis.text(size, row + place, f" {size:.1f}", va="center", size=11)
        axis.set_yticks(range(len(kinds)), kinds, size=12)
        most = max(max(sizes) for sizes in kinds.values())
        axis.set(title=title, xlim=(0, 1.2 * most), xlabel="MiB")
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    for label, color in (("float32", "tab:blue"), ("autocast", "tab:orange")):
        axes[0].barh(0, 0, color=color, alpha=0.6, label=label)
    axes[0].legend(loc="upper right", fontsize=11)
    plt.tight_layout()
    plt.show()
