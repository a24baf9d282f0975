"""A run that succeeded says so: its exit status is 0, every time."""

from tests.running import run
from tools.stages import command
from tools.stages import stages
from tools.stages import takes_processes

import pytest

LAUNCHED = [stage for stage in stages() if takes_processes(stage)]
SLICE = ["--data", "fake", "--image-size", "8", "--images", "120", "--epochs", "1"]


def failures(stage, times, several, device, folder):
    """Start a stage so many times; return the screens of the runs that ended other than with 0."""
    done = [
        run([*command(stage, several), *SLICE, "--device", device], folder) for _ in range(times)
    ]
    assert all("epoch 1: " in one.stdout for one in done)
    return [one.stderr for one in done if one.returncode != 0]


@pytest.mark.parametrize("stage", LAUNCHED)
def test_3_runs_in_a_row_end_with_0(stage, several, device, tmp_path):
    assert failures(stage, 3, several, device, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("stage", LAUNCHED)
def test_100_runs_in_a_row_end_with_0(stage, several, device, tmp_path):
    failed = failures(stage, 100, several, device, tmp_path)
    print(f"\n{stage}: {len(failed)} of 100 runs ended with another status than 0")
    assert failed == []
