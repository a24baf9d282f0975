"""Draw the chain of stages for the front page, from the scripts themselves.

python -m tools.picture
"""

import matplotlib.pyplot as plt

from tools.stages import ROOT
from tools.stages import changed_lines
from tools.stages import stages

PICTURE = ROOT / "docs/stages.png"
TEACHES = {
    "01": "one process, one device",
    "02": "one process, all GPUs",
    "03": "one process per GPU",
    "04": "no launcher: mp.spawn",
    "05": "mixed precision",
    "06": "several machines: Slurm",
    "07": "evaluation on all GPUs",
    "08": "gradient accumulation",
    "09": "resume after a crash",
    "10": "stop in time at a signal",
    "11": "a language model",
    "12": "a sharded model: FSDP2",
    "13": "sharded checkpoints",
}
SAME = """On 1 to 4 processes each stage trains the same weights,
to 1e-10 after two epochs in float64."""


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
    """Draw a row per stage: what it adds, and a bar for the lines that it changes.

    The letters are large enough to be read on a phone.
    """
    figure, axis = plt.subplots(figsize=(7, 0.62 * len(TEACHES) + 1))
    axis.set(xlim=(0, 10), ylim=(len(TEACHES) + 0.9, -0.5))
    axis.axis("off")
    lines = [None, *steps()]
    for row, (number, teaches) in enumerate(TEACHES.items()):
        color = "tab:blue" if row else "tab:green"
        box = plt.Rectangle((0.05, row - 0.36), 0.85, 0.72, color=color, alpha=0.3)
        axis.add_patch(box)
        axis.text(
            0.47, row, number, fontsize=17, weight="bold", ha="center", va="center"
        )
        axis.text(1.2, row, teaches, fontsize=16, va="center")
        if row:
            axis.barh(row, lines[row] / 60, 0.5, left=7.3, color=color, alpha=0.3)
            axis.text(7.4 + lines[row] / 60, row, lines[row], fontsize=15, va="center")
            arrow = {"arrowstyle": "->", "lw": 1.5}
            axis.annotate("", (0.47, row - 0.34), (0.47, row - 0.68), arrowprops=arrow)
    axis.text(7.3, 0, "lines changed", fontsize=14, va="center")
    axis.text(0.05, len(TEACHES) + 0.2, SAME, fontsize=14, va="center")
    stored = {"Software": None, "Description": description()}
    figure.savefig(
        path, dpi=100, bbox_inches="tight", facecolor="white", metadata=stored
    )


if __name__ == "__main__":
    draw(PICTURE)
