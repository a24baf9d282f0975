"""A run that succeeded says so: its exit status is 0, every time.

Every run that the other tests start asserts it; this counts, over a hundred in a row.
"""

import pytest

from tests.harness import LAUNCHED
from tests.harness import little_work
from tests.harness import run
from tools.stages import command


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", LAUNCHED)
def test_100_runs_in_a_row_end_with_0(stage, several, device, tmp_path):
    flags = [*little_work(stage, 120).flags, "--epochs", "1", "--device", device]
    arguments = [*command(stage, several), *flags]
    done = [run(arguments, tmp_path) for _ in range(100)]
    assert all("epoch 1: " in one.stdout for one in done)
    failed = [one.stderr for one in done if one.returncode != 0]
    print(f"\n{stage}: {len(failed)} of 100 runs ended with a status other than 0")
    assert failed == []
