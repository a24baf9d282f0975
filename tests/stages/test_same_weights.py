"""README.md: each stage trains the same weights as one process, to 1e-10 in float64."""

import functools
import os

import pytest
import torch

from harness import commands
from harness.stages import ROOT
from harness.stages import features
from harness.stages import first_with
from harness.stages import reference
from harness.stages import stages
from harness.stages import with_feature
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.fault_injection import weights_kept
from tests.training import DOUBLE
from tests.training import counts
from tests.training import run_stage
from tests.training import skip_without_gpus
from tests.training import small_workload
from tests.training import train_in_forks

pytestmark = pytest.mark.slow  # its file comes early: it takes long

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DISTRIBUTED = with_feature("distributed")
# Every stage runs on two processes, and these on one more number.
MORE = [("ddp", 1), ("exact_eval", 3), ("signals", 4), ("shards", 3)]
MORE = [(first_with(feature), processes) for feature, processes in MORE]
# Before a release: on up to three processes, the first stage of each kind, and the last
# ones for images and for text, which do all that the others do, on up to four.
NUMBERS = ("ddp", "exact_eval", "text", "shards")
NUMBERS = {first_with(each): (1, 2, 3) for each in NUMBERS}
for kind in ("images", "text"):
    NUMBERS[with_feature("signals", kind)[-1]] = (1, 2, 3, 4)
# These add, for the first time, what could change a bit.
ADDING = ["amp", "accumulation", "signals", "shards", "sharded_checkpoints"]
ADDING = [first_with(feature) for feature in ADDING]


def work_of(stage):
    """Return the Workload of a stage: the digits, or a text for five steps an epoch."""
    return small_workload(stage, *([240] if "text" in features(stage) else []))


@pytest.fixture
def baseline(trained):
    """The first stage in double precision, which others are compared with."""
    return trained(first_with("images"), 1, *DOUBLE, how=train_in_forks)


def assert_same(one, other, work):
    assert max_abs_diff(one.weights, other.weights) <= 1e-10
    assert len(one.rows) == len(other.rows) == 2
    for a, b in zip(one.rows, other.rows, strict=True):
        for part, targets in (("train", work.train), ("val", work.val)):
            assert a[part]["count"] == b[part]["count"] == targets
            assert a[part]["loss"] == pytest.approx(b[part]["loss"], abs=1e-10)
            assert a[part]["acc1"] == b[part]["acc1"]


def test_dataparallel_equals_one_gpu(trained, baseline):
    stage = first_with("dataparallel")
    done = trained(stage, 1, *DOUBLE, how=train_in_forks)
    assert_same(baseline, done, work_of(stage))


@pytest.mark.parametrize(
    "stage, processes",
    [
        only_in_release(stage, n, unless=n == 2 or (stage, n) in MORE)
        for stage in DISTRIBUTED
        for n in NUMBERS.get(stage, [2])
    ],
)
def test_any_number_of_processes_equals_one_gpu(stage, processes, trained, device):
    skip_without_gpus(processes, device)
    if "spawn" in features(stage) and "RANKS_PER_GPU" in os.environ:
        pytest.skip("it starts one process for each GPU")
    work = work_of(stage)
    flags = (*DOUBLE, *work.flags)
    one = trained(reference(stage), 1, *flags, how=train_in_forks)
    done = trained(stage, processes, *flags, how=train_in_forks)
    assert f"{processes} processes on {BACKENDS[device]}" in done.stdout
    assert_same(one, done, work)


def first_of_its_kind(stage):
    """Return the first stage on several processes that trains on the same data."""
    return first_with("distributed", "text" if "text" in features(stage) else "images")


@pytest.mark.parametrize(
    "stage, processes",
    [
        only_in_release(stage, n, unless=n == 2 and stage in ADDING)
        for stage in DISTRIBUTED
        if stage != first_of_its_kind(stage)
        for n in ((1, 2) if "shards" in features(stage) else (2,))
    ],
)
def test_what_a_stage_adds_changes_no_bit_until_a_flag_asks_for_it(
    stage, processes, trained, device
):
    """In float32: no mixed precision, one micro-batch, no checkpoints, no signal.

    FSDP2 adds up the gradients in another order than DDP, and norms of shards in place
    of norms of weights. After 50 steps on 2 to 4 processes 3.8e-5 to 6.7e-5 were
    measured; on one process no bit differs, which test_fsdp.py shows.
    """
    processes = min(processes, counts(device)[-1])
    flags = ("--epochs", "2", *work_of(stage).flags)
    first = trained(first_of_its_kind(stage), processes, *flags, how=train_in_forks)
    if "accumulation" in features(stage):  # a stage's own command may ask for more
        flags += ("--grad-accum-steps", "1")
    done = trained(stage, processes, *flags, how=train_in_forks)
    most = 3e-4 if "shards" in features(stage) and processes > 1 else 0
    assert max_abs_diff(done.weights, first.weights) <= most
    if "exact_eval" not in features(stage):
        assert done.epochs == first.epochs
    elif most == 0 or processes == 2:  # the loss is added up in another order
        last = [one.rows[-1]["val"] for one in (done, first)]
        assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-6)
        assert last[0]["acc1"] == last[1]["acc1"]


@pytest.mark.release
def test_two_launchers_as_on_two_machines(baseline, two, device, tmp_path):
    """Two torchruns that meet at one address, as running.md shows for two machines."""
    if device == "cuda":
        pytest.skip("both launchers of one machine would take its first GPU")
    words = ["torchrun", "--nnodes=2", f"--nproc-per-node={two // 2}"]
    words += ["--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    words += [f"--rdzv-endpoint=127.0.0.1:{commands.free_port()}"]
    words += [ROOT / first_with("torchrun") / "train.py", *DOUBLE]
    words += ["--device", device, "--out-dir", tmp_path / "out"]
    with commands.start(words, tmp_path / "second") as second:
        done = commands.run(words), second.wait()
    assert [one.returncode for one in done] == [0, 0], done
    assert any("2 processes on gloo" in one.stdout for one in done)
    assert max_abs_diff(tmp_path / "out/last.pt", baseline.weights) <= 1e-10


LAUNCHED = {first_with("images"), first_with("torchrun")}


@pytest.mark.parametrize(
    "stage", [only_in_release(s, unless=s in LAUNCHED) for s in stages()]
)
def test_a_copy_runs_by_its_command_learns_and_prints_what_the_first_prints(
    stage, trained, several
):
    """A stage and common/, copied into an empty folder, and run from a third folder."""
    flags = ("--epochs", "3", *work_of(stage).flags)
    processes = several if "distributed" in features(stage) else 1
    done = trained(stage, processes, *flags)
    losses = [row["train"]["loss"] for row in done.rows]
    assert len(losses) == 3
    if "images" in features(stage):
        assert losses[-1] < 0.1 * losses[0]
        assert done.rows[-1]["val"]["acc1"] >= 95
    assert losses == sorted(losses, reverse=True)
    assert done.epochs == trained(reference(stage), 1, *flags).epochs


def difference(one, other):
    """Return the largest difference between two lists of weights."""
    pairs = zip(one, other, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_all_ranks_hold_the_same_weights(baseline, two, device, tmp_path):
    keep = functools.partial(weights_kept, 60, tmp_path)
    flags = [*DOUBLE, "--device", device]
    run_stage(first_with("ddp"), two, flags, tmp_path / "run", prepare=keep)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(two))
    assert difference(first, second) == 0
    assert difference(first, torch.load(baseline.weights).values()) <= 1e-10
