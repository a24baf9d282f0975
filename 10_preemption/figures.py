"""The pictures in this stage's notebooks. Only given numbers are measured."""

from nbtools.drawing import arrow
from nbtools.drawing import box
from nbtools.drawing import canvas
from nbtools.drawing import picture


@picture
def asked_after_a_step():
    """Draw two ranks of which one gets a signal: each alone, and asking each other."""
    axis = canvas(5.4, (-1.5, 10.6), (-0.9, 6.6))
    signal = "tab:red"
    for low, title in (
        (3.7, "each rank looks at its own signals"),
        (0, "they ask each other after the step"),
    ):
        axis.text(-1.4, low + 2.3, title, weight="bold")
        for rank, y in ((0, low + 1.4), (1, low)):
            axis.text(-0.5, y, f"rank {rank}", ha="right", va="center")
            box(axis, 1, y, "    step 36    ")
        axis.plot(1, low - 0.4, "^", color=signal, ms=9)
        axis.text(1, low - 0.8, "SIGTERM", color=signal, ha="center")
    box(axis, 4.1, 5.1, "    step 37    ")
    axis.text(5.6, 5.1, "its gradients wait for rank 1's", color=signal, va="center")
    box(axis, 4.1, 3.7, "stops", "tab:orange")
    axis.text(5.6, 3.7, "waits for the checkpoint", color=signal, va="center")
    for y, text in ((1.4, "save"), (0, "wait")):
        box(axis, 6.6, y, text, "tab:orange")
        arrow(axis, (2.3, y), (5.9, y))
    arrow(axis, (4, 0.1), (4, 1.3), signal, "<->")
    text = "all-reduce: 0 + 1 signals,\nso both stop here"
    axis.text(7.5, 0.7, text, va="center", color=signal)
    for text in axis.texts:
        text.set_size(13)


@picture
def from_the_signal_to_the_next_start():
    """Draw what happens in a job before its time limit, and in a preempted one."""
    axis = canvas(5.8, (-1.9, 11.9), (-0.8, 6.6))
    stop, slurm = "tab:red", "tab:blue"
    for low, title in ((3.6, "the time limit is near"), (0, "the job is preempted")):
        axis.text(-1.8, low + 2.55, title, weight="bold", color=stop)
        for name, y in (("Slurm", 2), ("batch script", 1), ("ranks", 0)):
            axis.text(-0.5, low + y, name, ha="right", va="center")
        for x, text in ((3.4, "step 36"), (5.7, "checkpoint")):
            box(axis, x, low, text)
        axis.plot([4.4, 4.4], [low - 0.3, low + 0.3], color=stop, lw=1)
        axis.text(4.4, low - 0.65, "all ranks agree", color=stop, ha="center")
        axis.text(7.7, low, "exit 143", ha="center", va="center")
        axis.plot([2.3, 7.1], [low + 1, low + 1], ":", color="gray")
        axis.text(
            4.7, low + 1.1, "waits until srun has ended", color="gray", ha="center"
        )
        arrow(axis, (7.6, low + 0.2), (7.9, low + 0.7))
        for x, text in ((9.1, "PENDING"), (11, "RUNNING")):
            box(axis, x, low + 2, text, slurm)
        arrow(axis, (11, low + 1.7), (11, low + 0.4))
        axis.text(11, low, "resumed from\nstep 36", ha="center", va="center")
        box(axis, 1.7, low + 1, "trap", "tab:orange")
    box(axis, 0.2, 5.6, "USR1", stop)
    arrow(axis, (0.2, 5.3), (1.3, 4.7), stop)
    arrow(axis, (1.8, 4.3), (2.7, 3.8), stop)
    axis.text(2.4, 4.12, "scancel --signal=TERM", color=stop)
    box(axis, 8.1, 4.6, "requeue", "tab:orange")
    arrow(axis, (8.3, 4.9), (8.7, 5.3))
    box(axis, 0.2, 2, "TERM", stop)
    arrow(axis, (0.2, 1.7), (1.3, 1.1), stop)
    axis.plot([0, 0], [1.65, 0], color=stop, lw=1.5)
    arrow(axis, (0, 0), (2.7, 0), stop)
    axis.text(8.2, 1, "exit 143", ha="center", va="center")
    arrow(axis, (8.4, 1.3), (8.8, 1.7))
    axis.plot([0.9, 7.1], [2, 2], ":", color="gray")
    text = "SIGKILL after KillWait, if a process is left"
    axis.text(4, 2.1, text, color="gray", ha="center")
    for text in axis.texts:
        text.set_size(12.5)


def who_gets_sigterm():
    """Draw the processes of a job, and which of them SIGTERM reaches, two plugins."""
    slurm, torchrun, both, nobody = SENDERS
    reached = {
        "proctrack/cgroup": [
            [slurm, nobody],
            [slurm, nobody],
            [slurm, torchrun, torchrun],
        ],
        "proctrack/linuxproc": [2 * [slurm], 2 * [slurm], [slurm, both, both]],
    }
    for plugin, senders in reached.items():
        sigterm_by_plugin(plugin, senders)


SENDERS = {
    "from Slurm": "tab:red",
    "from torchrun": "tab:orange",
    "from both": "tab:purple",
    "no SIGTERM": "tab:gray",
}


@picture
def sigterm_by_plugin(plugin, senders):
    """Draw the processes of a job, each in the color of who sends it SIGTERM."""
    chains = {
        "batch step": ["batch\nscript", "srun"],
        "job step,\nby srun": ["rank", "loader\nworker"],
        "job step,\nby torchrun": ["torchrun", "rank", "loader\nworker"],
    }
    axis = canvas(4.2, (-2.6, 9.6), (-1.4, 3.6))
    axis.text(-2.5, 3.3, plugin, size=15, weight="bold")
    for row, (step, chain) in enumerate(chains.items()):
        y = 2.3 - 1.25 * row
        axis.text(-2.5, y, step, size=12, va="center")
        colors = ["white", *(SENDERS[sender] for sender in senders[row])]
        for n, (name, color) in enumerate(
            zip(["slurmstepd", *chain], colors, strict=True)
        ):
            style = {"boxstyle": "round,pad=0.5", "facecolor": color, "alpha": 0.45}
            where = {"ha": "center", "va": "center", "size": 14}
            axis.text(0.6 + 2.7 * n, y, name, bbox=style, **where)
            if n:
                arrow(axis, (2.7 * n - 1, y), (2.7 * n - 0.2, y))
    used = [each for each in SENDERS if any(each in row for row in senders)]
    for n, sender in enumerate(used):
        axis.plot(3 * n, -1.1, "s", color=SENDERS[sender], alpha=0.45, ms=16)
        axis.text(3 * n + 0.25, -1.1, sender, size=13, va="center")
