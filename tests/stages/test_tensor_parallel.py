"""14_tensor_parallel: any mesh trains, stops and resumes with one process's weights.

That the stage does what every stage does, without the flag, is shown in the tests of
all stages.
"""

import functools
import math

import pytest
import torch

from common import weights
from harness.stages import first_with
from harness.stages import reference
from harness.stages import registry
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.fault_injection import infinite_gradient
from tests.fault_injection import weights_kept
from tests.resume_harness import EVERY_4
from tests.resume_harness import Run
from tests.resume_harness import assert_same
from tests.resume_harness import read_state
from tests.resume_harness import uninterrupted
from tests.training import DOUBLE
from tests.training import assert_one_error_line
from tests.training import call_all
from tests.training import run_stage
from tests.training import skip_without_gpus
from tests.training import small_workload
from tests.training import train_in_forks

pytestmark = pytest.mark.slow  # its file comes early: it takes long

STAGE = first_with("tensor_parallel")
BEFORE = registry()[STAGE].builds_on
WORK = small_workload(STAGE, 240)


def rows(dp, tp):
    """Return the flag, and the number of processes, of a mesh."""
    return ("--tensor-parallel", str(tp)), dp * tp


# ---- the same weights ----------------------------------------------------------------
MESHES = [(2, 2), (1, 2), (1, 4), (3, 2), (2, 4)]
MORE = {
    "accumulation": ("--grad-accum-steps", "3"),
    "unclipped": ("--clip-grad", "1e9"),
}


@pytest.mark.parametrize(
    "mesh, more",
    [
        *(only_in_release(each, (), unless=each == (2, 2)) for each in MESHES),
        *(only_in_release((2, 2), flags) for flags in MORE.values()),
    ],
    ids=str,
)
def test_any_mesh_trains_the_weights_of_one_process(mesh, more, trained, device):
    """With every epoch's metrics, in which each sample counts once."""
    flag, processes = rows(*mesh)
    skip_without_gpus(processes, device)
    flags = (*DOUBLE, *WORK.flags)
    # accumulation does not change what is trained
    plain = flags if "--clip-grad" not in more else (*flags, *more)
    one = trained(reference(STAGE), 1, *plain, how=train_in_forks)
    done = trained(STAGE, processes, *flags, *flag, *more, how=train_in_forks)
    assert f"{processes} processes on " in done.stdout
    assert max_abs_diff(one.weights, done.weights) <= 1e-10
    assert len(done.rows) == 2
    for row, expected in zip(done.rows, one.rows, strict=True):
        for part, targets in (("train", WORK.train), ("val", WORK.val)):
            assert row[part]["count"] == expected[part]["count"] == targets
            assert row[part]["loss"] == pytest.approx(expected[part]["loss"], abs=1e-10)
            assert row[part]["acc1"] == expected[part]["acc1"]
    assert done.rows[1]["train"]["loss"] < 0.9 * done.rows[0]["train"]["loss"]


def test_positions_that_the_ranks_do_not_divide_are_split_unevenly(trained, device):
    flag, processes = rows(1, 2)
    skip_without_gpus(processes, device)
    flags = (*DOUBLE, *WORK.flags, "--context-length", "31", "--epochs", "1")
    one = trained(reference(STAGE), 1, *flags, how=train_in_forks)
    done = trained(STAGE, processes, *flags, *flag, how=train_in_forks)
    assert max_abs_diff(one.weights, done.weights) <= 1e-10


@pytest.mark.release
def test_a_mesh_prints_what_one_process_prints(trained, device):
    flag, processes = rows(2, 2)
    skip_without_gpus(processes, device)
    flags = (*DOUBLE, *WORK.flags)
    one = trained(reference(STAGE), 1, *flags, how=train_in_forks)
    done = trained(STAGE, processes, *flags, *flag, how=train_in_forks)
    assert one.stdout.splitlines()[1:] == done.stdout.splitlines()[1:]
    # of a norm and of a view, which are as they should be: see ignore_mesh_warnings
    assert "sequential" not in done.stderr and "view" not in done.stderr


