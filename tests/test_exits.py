"""Exit codes: 0 of a run that succeeded, every time; 1 of one that cannot continue.

Every run that the other tests start asserts the first; here a hundred in a row do. That
bad input ends a run with 2 is shown in test_bad_input.py.
"""

import re

import pytest

from tests.conftest import only_in_release
from tests.training import injected
from tests.training import run_stage
from tests.training import small_workload
from tools.stages import ROOT
from tools.stages import features
from tools.stages import first_with
from tools.stages import stages
from tools.stages import with_feature

STOPPED = "stopped: the loss is not finite; a lower --lr may help"
SHOWN = {first_with("images"), first_with("ddp")}
# No evaluation is finite once the weights are not; this has a script report one.
FINITE_VAL_LOSS = """
measured = evaluate


def evaluate(*arguments):
    return {**measured(*arguments), "loss": 1.0}
"""


@pytest.mark.parametrize(
    "stage, part",
    [
        only_in_release(stage, part, unless=stage in SHOWN)
        for stage in stages()
        for part in (("train", "val") if stage in SHOWN else ("val",))
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(stage, part, several, device, tmp_path):
    """After the epoch's line, on every rank, and before any file is written.

    The first step takes the weights to where no loss is finite. An epoch of one step
    computes its training loss before: then the validation loss alone is not finite.
    """
    work = small_workload(stage, 48 if part == "val" else 96)
    flags = [*work.flags, "--lr", "1e30", "--epochs", "2", "--device", device]
    flags += ["--out-dir", tmp_path / "out"]
    root = ROOT
    if part == "train":
        root = injected(stage, tmp_path / "copy", FINITE_VAL_LOSS)
    processes = several if "distributed" in features(stage) else 1
    done = run_stage(stage, processes, flags, tmp_path / "run", code=1, root=root)
    assert [one.returncode for one in done.ranks] == [1] * len(done.ranks)
    epoch, *others = re.findall("^(?:epoch|stopped).*", done.stdout, re.MULTILINE)
    losses = re.search(r"^epoch 1: train loss (\S+) .* val loss (\S+) ", epoch)
    is_finite = [re.fullmatch(r"[\d.]+", loss) is not None for loss in losses.groups()]
    assert is_finite == [part == "val", part == "train"]
    assert others == [STOPPED] and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


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
