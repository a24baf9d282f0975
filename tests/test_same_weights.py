"""Every stage trains the same model to the same weights, on any number of processes."""

import functools
import sys

import pytest
import torch

from nbtools.lesson import max_abs_diff
from tests.conftest import swept_unless
from tests.fault_injection import weights_kept
from tests.fault_injection import without_ddp
from tests.fault_injection import without_set_epoch
from tests.harness import LAUNCHED
from tests.harness import LAUNCHERS
from tests.harness import call_all
from tests.harness import counts
from tests.harness import fork_ranks
from tests.harness import free_port
from tests.harness import little_work
from tests.harness import run
from tests.harness import shards_the_weights
from tests.harness import started
from tests.harness import train_in_forks
from tools.stages import ROOT
from tools.stages import reference
from tools.stages import stages
from tools.stages import takes_processes
from tools.stages import trains_on_text

DOUBLE = ("--dtype", "float64", "--epochs", "2")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


# Without --all: every stage on two processes, and one more number for some stages.
MORE = (("03", 1), ("07", 3), ("10", 4), ("11", 3), ("12", 3))
PAIRS = [
    swept_unless(n == 2 or (stage[:2], n) in MORE, stage, n)
    for stage in LAUNCHED
    for n in range(1, 5)
]


@pytest.fixture
def alone(trained):
    """Stage 01 in double precision, which all others are compared with."""
    return trained("01_single_gpu", 1, *DOUBLE, how=train_in_forks)


def assert_same(one, other, work):
    assert max_abs_diff(one.weights, other.weights) <= 1e-10
    assert len(one.rows) == len(other.rows) == 2
    for a, b in zip(one.rows, other.rows, strict=True):
        for part, targets in (("train", work.train), ("val", work.val)):
            assert a[part]["count"] == b[part]["count"] == targets
            assert a[part]["loss"] == pytest.approx(b[part]["loss"], abs=1e-10)
            assert a[part]["acc1"] == b[part]["acc1"]


def test_dataparallel_equals_one_gpu(trained, alone):
    done = trained("02_dataparallel", 1, *DOUBLE, how=train_in_forks)
    assert_same(alone, done, little_work("02_dataparallel"))


@pytest.mark.parametrize("stage, processes", PAIRS)
def test_any_number_of_processes_equals_one_gpu(stage, processes, trained, device):
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    work = little_work(stage)
    flags = (*DOUBLE, *work.flags)
    one = trained(reference(stage), 1, *flags, how=train_in_forks)
    done = trained(stage, processes, *flags, how=train_in_forks)
    assert f"{processes} processes on {BACKENDS[device]}" in done.stdout
    assert_same(one, done, work)


def first_launched(stage):
    """Return the first stage with a launcher that trains on the same data."""
    kind = trains_on_text(stage)
    return next(name for name in LAUNCHED if trains_on_text(name) == kind)


@pytest.mark.parametrize("stage", [s for s in LAUNCHED if s != first_launched(s)])
def test_what_a_stage_adds_changes_no_bit_until_a_flag_asks_for_it(
    stage, trained, several
):
    """In float32: no mixed precision, one micro-batch, no checkpoints, no signal.

    FSDP2 adds up the gradients in another order than DDP, and norms of shards in place
    of norms of weights. After 50 steps on 2 to 4 processes 3.8e-5 to 6.7e-5 were
    measured; on one process no bit differs, which test_fsdp.py shows.
    """
    flags = ("--epochs", "2", *little_work(stage).flags)
    first = trained(first_launched(stage), several, *flags, how=train_in_forks)
    done = trained(stage, several, *flags, how=train_in_forks)
    most = 3e-4 if shards_the_weights(stage) and several > 1 else 0
    assert max_abs_diff(done.weights, first.weights) <= most
    if int(stage[:2]) < 7:
        assert done.epochs == first.epochs
    else:  # the loss is added up in another order
        last = [one.rows[-1]["val"] for one in (done, first)]
        assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-6)
        assert last[0]["acc1"] == last[1]["acc1"]