@pytest.mark.release
def test_less_precision(trained, device):
    """It differs from stage 13's result by no more than the precision does."""
    amp = ("--amp", "bf16")
    flag, processes = rows(2, 2)
    skip_without_gpus(processes, device)
    flags = ("--epochs", "2", *WORK.flags)
    full = trained(BEFORE, 1, *flags, how=train_in_forks)
    before = trained(BEFORE, 1, *flags, *amp, how=train_in_forks)
    done = trained(STAGE, processes, *flags, *flag, *amp, how=train_in_forks)
    losses = [each.rows[1]["val"]["loss"] for each in (full, before, done)]
    assert losses[0] != losses[1]
    assert losses[2] == pytest.approx(losses[1], abs=2e-3)


def test_all_ranks_skip_a_step_that_overflows_on_one(device, tmp_path):
    """Step 7 is the second of epoch 2; only the last rank has an infinite gradient."""
    flag, processes = rows(2, 2)
    skip_without_gpus(processes, device)
    flags = [*WORK.flags, "--amp", "fp16", "--epochs", "2", "--device", device, *flag]
    flags += ["--checkpoint-dir", tmp_path / "checkpoints"]
    flags += ["--out-dir", tmp_path / "out"]
    prepare = functools.partial(
        call_all,
        functools.partial(infinite_gradient, 7, rank=processes - 1),
        functools.partial(weights_kept, 9, tmp_path),
    )
    run_stage(STAGE, processes, flags, tmp_path, prepare=prepare)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)]
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))
    found = weights.read_metrics(tmp_path / "out")
    assert all(math.isfinite(row["train"]["loss"]) for row in found)
    (path,) = (tmp_path / "checkpoints").glob("step-000000010*")
    state = read_state(path)
    assert (state["step"], state["scheduler"]["last_epoch"]) == (10, 9)
    assert state["scaler"]["scale"] == 32768


# ---- checkpoints ---------------------------------------------------------------------
class OnMesh(Run):
    """A Run, of a stage with --tensor-parallel or of the one before it."""

    def on(self, stage, dp, tp):
        """Return this run, to be continued by a stage on a mesh."""
        self.stage, self.processes = stage, dp * tp
        self.mesh = rows(dp, tp)[0] if stage == STAGE else ()
        return self

    def start(self, *flags, **options):
        return super().start(*flags, *self.mesh, **options)


@pytest.mark.ci
def test_a_run_is_resumed_on_other_meshes(trained, device, tmp_path):
    """And by the stage before it, which wrote the first checkpoint, too."""
    skip_without_gpus(4, device)
    flags = ("--dtype", "float64", *EVERY_4)
    run = OnMesh(STAGE, tmp_path, device, *flags)
    run.on(BEFORE, 2, 1).stop(3, "SIGTERM")
    run.on(STAGE, 2, 2).stop(9, "SIGTERM")
    run.on(BEFORE, 1, 1).stop(13, "SIGTERM")
    run.on(STAGE, 1, 4).run()
    run.assert_no_step_is_lost_or_doubled()
    expected = uninterrupted(trained, reference(STAGE), 1, "--dtype", "float64")
    assert_same(run.out_dir, expected, atol=1e-10)


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "processes, flags, named",
    [
        (2, ["--tensor-parallel", "3"], "--tensor-parallel must divide --heads (4)"),
        (
            3,
            ["--tensor-parallel", "2"],
            "--tensor-parallel must divide the number of processes (3)",
        ),
        (
            4,
            ["--tensor-parallel", "2", "--batch-size", "61"],
            "it must be divisible by the number of tp groups (2); try 60",
        ),
    ],
)
def test_bad_input(processes, flags, named, tmp_path):
    flags = [*flags, "--device", "cpu", "--out-dir", tmp_path / "out"]
    done = run_stage(STAGE, processes, flags, tmp_path / "run", code=None)
    for rank in done.ranks:
        assert_one_error_line(rank, named)
    assert not (tmp_path / "out").exists()
