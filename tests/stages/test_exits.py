"""docs/faults.md: a run that has diverged ends with exit code 1, on every rank.

A run that succeeded ends with 0, every time: the other tests assert it of every run
that they start, and here a hundred in a row do. Bad input is in test_bad_input.py.
"""

import re

import pytest

from common import weights
from harness.stages import features
from harness.stages import first_with
from harness.stages import stages
from harness.stages import with_feature
from tests.conftest import only_in_release
from tests.training import injected
from tests.training import run_stage
from tests.training import small_workload

FIRST = first_with("images")
STOPPED = "stopped in epoch 1: training has diverged; try a lower --lr"
# As of a forward pass that overflows in fp16, which the weights survive.
INFINITE_VAL_LOSS = """
measured = evaluate


def evaluate(*arguments):
    return {**measured(*arguments), "loss": float("inf")}
"""


@pytest.mark.parametrize(
    "stage",
    [only_in_release(s, unless=s in (FIRST, first_with("ddp"))) for s in stages()],
)
def test_weights_that_are_not_finite_end_the_run(stage, several, device, tmp_path):
    """In one line, on every rank, and before any file is written."""
    work = small_workload(stage, 96)
    flags = [*work.flags, "--lr", "1e30", "--epochs", "2", "--device", device]
    flags += ["--out-dir", tmp_path / "out"]
    processes = several if "distributed" in features(stage) else 1
    done = run_stage(stage, processes, flags, tmp_path / "run", code=1)
    assert [one.returncode for one in done.ranks] == [1] * len(done.ranks)
    assert re.findall("^(?:epoch|stopped).*", done.stdout, re.M) == [STOPPED]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_loss_alone_ends_no_run(device, tmp_path):
    root = injected(FIRST, tmp_path / "copy", INFINITE_VAL_LOSS)
    flags = ["--epochs", "2", "--device", device, "--out-dir", tmp_path / "out"]
    done = run_stage(FIRST, 1, flags, tmp_path / "run", root=root)
    assert done.stdout.count("val loss inf") == 2
    assert len(weights.read_metrics(tmp_path / "out")) == 2


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", with_feature("distributed"))
def test_100_runs_in_a_row_end_with_0(stage, several, device, tmp_path):
    flags = [*small_workload(stage, 120).flags, "--epochs", "1", "--device", device]
    done = [
        run_stage(stage, several, flags, tmp_path, code=None, forks=False)
        for _ in range(100)
    ]
    assert all("epoch 1: " in one.stdout for one in done)
    failed = [one.stderr for one in done if one.returncode != 0]
    print(f"\n{stage}: {len(failed)} of 100 runs ended with a status other than 0")
    assert failed == []