@pytest.mark.parametrize(
    "stage, processes",
    [
        swept_unless(False, stage, n)
        for stage in stages()
        if shards_the_weights(stage)
        for n in (1, 3, 4)
    ],
)
def test_sharded_weights_in_single_precision(stage, processes, trained, device):
    """Like the test above, on other numbers of processes."""
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    flags = ("--epochs", "2", *little_work(stage).flags)
    copies = trained(first_launched(stage), processes, *flags, how=train_in_forks)
    done = trained(stage, processes, *flags, how=train_in_forks)
    most = 3e-4 if processes > 1 else 0
    assert max_abs_diff(done.weights, copies.weights) <= most


def test_two_launchers_as_on_two_machines(alone, two, device, tmp_path):
    """Two torchruns that meet at one address, as README shows for two machines."""
    if device == "cuda":
        pytest.skip("both launchers of one machine would take its first GPU")
    meeting = ["--nnodes=2", f"--nproc-per-node={two // 2}", "--rdzv-backend=c10d"]
    meeting += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    script = ROOT / "03_ddp_launch/train.py"
    flags = [*DOUBLE, "--device", device, "--out-dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, script, *flags]
    (tmp_path / "second").mkdir()
    with started(command, tmp_path / "second") as second:
        first = run(command, tmp_path)
        assert second.wait(300) == 0, second.screen()
    assert first.returncode == 0, first.stderr
    assert "2 processes on gloo" in first.stdout + second.screen()
    assert max_abs_diff(tmp_path / "out/last.pt", alone.weights) <= 1e-10


LAUNCHED_BY_DEFAULT = {"01_single_gpu", *LAUNCHERS, stages()[-1]}


@pytest.mark.parametrize(
    "stage", [swept_unless(stage in LAUNCHED_BY_DEFAULT, stage) for stage in stages()]
)
def test_a_copy_runs_by_its_command_learns_and_prints_what_the_first_prints(
    stage, trained, several
):
    """A stage and common/, copied into an empty folder, and run from a third folder.

    That a language model learns is shown in test_gpt.py, on more than this text.
    """
    flags = ("--epochs", "3", *little_work(stage).flags)
    done = trained(stage, several if takes_processes(stage) else 1, *flags)
    losses = [row["train"]["loss"] for row in done.rows]
    assert len(losses) == 3
    if not trains_on_text(stage):
        assert losses[-1] < 0.1 * losses[0]
        assert done.rows[-1]["val"]["acc1"] >= 95
    assert losses == sorted(losses, reverse=True)
    assert done.epochs == trained(reference(stage), 1, *flags).epochs


@pytest.fixture(scope="module")
def weights_of_each_rank(device, several, tmp_path_factory):
    """Return a function that trains stage 03 and returns the weights of every rank."""
    if several < 2:
        pytest.skip("a second process needs a second GPU")

    def get(fault=None):
        folder = tmp_path_factory.mktemp("ranks")
        prepare = functools.partial(
            call_all, fault, functools.partial(weights_kept, 50, folder)
        )
        flags = [*DOUBLE, "--device", device]
        ends = fork_ranks("03_ddp_launch", several, flags, folder, prepare=prepare)
        assert [end().returncode for end in ends] == [0] * several
        return [torch.load(folder / f"{rank}.pt") for rank in range(several)]

    return get


def difference(one, other):
    """Return the largest difference between two lists of weights."""
    pairs = zip(one, other, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_all_ranks_hold_the_same_weights(weights_of_each_rank, alone):
    first, second = weights_of_each_rank()
    assert difference(first, second) == 0
    assert difference(first, torch.load(alone.weights).values()) <= 1e-10


def test_without_ddp_the_ranks_diverge(weights_of_each_rank, alone):
    first, second = weights_of_each_rank(without_ddp)
    assert difference(first, second) > 1e-3
    assert difference(first, torch.load(alone.weights).values()) > 1e-3


def test_without_set_epoch_the_weights_differ(weights_of_each_rank, alone):
    first, second = weights_of_each_rank(without_set_epoch)
    assert difference(first, second) == 0
    assert difference(first, torch.load(alone.weights).values()) > 1e-3
