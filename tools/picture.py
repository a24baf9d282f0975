"""The picture of the stages on the front page: which of them builds on which.

`make pages` draws it.
"""

import matplotlib.pyplot as plt

from tools.stages import ROOT
from tools.stages import registry
from tools.stages import steps

PICTURE = ROOT / "docs/stages.png"
SAME = """On 1 to 4 processes, the stages that train the same model
reach the same weights, to 1e-10 after two epochs in float64."""


def description():
    """Return what the picture shows, as text.

    It is stored in the file, so that a test can compare it.
    """
    lines = [
        f"{stage.name}: {stage.title}; builds on {stage.builds_on}"
        for stage in registry().values()
    ]
    return "\n".join([*lines, SAME])


def draw(path):
    """Draw a row per stage, and an arrow to it from the stage that it builds on.

    The letters are large enough to be read on a phone.
    """
    rows = {name: row for row, name in enumerate(registry())}
    figure, axis = plt.subplots(figsize=(7, 0.62 * len(rows) + 1))
    axis.set(xlim=(0, 10), ylim=(len(rows) + 0.9, -0.5))
    axis.axis("off")
    for name, row in rows.items():
        stage = registry()[name]
        color = "tab:blue" if stage.builds_on else "tab:green"
        box = plt.Rectangle((1.05, row - 0.36), 0.85, 0.72, color=color, alpha=0.3)
        axis.add_patch(box)
        centered = {"ha": "center", "va": "center"}
        axis.text(1.47, row, stage.number, fontsize=17, weight="bold", **centered)
        axis.text(2.2, row, stage.title, fontsize=16, va="center")
    for before, after in steps():
        start, end = rows[before], rows[after]
        arrow = {"arrowstyle": "->", "lw": 1.5}
        if end == start + 1:
            points = (1.47, end - 0.34), (1.47, end - 0.68)
        else:  # around those in between
            points = (1.05, end), (1.05, start)
            arrow["connectionstyle"] = "arc3,rad=0.4"
        axis.annotate("", *points, arrowprops=arrow)
    axis.text(0.05, len(rows) + 0.2, SAME, fontsize=14, va="center")
    stored = {"Software": None, "Description": description()}
    figure.savefig(
        path, dpi=100, bbox_inches="tight", facecolor="white", metadata=stored
    )
    plt.close(figure)
