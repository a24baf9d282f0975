"""The pictures in this stage's notebooks. Only given numbers are measured."""

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
