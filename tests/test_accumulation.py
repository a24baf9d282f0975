"""Stage 08: the batch in parts gives the step of the whole batch, with one all-reduce."""

import contextlib
import types

from nbtools.lesson import max_abs_diff
from tests.conftest import counts
from tests.harness import fork_ranks
from tests.harness import train_in_forks
from tests.test_chain import load
from tools.stages import stages

import pytest
import torch
from torch import distributed as dist
from torch import nn

ACCUMULATING = stages()[7:]
DOUBLE = ("--dtype", "float64", "--epochs", "2")
SMALL = ("--data", "fake", "--image-size", "8", "--images", "300")  # five steps an epoch
# Processes and parts. A process's share of the 60 images need not be a multiple of the parts.
PAIRS = [(1, 1), (1, 2), (1, 7), (1, 60), (2, 3), (2, 4), (3, 3), (4, 4)]


@pytest.mark.parametrize("processes, parts", PAIRS)
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_any_number_of_parts_equals_the_whole_batch(stage, processes, parts, trained, device):
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    whole = trained("01_single_gpu", 1, *DOUBLE, *SMALL, how=train_in_forks)
    flags = (*DOUBLE, *SMALL, "--grad-accum-steps", str(parts))
    done = trained(stage, processes, *flags, how=train_in_forks)
    assert max_abs_diff(done.weights, whole.weights) <= 1e-10
    assert len(done.rows) == 2
    for one, other in zip(done.rows, whole.rows, strict=True):
        for part, images in (("train", 300), ("val", 60)):
            assert one[part]["images"] == images
            assert one[part]["loss"] == pytest.approx(other[part]["loss"], abs=1e-10)
            assert one[part]["acc1"] == other[part]["acc1"]


@pytest.mark.parametrize("stage", ACCUMULATING)
def test_the_gradient_of_the_whole_batch_is_clipped(stage, trained, several):
    clip = (*DOUBLE, *SMALL, "--clip-grad", "0.5")
    whole = trained("07_distributed_eval", 1, *clip, how=train_in_forks)
    done = trained(stage, several, *clip, "--grad-accum-steps", "4", how=train_in_forks)
    assert max_abs_diff(done.weights, whole.weights) <= 1e-10
    other = trained("01_single_gpu", 1, *DOUBLE, *SMALL, how=train_in_forks)
    assert max_abs_diff(done.weights, other.weights) > 1e-3


@pytest.mark.parametrize("stage", ACCUMULATING)
def test_one_part_gives_the_weights_of_stage_07_bit_for_bit(stage, trained, several):
    before = trained("07_distributed_eval", several, "--epochs", "2", how=train_in_forks)
    after = trained(stage, several, "--epochs", "2", "--grad-accum-steps", "1", how=train_in_forks)
    assert max_abs_diff(before.weights, after.weights) == 0
    assert before.epochs == after.epochs


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_it_learns_in_mixed_precision(stage, amp, trained, several):
    flags = ("--epochs", "1", "--grad-accum-steps", "3")
    full = trained(stage, several, *flags, how=train_in_forks).rows[0]
    done = trained(stage, several, *flags, "--amp", amp, how=train_in_forks).rows[0]
    assert done["train"]["loss"] != full["train"]["loss"]
    assert done["train"]["loss"] == pytest.approx(full["train"]["loss"], rel=0.02)
    assert done["val"]["acc1"] >= 90


@pytest.fixture
def group():
    """A group of this process only."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def counted(wrapped):
    """Have a model note the bytes of each bucket that it reduces; return the list."""
    sizes = []

    def hook(state, bucket):
        sizes.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    return sizes


def accumulated(stage, parts, steps=1):
    """Accumulate a batch of 13 images; return the model, the batch, and what it reduced.

    The first step is taken beforehand: after it, DDP puts its buckets into another order.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 6)).double()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    sizes = counted(wrapped)
    args = types.SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float64, amp=None, accumulate=parts
    )
    batch = (torch.randn(13, 20).double(), torch.arange(13) % 6)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(1 + steps):
        if step == 1:
            sizes.clear()
        model.zero_grad()
        load(stage).accumulate(args, step, wrapped, batch, scaler)
    return model, batch, sizes


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_each_bucket_is_reduced_once_per_step(stage, parts, group, monkeypatch):
    model, _, sizes = accumulated(stage, parts, steps=3)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(sizes) == 3 * weights
    buckets = len(sizes) // 3
    assert buckets > 1
    unsynced = contextlib.nullcontext
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "no_sync", lambda _: unsynced())
    _, _, sizes = accumulated(stage, parts, steps=3)
    assert sum(sizes) == 3 * parts * weights
    assert len(sizes) == 3 * parts * buckets


@pytest.mark.parametrize("parts", [1, 2, 5, 13])
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_the_gradient_is_that_of_the_whole_batch(stage, parts, group):
    model, (images, target), _ = accumulated(stage, parts)
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    nn.functional.cross_entropy(model(images), target).backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        assert (gradient - parameter.grad).abs().max() <= 1e-12
        assert parameter.grad.abs().max() > 1e-3


@pytest.mark.parametrize("share, parts", [(60, 1), (60, 7), (15, 4), (5, 5)])
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_evaluation_takes_no_larger_batches_than_training(stage, share, parts, group):
    module, taken = load(stage), {"train": [], "evaluation": []}
    module.data = types.SimpleNamespace(
        load_data=lambda args: (Rows(share * 3), Rows(share * 2 + 1)),
        loader_options=lambda args: {},
    )
    args = types.SimpleNamespace(batch_size=share, accumulate=parts, seed=0, workers=0)
    train_loader, val_loader = module.make_loaders(args)
    for batch in train_loader:
        taken["train"] += [len(part) for part in batch.tensor_split(parts)]
    taken["evaluation"] = [len(batch) for batch in val_loader]
    assert sum(taken["evaluation"]) == share * 2 + 1
    assert max(taken["evaluation"]) <= max(taken["train"])
    assert max(taken["evaluation"]) == share // parts


class Rows(torch.utils.data.Dataset):
    """n numbers."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return float(index)


@pytest.mark.parametrize("parts, named", [
    ("31", "--grad-accum-steps 31: a process has"), ("0", "--grad-accum-steps: "), ("1.5", "--grad-accum-steps: "),
])  # fmt: skip
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_parts_that_cannot_be(stage, parts, named, device, tmp_path):
    flags = ["--grad-accum-steps", parts, "--device", device, "--out-dir", str(tmp_path / "out")]
    for end in fork_ranks(stage, 2, flags, tmp_path / "ranks"):
        done = end()
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"train.py: error: {named}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", ACCUMULATING)
def test_a_part_of_one_image_is_the_least(stage, trained, several):
    flags = (*DOUBLE, *SMALL, "--grad-accum-steps", str(60 // several))
    done = trained(stage, several, *flags, how=train_in_forks)
    whole = trained("01_single_gpu", 1, *DOUBLE, *SMALL, how=train_in_forks)
    assert max_abs_diff(done.weights, whole.weights) <= 1e-10
