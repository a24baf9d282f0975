"""What the tests of checkpoints, of resuming and of preemption share."""

import re
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common import checkpoint
from common import weights
from common.gpt import GPT
from harness.stages import features
from harness.weights import max_abs_diff
from tests.fault_injection import RANKS
from tests.fault_injection import signalled
from tests.training import mesh_of
from tests.training import small_workload
from tests.training import start_stage
from tests.training import train_in_forks

SAMPLES, STEPS = 480, 20  # in an epoch, and in the two epochs of a run
NEVER = ("--checkpoint-every", "1000000")  # only at the end of an epoch or at a signal
EVERY_4 = ("--checkpoint-every", "4")
STOPPED = 128 + signal.SIGTERM  # the exit code of a run that was told to stop


class Run:
    """A run of two short epochs: it can be stopped and resumed again and again.

    checkpoint_dir, out_dir: its directories, both in `folder`; step: that of its latest
    checkpoint when it was last started.
    """

    def __init__(self, stage, folder, device, *flags, processes=2):
        self.stage = stage
        self.folder = Path(folder)
        self.checkpoint_dir = self.folder / "checkpoints"
        self.out_dir = self.folder / "out"
        self.flags = [*short(stage), *flags, "--device", device]
        self.flags += ["--checkpoint-dir", self.checkpoint_dir]
        self.flags += ["--out-dir", self.out_dir]
        if device == "cuda":
            # nccl does not notice, as gloo does, that a rank of this machine has died.
            self.flags += ["--timeout", "20"]
        self.processes = processes
        self.starts = 0

    def start(self, *flags, **options):
        """Start it, from its latest checkpoint if it has one; return a commands.Job.

        options: as for tests.training.start_stage.
        """
        self.starts += 1
        self.step = self.latest()
        flags, screens = [*self.flags, *flags], self.folder / f"start-{self.starts}"
        return start_stage(self.stage, self.processes, flags, screens, **options)

    def run(self, *flags, code=0, **options):
        """Start it and wait for its end; return a commands.Done.

        Asserts that each rank ends with this code; with None, that none hangs.
        """
        with self.start(*flags, **options) as job:
            done = job.wait()
        if code is None:
            assert "hung" not in exit_codes(done), done
        else:
            assert exit_codes(done) == [code] * self.processes, done
        return done

    def stop(self, step, *names, ranks=RANKS, **options):
        """Start it, and have these ranks get signals in a step; wait for its end.

        Asserts that all ranks end with exit code 143. With SIGKILL, that some are
        killed, none hangs, and no checkpoint is of this step.
        """
        in_this_run = step - self.latest()
        options["prepare"] = partial(signalled, in_this_run, *names, ranks=ranks)
        killed = "SIGKILL" in names
        done = self.run(code=None if killed else STOPPED, **options)
        if killed:
            assert -signal.SIGKILL in exit_codes(done), done
            assert self.latest() < step
        return done

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
        """Return the contents of the files in its checkpoint directory, by paths.

        Without .lock, which is empty, and which the first start makes.
        """
        files = [path for path in self.checkpoint_dir.rglob("*") if path.is_file()]
        files = [path for path in files if path.name != ".lock"]
        return {
            str(path.relative_to(self.checkpoint_dir)): path.read_bytes()
            for path in files
        }

    def assert_no_step_is_lost_or_doubled(self, what=""):
        """Look at the last checkpoint and the metrics of this run, which has ended."""
        state = read_state(self.paths()[0])
        assert state["step"] == state["scheduler"]["last_epoch"] == STEPS, what
        assert [row["epoch"] for row in rows(self.out_dir)] == [1, 2], what


def read_state(path):
    """Return what a checkpoint holds, its weights whole."""
    if path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, f"{folder}/whole.pt")
            return torch.load(f"{folder}/whole.pt", weights_only=False)["app"]
    state, _, problem = checkpoint.load(path)
    assert problem is None
    return state


def step_of(path):
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def resumed_from(text):
    """Return the steps from which a run that printed this says that it resumed."""
    return [int(step) for step in re.findall(r"^resumed from step (\d+)$", text, re.M)]


def exit_codes(done):
    """Return the exit code of each rank of a run, rank 0 first."""
    return [one.returncode for one in done.ranks]


def rows(out_dir):
    """Return the rows of metrics.jsonl, without the seconds."""
    found = weights.read_metrics(out_dir)
    for row in found:
        assert row["train"].pop("seconds") >= 0
        assert row["val"].pop("seconds") >= 0
    return found


def assert_same(out_dir, reference, what="", atol=0):
    """Assert that a run wrote the weights of another one, and the same metrics.

    atol: how far a weight may be from the other. The metrics of the training are those
    of the rest of an epoch if the run was resumed in it.
    """
    expected = reference.weights.parent
    for name in ("last.pt", "best.pt"):
        assert max_abs_diff(out_dir / name, expected / name) <= atol, what
    ours, theirs = rows(out_dir), rows(expected)
    assert [row["epoch"] for row in ours] == [row["epoch"] for row in theirs], what
    for one, other in zip(ours, theirs, strict=True):
        assert one["val"] == pytest.approx(other["val"], rel=1e-10), what
        if one["train"]["count"] == other["train"]["count"]:
            assert one["train"] == pytest.approx(other["train"], rel=1e-10), what
        assert one["train"]["count"] <= other["train"]["count"], what


def uninterrupted(trained, stage, processes, *flags):
    """Return what a run without checkpoints, kills and signals ends with."""
    return trained(stage, processes, *short(stage), *flags, how=train_in_forks)


def short(stage):
    """Return the flags of two epochs of ten steps each."""
    return ("--epochs", "2", *small_workload(stage, SAMPLES).flags)


def app_state(stage, module, args, seed):
    """Return the AppState of a small model, in a group of one process."""
    torch.manual_seed(seed)
    if "text" in features(stage):
        model = GPT(256, 8, 20, 1, 2)
        if "shards" in features(stage):
            module.shard_model(args, model, *mesh_of(module, args))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    else:
        model = torch.nn.Embedding(256, 20)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    scaler = torch.amp.GradScaler("cpu")
    identity = {"flags": {"seed": "0"}, "data": "0"}
    return module.AppState(model, optimizer, scheduler, scaler, identity)


def take_step(state):
    """Take an optimizer step, with a lower learning rate and loss scale after it."""
    state.optimizer.zero_grad()
    loss = state.model(torch.arange(16).reshape(2, 8)).square().sum()
    state.scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update(state.scaler.get_scale() / 2)
    state.scheduler.step()
    state.step += 1
