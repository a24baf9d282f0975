"""Every stage trains the same model to the same weights, on any number of processes."""

import sys

from nbtools.lesson import max_abs_diff
from tests.harness import changed
from tests.harness import fork_ranks
from tests.harness import free_port
from tests.harness import run
from tests.harness import started
from tests.harness import train_in_forks
from tools.stages import ROOT
from tools.stages import stages
from tools.stages import takes_processes

import pytest

DOUBLE = ("--dtype", "float64", "--epochs", "2")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def assert_same(one, other):
    assert max_abs_diff(one.weights, other.weights) <= 1e-10
    assert len(one.rows) == len(other.rows) == 2
    for a, b in zip(one.rows, other.rows, strict=True):
        for part, images in (("train", 1500), ("val", 297)):
            assert a[part]["images"] == b[part]["images"] == images
            assert a[part]["loss"] == pytest.approx(b[part]["loss"], abs=1e-10)
            assert a[part]["acc1"] == b[part]["acc1"]


@pytest.fixture
def alone(trained):
    """Stage 01 in double precision, which all others are compared with."""
    return trained("01_single_gpu", 1, *DOUBLE, how=train_in_forks)


def test_dataparallel_equals_one_gpu(trained, alone):
    assert_same(alone, trained("02_dataparallel", 1, *DOUBLE, how=train_in_forks))


def test_any_number_of_processes_equals_one_gpu(trained, alone, device, launched, processes):
    done = trained(launched, processes, *DOUBLE, how=train_in_forks)
    assert f"{processes} processes on {BACKENDS[device]}" in done.stdout
    assert_same(alone, done)


def test_two_launchers_as_on_two_machines(alone, several, device, tmp_path):
    """Two torchruns that meet at one address, as notebook 03 shows for two machines."""
    if several < 2:
        pytest.skip("a second process needs a second GPU")
    if device == "cuda":
        pytest.skip("both launchers of one machine would take its first GPU")
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    meeting += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair"]
    script = str(ROOT / "03_ddp_launch/train.py")
    flags = [*DOUBLE, "--device", device, "--out-dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, script, *flags]
    (tmp_path / "second").mkdir()
    with started(command, tmp_path / "second") as second:
        first = run(command, tmp_path)
        assert second.wait(300) == 0, second.screen()
    assert first.returncode == 0, first.stderr
    assert "2 processes on gloo" in first.stdout + second.screen()
    assert max_abs_diff(tmp_path / "out/last.pt", alone.weights) <= 1e-10


@pytest.mark.parametrize("stage", stages())
def test_copied_elsewhere_it_learns_and_float32_prints_the_same(trained, several, stage):
    """A stage and common/, copied into an empty folder, and run from a third place as it says."""
    done = trained(stage, several if takes_processes(stage) else 1)
    losses = [row["train"]["loss"] for row in done.rows]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]
    assert done.rows[-1]["val"]["acc1"] >= 95
    assert done.epochs == trained("01_single_gpu").epochs


@pytest.fixture(scope="module")
def weights_of_each_rank(device, several, tmp_path_factory):
    """Return a function: train a changed copy of stage 03 and return the weights of every rank."""
    if several < 2:
        pytest.skip("a second process needs a second GPU")

    def get(name, old, new):
        folder = tmp_path_factory.mktemp(name)
        every_rank = (
            "if args.out_dir and is_main_process():",
            "args.out_dir /= str(dist.get_rank())\n        if 1:",
        )
        root = changed("03_ddp_launch", folder / "copy", (old, new), every_rank)
        out = folder / "out"
        flags = [*DOUBLE, "--device", device, "--out-dir", str(out)]
        ends = fork_ranks("03_ddp_launch", several, flags, folder, root=root)
        assert [end().returncode for end in ends] == [0] * several
        # Every epoch's folder lies in the one before: out/RANK/RANK.
        return [out / str(rank) / str(rank) / "last.pt" for rank in range(several)]

    return get


def test_all_ranks_hold_the_same_weights(weights_of_each_rank, alone):
    first, second = weights_of_each_rank("as-it-is", "gc.collect()", "gc.collect()")
    assert max_abs_diff(first, second) == 0
    assert max_abs_diff(first, alone.weights) <= 1e-10


def test_without_ddp_the_ranks_part(weights_of_each_rank, alone):
    wrap = "nn.parallel.DistributedDataParallel(model)"
    first, second = weights_of_each_rank("no-ddp", wrap, "model")
    assert max_abs_diff(first, second) > 1e-3
    assert max_abs_diff(first, alone.weights) > 1e-3


def test_without_set_epoch_the_weights_are_others(weights_of_each_rank, alone):
    first, second = weights_of_each_rank("no-set-epoch", "loader.sampler.set_epoch(epoch)", "pass")
    assert max_abs_diff(first, second) == 0
    assert max_abs_diff(first, alone.weights) > 1e-3
