"""What the tests of checkpoints, of resuming and of preemption share."""

import functools
import re
import shlex
import sys
from pathlib import Path

import psutil

from common import checkpoint
from common import checkpointer
from nbtools.lesson import max_abs_diff
from tests.harness import ROOT
from tests.harness import fork_ranks
from tests.harness import train_in_forks
from tests.harness import wait_until
from tools.stages import shown_commands

SHORT = ("--epochs", "2")  # of 25 steps each
NEVER = ("--checkpoint-every", "1000000")  # only at the end of an epoch or at a signal


class Run:
    """A run with checkpoints, in forks: it can be killed and resumed again and again.

    checkpoint_dir, out_dir: its directories, both in `folder`; step: that of its latest
    checkpoint when it was last started; ends: what `fork_ranks` returned then.
    """

    def __init__(self, stage, folder, device, *flags, processes=2, root=ROOT):
        self.folder = Path(folder)
        self.checkpoint_dir = self.folder / "checkpoints"
        self.out_dir = self.folder / "out"
        self.flags = [*flags, "--device", device]
        if device == "cuda":
            # nccl does not notice, as gloo does, that a rank of this machine has died.
            self.flags += ["--timeout", "20"]
        self.fork_ranks = functools.partial(fork_ranks, stage, processes, root=root)
        self.processes = processes
        self.starts = 0

    def start(self, *flags, **options):
        """Start its ranks and return the functions that wait for their ends."""
        self.starts += 1
        self.step = self.latest()
        folders = ["--checkpoint-dir", self.checkpoint_dir, "--out-dir", self.out_dir]
        flags = [*self.flags, *folders, *flags]
        screens = self.folder / f"start-{self.starts}"
        self.ends = self.fork_ranks(flags, screens, **options)
        return self.ends

    def go(self, *flags, **options):
        """Start it and wait; return what each rank ended with, rank 0 first."""
        return [end() for end in self.start(*flags, **options)]

    def screen(self):
        """Return what rank 0 has printed since the last start."""
        path = self.folder / f"start-{self.starts}/0/stdout"
        return path.read_text() if path.exists() else ""

    def wait_until(self, predicate):
        """Wait until `predicate()`, or until a rank has ended; return whether it is."""

        def over():
            return predicate() or not all(end.process.is_alive() for end in self.ends)

        wait_until(over, 300, self.screen, every=0.001)
        return predicate()

    def paths(self):
        """Return the paths of its checkpoints, the latest first."""
        return sorted(self.checkpoint_dir.glob("step-*"), reverse=True)

    def steps(self):
        """Return the steps of its checkpoints, the latest first."""
        return [step_of(path) for path in self.paths()]

    def latest(self):
        """Return the step of the latest checkpoint, 0 if there is none."""
        return max(self.steps(), default=0)

    def files(self):
        """Return the contents of the files in its checkpoint directory, by paths."""
        files = [path for path in self.checkpoint_dir.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(self.checkpoint_dir)): path.read_bytes()
            for path in files
        }

    def assert_no_step_is_lost_or_doubled(self, steps, what=""):
        """Look at the last checkpoint and the metrics of this run, which has ended."""
        state = read_state(self.paths()[0])
        assert state["step"] == state["scheduler"]["last_epoch"] == steps, what
        targets = rows(self.out_dir)[-1]["train"]["count"]
        assert state["sums"][:, 3].sum() == targets, what


def read_state(path):
    """Return what a checkpoint holds; of one that is a folder, what has no shards."""
    if path.is_dir():
        return checkpointer.read(path / "rest.pt", ("scheduler", "scaler"))
    return checkpointer.read(path)


def step_of(path):
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def resumed_from(text):
    """Return the steps from which a run that printed this says that it resumed."""
    return [int(step) for step in re.findall(r"^resumed from step (\d+)$", text, re.M)]


def exit_codes(done):
    return [one.returncode for one in done]


def rows(out_dir):
    """Return the rows of metrics.jsonl, without the seconds."""
    found = checkpoint.read_metrics(out_dir)
    for row in found:
        assert row["train"].pop("seconds") >= 0
        assert row["val"].pop("seconds") >= 0
    return found


def assert_same(out_dir, reference, what=""):
    """Assert that a run wrote the weights and metrics of another one, bit for bit."""
    expected = reference.weights.parent
    for name in ("last.pt", "best.pt"):
        assert max_abs_diff(out_dir / name, expected / name) == 0, what
    assert rows(out_dir) == rows(expected), what


def assert_all_end(processes, seconds=60):
    """Assert that within so many seconds these processes have ended."""
    _, left = psutil.wait_procs(processes, seconds)
    assert not left


def uninterrupted(trained, stage, processes, *flags):
    """Return what a run without checkpoints, kills and signals ends with."""
    return trained(stage, processes, *flags, how=train_in_forks)


def torchrun_command(stage, processes, folder, *flags, root=ROOT):
    """Return the first torchrun command that a stage shows, and its variables.

    It keeps its checkpoints in `folder`/checkpoints, its weights in `folder`/out.
    """
    shown = next(line for line in shown_commands(stage) if "torchrun" in line)
    words = shlex.split(shown, comments=True)
    start, script = words.index("torchrun"), words.index(f"{stage}/train.py")
    variables = dict(word.split("=") for word in words[:start])
    count = f"--nproc-per-node={processes}"
    options = words[start + 1 : script]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(count if word.startswith("--nproc") else word for word in options),
        str(root / words[script]),
        *("--checkpoint-dir", str(folder / "checkpoints")),
        *("--out-dir", str(folder / "out"), *flags),
    ], variables
