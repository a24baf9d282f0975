"""Stage 08: micro-batches give the step of the whole batch, with one all-reduce."""

import contextlib
import types
import weakref

import pytest
import torch
from torch import nn

from common import meters
from nbtools.lesson import max_abs_diff
from tests.conftest import swept_unless
from tests.harness import assert_one_error_line
from tests.harness import counts
from tests.harness import fork_ranks
from tests.harness import give_sets
from tests.harness import little_work
from tests.harness import load_stage
from tests.harness import load_stage_for_vectors
from tests.harness import plain
from tests.harness import sharded
from tests.harness import shards_the_weights
from tests.harness import train_in_forks
from tools.stages import reference
from tools.stages import stages

ACCUMULATING = stages()[7:]
DOUBLE = ("--dtype", "float64", "--epochs", "2")
SAMPLES = 300  # 5 steps an epoch
# Processes and micro-batches, which need not divide the local batch. In the second and
# the fourth pair a micro-batch is one sample.
PAIRS = [(1, 7), (1, 60), (2, 4), (2, 30), (3, 3), (1, 1), (1, 2), (2, 3), (4, 4)]
FIRST = ACCUMULATING[0]


@pytest.mark.parametrize(
    "stage, processes, micro_batches",
    [
        swept_unless((stage == FIRST and pair in PAIRS[:3]), stage, *pair)
        for stage in ACCUMULATING
        for pair in (PAIRS if stage == FIRST else PAIRS[1:5])
    ],
)
def test_any_number_of_micro_batches_equals_the_whole_batch(
    stage, processes, micro_batches, trained, device
):
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    work = little_work(stage, SAMPLES)
    flags = (*DOUBLE, *work.flags)
    whole = trained(reference(stage), 1, *flags, how=train_in_forks)
    flags = (*flags, "--grad-accum-steps", str(micro_batches))
    done = trained(stage, processes, *flags, how=train_in_forks)
    assert max_abs_diff(done.weights, whole.weights) <= 1e-10
    assert len(done.rows) == 2
    for one, other in zip(done.rows, whole.rows, strict=True):
        for part, targets in (("train", work.train), ("val", work.val)):
            assert one[part]["count"] == targets
            assert one[part]["loss"] == pytest.approx(other[part]["loss"], abs=1e-10)
            assert one[part]["acc1"] == other[part]["acc1"]


@pytest.mark.parametrize("stage", [swept_unless(s == FIRST, s) for s in ACCUMULATING])
def test_the_gradient_of_the_whole_batch_is_clipped(stage, trained, several):
    plain = (*DOUBLE, *little_work(stage, SAMPLES).flags)
    clip = (*plain, "--clip-grad", "0.1")
    # Where the reference has no --clip-grad, the last stage that does not accumulate.
    unsplit = max(reference(stage), "07_distributed_eval")
    whole = trained(unsplit, 1, *clip, how=train_in_forks)
    flags = (*clip, "--grad-accum-steps", "4")
    done = trained(stage, several, *flags, how=train_in_forks)
    assert max_abs_diff(done.weights, whole.weights) <= 1e-10
    free = trained(reference(stage), 1, *plain, how=train_in_forks)
    assert max_abs_diff(done.weights, free.weights) > 1e-3


