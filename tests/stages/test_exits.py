"""docs/faults.md: a run that has diverged ends with exit code 1, on every rank.

That a run that succeeded ends with 0, the other tests assert of every run that they
start. Bad input is in test_bad_input.py.
"""

import re

import pytest

from harness.stages import features
from harness.stages import first_with
from harness.stages import stages
from tests.conftest import only_in_release
from tests.training import run_stage
from tests.training import small_workload

FIRST = first_with("images")
STOPPED = "stopped in epoch 1: training has diverged; try a lower --lr"


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
