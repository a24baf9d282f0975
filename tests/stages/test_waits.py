"""A step makes Python wait for the device in fp16 alone; the counter sees each wait."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from harness.commands import call_in_forks
from harness.counting import Collectives
from harness.counting import Waits
from harness.counting import WaitsForDevice
from harness.counting import between_steps
from harness.stages import ROOT
from harness.stages import features
from harness.stages import first_with
from harness.stages import stages
from tests.conftest import only_in_release
from tests.training import changed
from tests.training import run_stage
from tests.training import sharded
from tests.training import small_workload

FIRST, LAST = 3, 13  # steps; the waits between their ends are counted
# The stages whose step is new in what could wait; the others before a release.
QUICK = ["images", "ddp", "amp", "signals", "sharded_checkpoints"]
QUICK = [first_with(feature) for feature in QUICK]
BY_DEFAULT = ("off", "fp16")
# A forked process is told to count. One that a script spawns is not.
CASES = [
    only_in_release(stage, amp, unless=stage in QUICK and amp in BY_DEFAULT)
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


def waits_per_step(stage, processes, flags, folder, root=ROOT):
    """Return what each rank counted in an epoch of 30 steps."""
    flags = ["--epochs", "1", *small_workload(stage).flags, *flags]
    prepare = functools.partial(count_waits, folder)
    run_stage(stage, processes, flags, folder, root=root, prepare=prepare)
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


def test_a_printed_loss_is_a_wait(device, tmp_path):
    stage = first_with("images")
    old = "        scheduler.step()\n"
    new = old + "        print(loss.item())\n"
    root = changed(stage, tmp_path / "changed", (old, new))
    counted = waits_per_step(stage, 1, ["--device", device], tmp_path, root)
    assert counted == [1]


# ---- the counters --------------------------------------------------------------------
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


def note_collectives(rank, folder):
    """Be one of two ranks; save what was seen of some steps, as folder/RANK.pt."""
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    whole, shards = nn.Linear(9, 10), sharded(nn.Linear(9, 10))  # 100 numbers each
    copies = nn.parallel.DistributedDataParallel(whole)
    numbers = torch.ones(3, dtype=torch.float64)
    steps = {
        "DDP": lambda: copies(torch.ones(1, 9)).sum().backward(),
        "FSDP2": lambda: shards(torch.ones(1, 9)).sum().backward(),
        "DTensor": lambda: nn.utils.get_total_norm(shards.parameters()).full_tensor(),
        "dist": lambda: dist.all_gather([numbers.clone(), numbers.clone()], numbers),
        "barrier": dist.barrier,
    }
    seen = {}
    for name, step in steps.items():
        with Collectives() as collectives:
            step()
        seen[name] = collectives.seen, collectives.total()
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_collectives_are_seen_whoever_calls_them(tmp_path):
    """And as what they are: gloo carries out a reduce-scatter as an all-reduce."""
    call_in_forks(note_collectives, [(rank, tmp_path) for rank in range(2)])
    single = torch.float32
    gathered = ("all_gather", single, 200, 400)
    reduced = ("reduce_scatter", single, 400, 400)
    for rank in range(2):
        seen = torch.load(tmp_path / f"{rank}.pt")
        assert seen["DDP"][0] == [("all_reduce", single, 400, 400)]
        assert seen["FSDP2"][0] == [gathered, reduced]
        assert seen["FSDP2"][1] == {
            "all_gather": {"calls": 1, "bytes": 200},
            "reduce_scatter": {"calls": 1, "bytes": 400},
        }
        assert [name for name, *_ in seen["DTensor"][0]] == ["all_reduce"]
        assert seen["dist"][0] == [("all_gather", torch.float64, 24, 48)]
        assert seen["barrier"][0] == [("barrier", None, 0, 0)]
