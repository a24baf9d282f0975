"""08_grad_accumulation: micro-batches give the step of a whole batch, reduced once."""

import contextlib
import weakref

import pytest
import torch
from torch import nn

from common import meters
from harness.counting import Collectives
from harness.stages import features
from harness.stages import first_with
from harness.stages import reference
from harness.stages import with_feature
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.training import DOUBLE
from tests.training import assert_one_error_line
from tests.training import load_stage
from tests.training import load_stage_for_vectors
from tests.training import loaders_of
from tests.training import plain
from tests.training import replace_data
from tests.training import run_stage
from tests.training import sharded
from tests.training import skip_without_gpus
from tests.training import small_workload
from tests.training import stage_args
from tests.training import train_in_forks

ACCUMULATING = with_feature("accumulation")
FIRST = ACCUMULATING[0]
SAMPLES = 96  # 2 steps an epoch
# Processes and micro-batches, which divide the local batch. In the second and the
# fourth pair a micro-batch is one sample.
PAIRS = [(1, 8), (1, 48), (2, 4), (2, 24), (3, 4), (1, 1), (2, 3), (4, 4)]
# The first of each kind: the others accumulate by the same lines.
KINDS = [FIRST, *(first_with(each, "accumulation") for each in ("text", "shards"))]


@pytest.mark.parametrize(
    "stage, processes, micro_batches",
    [
        only_in_release(stage, *pair, unless=stage == FIRST and pair in PAIRS[:3])
        for stage in KINDS
        for pair in (PAIRS if stage == FIRST else PAIRS[2:5])
    ],
)
def test_any_number_of_micro_batches_equals_the_whole_batch(
    stage, processes, micro_batches, trained, device
):
    skip_without_gpus(processes, device)
    work = small_workload(stage, SAMPLES)
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


@pytest.mark.parametrize(
    "stage", [only_in_release(s, unless=s == FIRST) for s in KINDS]
)
def test_the_gradient_of_the_whole_batch_is_clipped(stage, trained, several):
    flags = (*DOUBLE, *small_workload(stage, SAMPLES).flags)
    free = trained(reference(stage), 1, *flags, how=train_in_forks)
    flags = (*flags, "--clip-grad", "0.1")
    able_to_clip = "amp" in features(reference(stage))
    clipping = reference(stage) if able_to_clip else first_with("amp")
    whole = trained(clipping, 1, *flags, how=train_in_forks)
    flags = (*flags, "--grad-accum-steps", "4")
    done = trained(stage, several, *flags, how=train_in_forks)
    assert max_abs_diff(done.weights, whole.weights) <= 1e-10
    assert max_abs_diff(done.weights, free.weights) > 1e-3


class Accumulation:
    """Accumulates the gradients of a batch of 12 samples by a stage's own function."""

    def __init__(self, stage, micro_batches):
        module = load_stage_for_vectors(stage)
        self.accumulate = module.accumulate_gradients
        flags = ("--dtype", "float64", "--grad-accum-steps", micro_batches)
        self.args = stage_args(module, *flags)
        torch.manual_seed(0)
        layers = [nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 6)]
        self.model = nn.Sequential(*layers).double()
        if "shards" in features(stage):
            self.wrapped = sharded(self.model)
        else:
            wrap = nn.parallel.DistributedDataParallel
            self.wrapped = wrap(self.model, bucket_cap_mb=0.01)
        self.batch = (torch.randn(12, 20).double(), torch.arange(12) % 6)
        if "text" in features(stage):  # [B, T, ...], here with T = 1
            self.batch = tuple(tensor.unsqueeze(1) for tensor in self.batch)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(self):
        """Take all but the optimizer's part of a step; return its metrics."""
        meter = meters.Meter("cpu")
        self.model.zero_grad()
        parts = (self.wrapped, self.batch, self.scaler, meter)
        self.accumulate(self.args, *parts)
        return meter.compute()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("micro_batches", [1, 2, 6])
@pytest.mark.parametrize("stage", [s for s in KINDS if "ddp" in features(s)])
def test_each_bucket_is_reduced_once_per_step(stage, micro_batches, monkeypatch):
    """By DDP; test_fsdp.py counts what FSDP2 does."""
    accumulation = Accumulation(stage, micro_batches)

    def reduced():
        with Collectives() as collectives:
            for _ in range(3):
                accumulation.step()
        return collectives.total()["all_reduce"]

    accumulation.step()  # DDP arranges its buckets after the first step
    once = reduced()
    weights = sum(each.nbytes for each in accumulation.model.parameters())
    assert once["bytes"] == 3 * weights
    assert once["calls"] % 3 == 0 and once["calls"] > 3
    ddp = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(ddp, "no_sync", lambda _: contextlib.nullcontext())
    assert reduced() == {name: micro_batches * once[name] for name in once}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("micro_batches", [1, 6, 12])
@pytest.mark.parametrize("stage", KINDS)
def test_gradient_and_metrics_are_those_of_the_whole_batch(stage, micro_batches):
    accumulation = Accumulation(stage, micro_batches)
    metrics = accumulation.step()
    model, (inputs, targets) = accumulation.model, accumulation.batch
    ours = [plain(parameter.grad).clone() for parameter in model.parameters()]
    model.zero_grad()
    outputs = model(inputs)
    whole = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    whole.backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        expected = plain(parameter.grad)
        assert (gradient - expected).abs().max() <= 1e-12
        assert expected.abs().max() > 1e-3
    meter = meters.Meter("cpu")
    meter.update(whole, outputs, targets)
    expected = meter.compute()
    for name in ("loss", "acc1", "acc5", "count"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", KINDS)
def test_logits_of_one_micro_batch_are_in_memory(stage):
    """Those of the one before have gone with the function that computed them."""
    accumulation = Accumulation(stage, 6)
    outputs, in_memory = [], []

    def note(_module, _samples, output):
        outputs.append(weakref.ref(output))
        in_memory.append(sum(ref() is not None for ref in outputs))

    accumulation.wrapped.register_forward_hook(note)
    accumulation.step()
    assert in_memory == [1] * 6
    assert not any(ref() is not None for ref in outputs)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("batch_size, micro_batches", [(48, 1), (48, 6), (5, 5)])
@pytest.mark.parametrize("stage", KINDS)
def test_evaluation_takes_no_larger_batches_than_training(
    stage, batch_size, micro_batches
):
    module = load_stage(stage)
    replace_data(module, range(batch_size * 3), range(batch_size * 2 + 1))
    flags = ("--batch-size", batch_size, "--grad-accum-steps", micro_batches)
    args = stage_args(module, *flags)
    train_loader, val_loader = loaders_of(module, args)
    trained_at_once = [
        len(part) for batch in train_loader for part in batch.chunk(micro_batches)
    ]
    evaluated_at_once = [len(batch) for batch in val_loader]
    assert sum(trained_at_once) == batch_size * 3
    assert sum(evaluated_at_once) == batch_size * 2 + 1
    assert max(evaluated_at_once) == batch_size // micro_batches
    assert max(evaluated_at_once) <= max(trained_at_once)


def test_micro_batches_that_do_not_divide_the_local_batch(two, device, tmp_path):
    out = tmp_path / "out"
    flags = ["--grad-accum-steps", "7", "--device", device, "--out-dir", out]
    for rank in run_stage(FIRST, two, flags, tmp_path / "ranks", code=2).ranks:
        named = "--grad-accum-steps must divide the local batch (24)"
        assert_one_error_line(rank, named)
    assert not out.exists()
