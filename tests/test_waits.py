"""How often a step makes Python wait for the device: never; once from stage 05 on."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.instrument import Waits
from benchmarks.instrument import between_steps
from tests.conftest import swept_unless
from tests.harness import changed
from tests.harness import fork_ranks
from tests.harness import little_work
from tools.stages import ROOT
from tools.stages import stages

FIRST, LAST = 3, 13  # steps; the waits between their ends are counted
EXPECTED = {stage: 0 if int(stage[:2]) < 5 else 1 for stage in stages()}
CASES = [
    swept_unless(amp == "off" or stage == "05_amp", stage, amp)
    for stage in stages()
    for amp in ("off", "bf16", "fp16")
    if amp == "off" or EXPECTED[stage]
]


def count_waits(folder):
    """Have this process, or one that it forks, write how often it waits per step."""
    waits = Waits()

    def end():
        waits.__exit__(None, None, None)
        path = Path(folder, f"waits-{os.getpid()}.json")
        path.write_text(json.dumps(waits.count / (LAST - FIRST)))

    between_steps(FIRST, LAST, waits.__enter__, end)


def waits_per_step(stage, processes, flags, folder, root=ROOT):
    """Return what each rank counted in an epoch of 25 steps."""
    flags = ["--epochs", "1", *little_work(stage).flags, *flags]
    prepare = functools.partial(count_waits, folder)
    ends = fork_ranks(stage, processes, flags, folder, root=root, prepare=prepare)
    done = [end() for end in ends]
    assert [one.returncode for one in done] == [0] * len(done), done
    return [json.loads(path.read_text()) for path in folder.glob("waits-*.json")]


@pytest.mark.parametrize("stage, amp", CASES)
def test_waits_per_step(stage, amp, several, device, tmp_path):
    processes = several if int(stage[:2]) >= 3 else 1
    flags = ["--device", device] + (["--amp", amp] if EXPECTED[stage] else [])
    if int(stage[:2]) >= 8:
        flags += ["--grad-accum-steps", "3"]
    counted = waits_per_step(stage, processes, flags, tmp_path)
    assert counted == [EXPECTED[stage]] * processes


def test_a_printed_loss_is_a_wait(device, tmp_path):
    old = "        scheduler.step()\n"
    new = old + "        print(loss.item())\n"
    root = changed(stages()[0], tmp_path / "changed", (old, new))
    counted = waits_per_step(stages()[0], 1, ["--device", device], tmp_path, root)
    assert counted == [1]


@pytest.mark.parametrize(
    "operation, expected",
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x[0] > 0) and float(x[1]) > 0, 2),
        (torch.nonzero, 1),
        (lambda x: (x * 2).to(torch.float64), 0),
        (lambda x: torch.nn.utils.clip_grad_norm_(x, 1.0), 0),
    ],
)
def test_what_counts_as_a_wait(operation, expected, device):
    values = torch.ones(3, device=device)
    values.grad = torch.ones_like(values)
    with Waits() as waits:
        operation(values)
    assert waits.count == expected
