"""Draw the chain of stages for the front page, from the scripts themselves.

python -m tools.picture
"""


from tools.stages import ROOT
from tools.stages import changed_lines
from tools.stages import stages

import matplotlib.pyplot as plt

PICTURE = ROOT / "docs/stages.png"
TEACHES = {
    "01": "one process,\none device",
    "02": "one process\nfeeds all GPUs",
    "03": "a process per\nGPU: torchrun",
    "04": "script starts\nits processes",
    "05": "mixed\nprecision",
    "06": "a cluster\nstarts them",
    "07": "evaluation\nshared by all",
    "08": "a batch that\ndoes not fit",
    "09": "killed, and\ngoing on",
}


def steps():
    """Return the number of changed lines from each stage to the next."""
    names = stages()
    return [changed_lines(*pair) for pair in zip(names, names[1:], strict=False)]


def description():
    """Return what the picture shows, as text; it is stored in the file, for a test to compare."""
    return " ".join(stages()) + " changed lines: " + " ".join(map(str, steps()))


def draw(path):
    """Draw a box per stage, and on the arrow to it how many lines change."""
    figure, axis = plt.subplots(figsize=(12, 2.7))
    last = len(TEACHES) - 1
    axis.set(xlim=(-0.45, last + 0.45), ylim=(-0.75, 0.62))
    axis.axis("off")
    for place, (number, teaches) in enumerate(TEACHES.items()):
        colour = "tab:blue" if place else "tab:green"
        axis.add_patch(plt.Rectangle((place - 0.36, -0.3), 0.72, 0.6, color=colour, alpha=0.25))
        axis.text(place, 0.14, number, ha="center", va="center", fontsize=15, weight="bold")
        axis.text(place, -0.12, teaches, ha="center", va="center", fontsize=7)
    for place, lines in enumerate(steps(), 1):
        arrow = {"arrowstyle": "->", "lw": 1.5}
        axis.annotate("", (place - 0.36, 0), (place - 0.64, 0), arrowprops=arrow)
        axis.text(place - 0.5, 0.45, f"{lines}\nlines", ha="center", va="center", fontsize=8)
    axis.annotate("", (last + 0.36, -0.42), (-0.36, -0.42), arrowprops={"arrowstyle": "<->"})
    same = (
        "the same training on 1 to 4 processes: after two epochs in float64 no weight differs by "
    )
    axis.text(last / 2, -0.62, same + "more than 0.0000000001", ha="center", fontsize=10)
    stored = {"Software": None, "Description": description()}
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored)


if __name__ == "__main__":
    draw(PICTURE)
