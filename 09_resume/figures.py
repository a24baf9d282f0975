"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import COLORS
from nbtools.drawing import arrow
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
def killed_and_started_again():
    """Draw to scale the steps of a run that is killed, and of the one that resumes."""
    axis = canvas(2.4, (-11, 66), (-1.0, 1.9))
    for name, y, start, end in (("first run", 1.3, 0, 36), ("second run", 0, 30, 60)):
        axis.text(start - 1, y, name, ha="right", va="center", weight="bold")
        axis.plot([start, end], [y, y], color="black", lw=1.5)
        axis.plot([30, 36], [y, y], color="tab:orange", lw=9, alpha=0.4)
    for step, y in ((10, 1.3), (20, 1.3), (30, 1.3), (40, 0), (50, 0), (60, 0)):
        axis.plot(step, y, "o", color="tab:green", ms=12)
        text = "checkpoint, step 10" if step == 10 else str(step)
        axis.text(step, y + 0.28, text, color="tab:green", ha="center")
    axis.plot(36, 1.3, "x", color="tab:red", ms=12, mew=3)
    axis.text(37.2, 1.3, "killed in step 36", color="tab:red", va="center")
    arrow(axis, (30, 1.1), (30, 0.15), "tab:green")
    axis.text(29.5, 0.65, "resumes here", color="tab:green", ha="right", va="center")
    axis.text(30.5, -0.55, "steps 31 to 36: taken twice", color="tab:orange")


@picture
def a_warm_up_that_starts_again(rates, without_scheduler):
    """Plot the learning rate of a run, and of one that was resumed without its place.

    rates: the learning rate in each step of a run that was not interrupted;
    without_scheduler: that of one that was resumed without the scheduler's state.
    """
    _, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    steps = range(1, len(rates) + 1)
    axis.plot(steps, rates, label="not interrupted")
    axis.plot(steps, without_scheduler, "--", label="resumed without the scheduler")
    axis.set(xlabel="step", title="learning rate", ylim=(0, 0.14))
    axis.legend()


@picture
def a_machine_leaves_and_comes_back():
    """Draw two launchers and their ranks: one machine dies, and later joins again."""
    axis = canvas(4.6, (-2.2, 20.6), (-1.5, 5.6))
    style = {"ha": "center", "va": "center"}
    rows = {"A: launcher": 3.6, "A: rank": 2.6, "B: launcher": 0.4, "B: rank": 1.4}
    for name, y in rows.items():
        axis.text(-0.3, y, name, ha="right", va="center", weight="bold")
    for row, start, end in (
        ("A: launcher", 0, 20.4),
        ("B: launcher", 0, 5.05),
        ("B: launcher", 14.6, 20.4),
    ):
        y = rows[row]
        axis.plot([start, end], [y, y], color="tab:gray", lw=1)
        for n in range(int(start * 2) + 1, int(end * 2) + 1, 2):  # heartbeats
            axis.plot([n / 2] * 2, [y - 0.16, y + 0.16], color="tab:gray", lw=2)
    for row, start, end in (
        ("A: rank", 0.3, 5.3),
        ("B: rank", 0.3, 5.05),
        ("A: rank", 10.2, 15.4),
        ("A: rank", 16, 20.4),
        ("B: rank", 16, 20.4),
    ):
        axis.barh(rows[row], end - start, 0.5, start, color="tab:blue", alpha=0.35)
    for x, step in ((2.3, 5), (4.3, 10), (11.6, 15), (12.8, 20), (14, 25), (15.2, 30)):
        axis.plot(x, rows["A: rank"], "o", color="tab:green", ms=11)
        if step in (10, 30):
            text = f"step {step}"
            axis.text(x, 3.1, text, color="tab:green", fontsize=9, **style)
    for y in (rows["B: launcher"], rows["B: rank"]):
        axis.plot(5.1, y, "x", color="tab:red", ms=11, mew=3)
    axis.text(5.5, 0.9, "B is killed", color="tab:red", va="center")
    axis.plot(5.35, rows["A: rank"], "x", color="tab:red", ms=8, mew=2)
    axis.text(14.4, 0.9, "B is back", color="tab:blue", ha="right", va="center")
    arrow(axis, (14.6, 0.65), (15.4, 2.3), "tab:blue")
    for start, end, text in (
        (5.3, 8.3, "3 heartbeats\nof B missed"),
        (8.3, 10.2, "last\ncall"),
    ):
        axis.barh(4.75, end - start - 0.1, 1.2, start, color="tab:orange", alpha=0.35)
        axis.text((start + end) / 2, 4.75, text, fontsize=9, **style)
    for start, end, text in (
        (0.3, 5.3, "two ranks"),
        (10.2, 15.4, "one rank,\nfrom step 10"),
        (16, 20.4, "two ranks,\nfrom step 30"),
    ):
        axis.text((start + end) / 2, 4.75, text, color="tab:blue", **style)
    axis.plot([0.3] * 2, [-0.86, -0.54], color="tab:gray", lw=2)
    axis.text(0.6, -0.7, "heartbeat", va="center")
    axis.plot(4, -0.7, "o", color="tab:green", ms=11)
    axis.text(4.4, -0.7, "checkpoint", va="center")
    axis.text(20.4, -0.7, "time (drawn, not measured)", ha="right", va="center")


@picture
def two_layouts_of_buckets():
    """Draw where DDP puts a gradient before and after it has arranged its buckets."""
    axis = canvas(4.1, (-2.6, 12.2), (-1.3, 4.4))
    style = {"ha": "center", "va": "center"}
    strengths = {"first": 0.8, "middle": 0.5, "last": 0.25}
    sizes = {"first": 3.6, "middle": 5.6, "last": 2.4}
    layouts = [
        (2.8, "first step", {"one bucket": ["first", "middle", "last"]}),
        (
            0.4,
            "later steps",
            {"first bucket": ["last", "middle"], "second bucket": ["first"]},
        ),
    ]
    for y, title, buckets in layouts:
        axis.text(-0.25, y + 0.35, title, ha="right", va="center", weight="bold")
        x = 0
        for label, bucket in buckets.items():
            begin = x
            for name in bucket:
                place = (x, y)
                color = COLORS["gradients"]
                bar = plt.Rectangle(place, sizes[name], 0.75, color=color)
                bar.set(alpha=strengths[name], ec="white")
                axis.add_patch(bar)
                axis.text(x + sizes[name] / 2, y + 0.37, f"{name} layer", **style)
                x += sizes[name]
            third = (x - begin) / 3
            for n, text in enumerate(("a+b+c", "b+c+a", "c+a+b")):
                left = begin + n * third
                ends = ([left, left + third], [y - 0.15] * 2)
                axis.plot(*ends, color="black", marker="|", lw=1)
                axis.text(left + third / 2, y - 0.45, text, fontsize=11, **style)
            axis.text((begin + x) / 2, y + 1, label, fontsize=11, **style)
            x += 0.5
    arrow(axis, (0, -0.75), (12.1, -0.75), "tab:gray")
    axis.text(6, -1.05, "place in the buffer (not to scale)", fontsize=11, **style)
