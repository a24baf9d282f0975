"""05_amp/fp16: a step in fp16 makes Python wait three times, one in bf16 never."""

import functools
import json
import os
from pathlib import Path

import pytest

from harness.counting import WaitsForDevice
from harness.counting import between_steps
from harness.stages import features
from harness.stages import first_with
from harness.stages import stages
from tests.conftest import only_in_release
from tests.training import run_stage
from tests.training import small_workload

FIRST, LAST = 3, 13  # steps; the waits between their ends are counted
SAMPLES = 720  # 15 steps, in batches of 48
# The stages whose step is new in what could wait; the others before a release.
NEW = [("images", "off"), ("amp", "bf16"), ("amp", "fp16"), ("signals", "off")]
NEW += [("sharded_checkpoints", "off"), ("tensor_parallel", "off")]
NEW = [(first_with(feature), amp) for feature, amp in NEW]
# A forked process is told to count. One that a script spawns is not.
CASES = [
    only_in_release(stage, amp, unless=(stage, amp) in NEW)
    for stage in stages()
    for amp in (("off", "bf16", "fp16") if "amp" in features(stage) else ("off",))
    if "spawn" not in features(stage)
]


def count_waits(folder):
    """Have this process write how often it waits per step."""
    waits = WaitsForDevice()

    def end():
        waits.__exit__(None, None, None)
        path = Path(folder, f"waits-{os.getpid()}.json")
        path.write_text(json.dumps(waits.count / (LAST - FIRST)))

    between_steps(FIRST, LAST, waits.__enter__, end)


def waits_per_step(stage, processes, flags, folder):
    """Return what each rank counted in an epoch of 15 steps."""
    flags = ["--epochs", "1", *small_workload(stage, SAMPLES).flags, *flags]
    prepare = functools.partial(count_waits, folder)
    run_stage(stage, processes, flags, folder, prepare=prepare)
    return [json.loads(path.read_text()) for path in folder.glob("waits-*.json")]


@pytest.mark.parametrize("stage, amp", CASES)
def test_a_step_waits_with_fp16_only_and_then_three_times(
    stage, amp, several, device, tmp_path
):
    """Its scaler has to know whether the gradient is finite before it takes the step.

    And its scale is read twice, before and after the step.
    """
    has = features(stage)
    processes = several if "distributed" in has else 1
    flags = ["--device", device]
    flags += ["--amp", amp] if "amp" in has else []
    flags += ["--grad-accum-steps", "2"] if "accumulation" in has else []
    counted = waits_per_step(stage, processes, flags, tmp_path)
    assert counted == [3 if amp == "fp16" else 0] * processes