def count_reduced_bytes(wrapped):
    """Return a list to which DDP will add the bytes of each bucket that it reduces."""
    sizes = []

    def hook(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    return sizes


class Accumulation:
    """Accumulates the gradients of a batch of 13 images by a stage's own function."""

    def __init__(self, stage, micro_batches):
        self.accumulate = load_stage_for_vectors(stage).accumulate_gradients
        torch.manual_seed(0)
        layers = [nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 6)]
        self.model = nn.Sequential(*layers).double()
        if shards_the_weights(stage):
            self.wrapped = sharded(self.model)
        else:
            wrap = nn.parallel.DistributedDataParallel
            self.wrapped = wrap(self.model, bucket_cap_mb=0.01)
        self.args = types.SimpleNamespace(
            device=torch.device("cpu"),
            dtype=torch.float64,
            amp="off",
            grad_accum_steps=micro_batches,
        )
        self.batch = (torch.randn(13, 20).double(), torch.arange(13) % 6)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(self):
        """Take all but the optimizer's part of a step; return its loss and metrics."""
        meter = meters.Meter("cpu")
        self.model.zero_grad()
        loss = self.accumulate(self.args, self.wrapped, self.batch, self.scaler, meter)
        return loss, meter.compute()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize(
    "stage", [s for s in ACCUMULATING if not shards_the_weights(s)]
)
def test_each_bucket_is_reduced_once_per_step(stage, micro_batches, monkeypatch):
    """By DDP; test_fsdp.py counts what FSDP2 does."""

    def reduced(steps):
        accumulation = Accumulation(stage, micro_batches)
        sizes = count_reduced_bytes(accumulation.wrapped)
        accumulation.step()  # DDP arranges its buckets after the first step
        sizes.clear()
        for _ in range(steps):
            accumulation.step()
        return sizes, sum(each.nbytes for each in accumulation.model.parameters())

    sizes, weights = reduced(3)
    assert sum(sizes) == 3 * weights
    buckets = len(sizes) // 3
    assert buckets > 1
    ddp = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(ddp, "no_sync", lambda _: contextlib.nullcontext())
    sizes, _ = reduced(3)
    assert sum(sizes) == 3 * micro_batches * weights
    assert len(sizes) == 3 * micro_batches * buckets


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 13])
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_gradient_loss_and_metrics_are_those_of_the_whole_batch(stage, micro_batches):
    accumulation = Accumulation(stage, micro_batches)
    loss, metrics = accumulation.step()
    model, (images, target) = accumulation.model, accumulation.batch
    ours = [plain(parameter.grad).clone() for parameter in model.parameters()]
    model.zero_grad()
    output = model(images)
    whole = nn.functional.cross_entropy(output, target)
    whole.backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        expected = plain(parameter.grad)
        assert (gradient - expected).abs().max() <= 1e-12
        assert expected.abs().max() > 1e-3
    assert not loss.requires_grad and loss.item() == pytest.approx(whole.item())
    meter = meters.Meter("cpu")
    meter.update(whole, output, target)
    expected = meter.compute()
    for name in ("loss", "acc1", "acc5", "count"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_logits_of_no_more_than_two_micro_batches_are_in_memory(stage):
    """Those of the forward pass, and the ones before, until their name is reused."""
    accumulation = Accumulation(stage, 6)
    outputs, in_memory = [], []

    def note(_module, _images, output):
        outputs.append(weakref.ref(output))
        in_memory.append(sum(ref() is not None for ref in outputs))

    accumulation.wrapped.register_forward_hook(note)
    accumulation.step()
    assert in_memory == [1, 2, 2, 2, 2, 2]
    assert not any(ref() is not None for ref in outputs)


class Rows(torch.utils.data.Dataset):
    """n numbers."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return float(index)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "batch_size, micro_batches", [(60, 1), (60, 7), (15, 4), (5, 5)]
)
@pytest.mark.parametrize("stage", ACCUMULATING)
def test_evaluation_takes_no_larger_batches_than_training(
    stage, batch_size, micro_batches
):
    module = load_stage(stage)
    give_sets(module, Rows(batch_size * 3), Rows(batch_size * 2 + 1))
    args = types.SimpleNamespace(
        batch_size=batch_size,
        grad_accum_steps=micro_batches,
        seed=0,
        workers=0,
        data="digits",
        device=torch.device("cpu"),
    )
    train_loader, val_loader = module.make_loaders(args)
    trained_at_once = [
        len(part)
        for batch in train_loader
        for part in batch.tensor_split(micro_batches)
    ]
    evaluated_at_once = [len(batch) for batch in val_loader]
    assert sum(trained_at_once) == batch_size * 3
    assert sum(evaluated_at_once) == batch_size * 2 + 1
    assert max(evaluated_at_once) == batch_size // micro_batches
    assert max(evaluated_at_once) <= max(trained_at_once)


@pytest.mark.parametrize(
    "stage, micro_batches, named",
    [
        swept_unless(stage == FIRST, stage, *case)
        for stage in ACCUMULATING
        for case in [
            ("31", "--grad-accum-steps: a local batch has only 30 "),
            ("0", "--grad-accum-steps: '0' is not an integer, 1 or more"),
            ("1.5", "--grad-accum-steps: '1.5' is not an integer"),
        ]
    ],
)
def test_wrong_numbers_of_micro_batches(stage, micro_batches, named, device, tmp_path):
    out = tmp_path / "out"
    flags = ["--grad-accum-steps", micro_batches, "--device", device, "--out-dir", out]
    for end in fork_ranks(stage, 2, flags, tmp_path / "ranks"):
        assert_one_error_line(end(), named)
    assert not out.exists()
