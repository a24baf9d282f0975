"""The pictures in this stage's notebooks. Only given numbers are measured."""

import matplotlib.pyplot as plt

from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
@plt.rc_context({"font.size": 12})  # 9 points as a page shows it
def allocation_step_task():
    """Draw a Slurm job on two nodes, with the tasks of one step, ranks and GPUs."""
    axis = canvas(4, (-0.3, 10.3), (-1.5, 4.2))

    def frame(x, y, width, height, text, color, **style):
        style = {"fill": False, "ec": color, **style}
        axis.add_patch(plt.Rectangle((x, y), width, height, **style))
        axis.text(x + 0.12, y + height - 0.33, text, color=color)

    job = "job: cores, memory and GPUs on two nodes, until it ends"
    frame(0, -1.4, 10, 5.5, job, "black", ls="--")
    for node, x in (("node1", 0.3), ("node2", 5.1)):
        frame(x, -1.2, 4.6, 4.7, node, "black")
        for local in (0, 1):
            rank, center = 2 * (node == "node2") + local, x + 1.3 + 2 * local
            box(
                axis, center, 1.05, f"task, rank {rank}\nPROCID {rank}\nLOCALID {local}"
            )
            arrow(axis, (center, 0.42), (center, -0.45))
            box(axis, center, -0.75, f"GPU {local}", "tab:gray")
    step = {"fill": True, "fc": "tab:blue", "alpha": 0.12}
    frame(0.5, 0.3, 9, 1.9, "job step: what one srun starts", "navy", **step)
    box(axis, 3.2, 3, "batch script: srun ...", "tab:orange")
    arrow(axis, (3.2, 2.72), (3.2, 2.2))


@picture
@plt.rc_context({"font.size": 12})  # 9 points as a page shows it
def three_meetings():
    """Draw how two torchruns and their ranks find each other on two machines."""
    axis = canvas(4.6, (-0.4, 20.4), (-0.3, 7.2))
    for x, width, name in ((0, 7.6, "machine1"), (15.4, 4.6, "machine2")):
        frame = plt.Rectangle((x, 0), width, 6.4, facecolor="none", edgecolor="gray")
        axis.add_patch(frame)
        axis.text(x + width / 2, 6.8, name, ha="center", va="center", weight="bold")
    for x in (1.4, 18):
        box(axis, x, 5.3, "torchrun", "tab:gray")
    box(axis, 5.7, 5.3, "29500\n(endpoint)", "tab:orange")
    box(axis, 5, 3.3, "MASTER_PORT", "tab:orange")
    box(axis, 1.4, 1.2, "ranks\n0 and 1", "tab:blue")
    box(axis, 18, 1.7, "\nranks\n2 and 3\n", "tab:blue")
    center = {"ha": "center", "va": "center"}
    for end, x, y in (((4.2, 5.3), 3.4, 5.75), ((3.9, 3.8), 2.2, 3.9)):
        arrow(axis, (2.7, 5.3 if y > 5 else 4.8), end, "tab:gray")
        axis.text(x, y, "opens", color="gray", **center)
    arrow(axis, (2.4, 1.9), (4, 2.8))
    for start, end, text, style in (
        ((16.7, 5.3), (7.3, 5.3), "1  the torchruns meet", "->"),
        ((16.8, 2.6), (7, 3.3), "2  the ranks meet", "->"),
        ((16.8, 0.9), (2.6, 0.9), "3  each rank connects\nto the others", "<->"),
    ):
        arrow(axis, start, end, style=style)
        above = 0.7 if "\n" in text else 0.4
        axis.text(11.5, (start[1] + end[1]) / 2 + above, text, **center)


@picture
@plt.rc_context({"font.size": 12})  # 9 points as a page shows it
def lines_of_a_job_file():
    """Draw which line of a job file runs where, and SLURM_PROCID in each place."""
    axis = canvas(4.4, (-0.2, 14.4), (0.4, 6.3))
    style = {"ha": "center", "va": "center"}
    columns = [
        (0, 2.9, "login node", "tab:gray", "is not set"),
        (5, 4.2, "batch script:\nonce, on node1", "tab:orange", "is 0"),
        (10.2, 4.2, "tasks:\non both nodes", "tab:green", "is 0, 1, 2, 3"),
    ]
    for x, width, title, color, number in columns:
        axis.add_patch(plt.Rectangle((x, 1.7), width, 3.5, color=color, alpha=0.13))
        middle = x + width / 2
        axis.text(middle, 5.8, title, weight="bold", color=color, **style)
        axis.text(middle, 1, f"SLURM_PROCID\n{number}", **style)
    code = {**style, "family": "monospace"}
    axis.text(1.45, 4.6, "sbatch\njob.sbatch", **code)
    axis.text(1.45, 2.9, "reads the lines\nwith #SBATCH", **style)
    box(axis, 3.95, 2.9, "queue", "tab:blue")
    axis.text(7.1, 4.6, "MASTER_ADDR=...", **code)
    axis.text(7.1, 3.5, "export ...", **code)
    axis.text(7.1, 2.4, "srun python ...", **code)
    for n in range(4):
        where = f"python ...  node{1 + n // 2}"
        axis.text(12.3, 4.6 - 0.73 * n, where, **code)
    arrow(axis, (2.8, 2.9), (3.4, 2.9))
    arrow(axis, (4.5, 2.9), (5.1, 2.9))
    arrow(axis, (9, 2.4), (10.3, 2.4))


@picture
@plt.rc_context({"font.size": 12})  # 9 points as a page shows it
def when_a_run_hangs():
    """Draw the questions to ask about a run that hangs, and where each answer leads."""
    axis = canvas(7.9, (0, 12), (-0.8, 8.7))
    questions = [
        (
            "1. Does it start:\ndoes the first step end?",
            "the ranks do not find each other:\naddress, port; with NCCL also 4",
        ),
        (
            "2. Do all ranks wait: in a collective,\nor after it for the GPU (NCCL)?",
            "look at the rank that does not:\nit keeps the others waiting",
        ),
        (
            "3. Have all ranks made\nthe same calls?",
            "a branch that\nnot all ranks take",
        ),
        (
            "4. Does check_cluster.py\nrun on these nodes?",
            "the network, or the links\nbetween a node's GPUs",
        ),
    ]
    for n, (question, answer) in enumerate(questions):
        y = 8 - 2 * n
        box(axis, 2.7, y, question, "tab:blue")
        box(axis, 9, y, answer, "tab:orange")
        arrow(axis, (5.2, y), (6.5, y))
        axis.text(5.8, y + 0.2, "no", ha="center", color="tab:red")
        arrow(axis, (2.7, y - 0.55), (2.7, y - 1.45))
        axis.text(2.9, y - 1, "yes", va="center", color="tab:green")
    last = "do the jobs that hang\nshare a node?"
    box(axis, 2.7, 0, last, "tab:orange")
