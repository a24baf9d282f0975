"""Draw the chain of stages for the front page, from the scripts themselves.

python -m tools.picture
"""

import matplotlib.pyplot as plt

from tools.stages import ROOT
from tools.stages import changed_lines
from tools.stages import stages

PICTURE = ROOT / "docs/stages.png"
TEACHES = {
    "01": "one process,\none device",
    "02": "one process,\nall GPUs",
    "03": "one process\nper GPU",
    "04": "no launcher:\nmp.spawn",
    "05": "mixed\nprecision",
    "06": "jobs\non Slurm",
    "07": "sharded\nevaluation",
    "08": "gradient\naccumulation",
    "09": "resume after\na kill",
    "10": "stop in time\nat a signal",
}


def steps():
    """Return the number of changed lines from each stage to the next."""
    names = stages()
    return [changed_lines(*pair) for pair in zip(names, names[1:], strict=False)]


def description():
    """Return what the picture shows, as text.

    It is stored in the file, so that a test can compare it.
    """
    return " ".join(stages()) + " changed lines: " + " ".join(map(str, steps()))


def draw(path):
    """Draw a box per stage and, above the arrow to it, how many lines change."""
    figure, axis = plt.subplots(figsize=(13, 2.7))
    last = len(TEACHES) - 1
    axis.set(xlim=(-0.45, last + 0.45), ylim=(-0.75, 0.62))
    axis.axis("off")
    middle = {"ha": "center", "va": "center"}
    for place, (number, teaches) in enumerate(TEACHES.items()):
        color = "tab:blue" if place else "tab:green"
        corner = (place - 0.36, -0.3)
        axis.add_patch(plt.Rectangle(corner, 0.72, 0.6, color=color, alpha=0.25))
        axis.text(place, 0.14, number, fontsize=15, weight="bold", **middle)
        axis.text(place, -0.12, teaches, fontsize=7, **middle)
    for place, lines in enumerate(steps(), 1):
        arrow = {"arrowstyle": "->", "lw": 1.5}
        axis.annotate("", (place - 0.36, 0), (place - 0.64, 0), arrowprops=arrow)
        axis.text(place - 0.5, 0.45, f"{lines}\nlines", fontsize=8, **middle)
    both = {"arrowstyle": "<->"}
    axis.annotate("", (last + 0.36, -0.42), (-0.36, -0.42), arrowprops=both)
    same = (
        "the same training on 1 to 4 processes:"
        " after two epochs in float64 no weight differs by more than 0.0000000001"
    )
    axis.text(last / 2, -0.62, same, ha="center", fontsize=10)
    stored = {"Software": None, "Description": description()}
    figure.savefig(
        path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored
    )


if __name__ == "__main__":
    draw(PICTURE)
