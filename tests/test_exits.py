"""A run that succeeded says so: its exit status is 0, every time.

Every run that the other tests start asserts it; this counts, over a hundred in a row.
"""

import pytest

from tests.training import run_stage
from tests.training import small_workload
from tools.stages import with_feature


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
