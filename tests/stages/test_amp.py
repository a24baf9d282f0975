"""05_amp: mixed precision learns, clips unscaled gradients, and skips infinite ones.

And docs/faults.md: a loss that is not finite on one rank ends the run on all.
"""

import functools
import itertools
import math
import types

import pytest
import torch
from torch import nn

from common import weights
from harness.stages import features
from harness.stages import first_with
from harness.stages import reference
from harness.stages import with_feature
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.fault_injection import infinite_gradient
from tests.fault_injection import nan_logits
from tests.fault_injection import weights_kept
from tests.resume_harness import read_state
from tests.training import DIGITS
from tests.training import DOUBLE
from tests.training import FakeLoader
from tests.training import call_all
from tests.training import load_stage_for_vectors
from tests.training import plain
from tests.training import run_stage
from tests.training import sharded
from tests.training import small_workload
from tests.training import stage_args
from tests.training import train_first_epoch
from tests.training import train_in_forks

STAGE = first_with("amp")
ACCUMULATING = with_feature("amp", "accumulation")
# The first of each kind: the others have the same lines of mixed precision.
ADDING = ("accumulation", "text", "shards", "tensor_parallel")
ADDING = [first_with(feature, "amp") for feature in ADDING]
SAMPLES = 240  # 5 steps an epoch


@pytest.mark.parametrize(
    "stage, amp",
    [
        (STAGE, "bf16"),
        only_in_release(STAGE, "fp16"),
        *(
            only_in_release(*case)
            for case in itertools.product(ADDING, ("bf16", "fp16"))
        ),
    ],
)
def test_it_learns_in_mixed_precision(trained, several, stage, amp):
    flags = ("--epochs", "1", *small_workload(stage).flags)
    if stage in ACCUMULATING:
        flags = (*flags, "--grad-accum-steps", "3")
    done = trained(stage, several, *flags, "--amp", amp, how=train_in_forks)
    (row,) = done.rows
    if "text" in features(stage):  # without training all bytes are as likely: log(256)
        assert row["val"]["loss"] < 0.75 * math.log(256)
    else:
        assert row["val"]["acc1"] >= 90
    full = trained(stage, several, *flags, how=train_in_forks).rows[0]["train"]["loss"]
    assert row["train"]["loss"] != full
    assert row["train"]["loss"] == pytest.approx(full, rel=0.02)
    saved = torch.load(done.weights)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_clipping_is_the_same_on_any_number_of_processes(trained, several):
    flags = (*DOUBLE, *small_workload(STAGE, SAMPLES).flags)

    def clipped(processes, norm):
        clip = ("--clip-grad", norm)
        return trained(STAGE, processes, *flags, *clip, how=train_in_forks).weights

    free = trained(reference(STAGE), 1, *flags, how=train_in_forks).weights
    assert max_abs_diff(clipped(1, "0.5"), clipped(several, "0.5")) <= 1e-10
    assert max_abs_diff(clipped(1, "0.5"), free) > 1e-3
    assert max_abs_diff(clipped(1, "1e9"), free) <= 1e-10
    assert max_abs_diff(clipped(1, "0"), free) <= 1e-10  # 0: not clipped


# ---- gradients that are not finite ---------------------------------------------------
@pytest.fixture(params=[STAGE, *ADDING])
def take_steps(request):
    """Return a function: take steps by a stage's own loop, in a group of one process.

    scale: the loss scale to begin with; clip: --clip-grad; norm: with batch norm before
    the model, which is a linear layer.

    That returns `moved`, how far the weights went; `steps`, which the scheduler counts;
    `scale`, what the scaler has in the end; `model`, `optimizer` and `metrics`.
    """
    stage = request.param
    request.getfixturevalue("group")
    module = load_stage_for_vectors(stage)

    def take(scale, steps=1, clip=None, norm=False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if norm:
            channels = 1 if "text" in features(stage) else 4
            model = nn.Sequential(nn.BatchNorm1d(channels), model)
        if "shards" in features(stage):
            sharded(model)
        before = [plain(each).detach().clone() for each in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        options = {"init_scale": scale, "growth_interval": 10**6}
        scaler = torch.amp.GradScaler("cpu", **options)
        samples, targets = torch.randn(6, 4), torch.arange(6) % 3
        if "text" in features(stage):  # [B, T, ...], here with T = 1
            samples, targets = samples.unsqueeze(1), targets.unsqueeze(1)
        loader = FakeLoader([(samples, targets)] * steps)
        args = stage_args(module, "--amp", "fp16")
        args.clip_grad = clip
        parts = (model, loader, optimizer, scheduler, scaler)
        metrics = train_first_epoch(stage, module, args, *parts)
        after = map(plain, model.parameters())
        moves = [a - b for a, b in zip(after, before, strict=True)]
        return types.SimpleNamespace(
            moved=math.hypot(*(move.norm().item() for move in moves)),
            steps=scheduler.last_epoch,
            scale=scaler.get_scale(),
            model=model,
            optimizer=optimizer,
            metrics=metrics,
        )

    return take


def test_a_skipped_step_leaves_momentum_schedule_and_statistics_sane(take_steps):
    """Its scale is halved. Batch norm has seen its samples, which are finite."""
    done = take_steps(2.0**60, norm=True)
    assert (done.moved, done.steps, done.scale) == (0, 0, 2.0**59)
    assert not done.optimizer.state
    assert done.optimizer.param_groups[0]["lr"] == 0.5
    usual = take_steps(2.0**10, norm=True)
    assert usual.moved > 0.1 and usual.optimizer.state
    for one, other in zip(done.model.buffers(), usual.model.buffers(), strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


def test_the_gradient_is_clipped_after_it_is_unscaled(take_steps):
    assert take_steps(2.0**10).moved > 0.1
    clipped = take_steps(2.0**10, clip=0.01)
    assert clipped.moved == pytest.approx(0.5 * 0.01, rel=1e-3)


# ---- on one of two processes ---------------------------------------------------------
DEFAULT = (STAGE, first_with("signals"))


def fp16_flags(stage, samples, *flags):
    """Return flags for a run with fp16 in which a step has one forward pass."""
    flags = [*small_workload(stage, samples).flags, "--amp", "fp16", *flags]
    if "accumulation" in features(stage):
        flags += ["--grad-accum-steps", "1"]
    return flags


@pytest.mark.parametrize("overflow", [infinite_gradient, nan_logits])
@pytest.mark.parametrize(
    "stage", [only_in_release(s, unless=s in DEFAULT) for s in with_feature("amp")]
)
def test_all_ranks_skip_a_step_that_overflows_on_one(
    stage, overflow, two, device, tmp_path
):
    """Step 7 is the second of epoch 2. Its loss counts, so a nan is seen."""
    out = tmp_path / "out"
    flags = fp16_flags(stage, SAMPLES, "--epochs", "2", "--device", device)
    flags += ["--out-dir", out]
    if "checkpoints" in features(stage):
        flags += ["--checkpoint-dir", tmp_path / "checkpoints"]
    prepare = functools.partial(
        call_all,
        functools.partial(overflow, 7),
        functools.partial(weights_kept, 9, tmp_path),
    )
    run_stage(stage, two, flags, tmp_path, prepare=prepare)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, first, second))
    last = torch.load(out / "last.pt").values()  # in another order than the optimizer's
    assert sorted(map(torch.Tensor.tolist, first), key=str) == sorted(
        map(torch.Tensor.tolist, last), key=str
    )
    rows = weights.read_metrics(out)
    targets = small_workload(stage, SAMPLES).train
    assert [row["train"]["count"] for row in rows] == [targets, targets]
    finite = [math.isfinite(row["train"]["loss"]) for row in rows]
    assert finite == [True, overflow is infinite_gradient]
    if "checkpoints" in features(stage):
        (path,) = (tmp_path / "checkpoints").glob("step-000000010*")
        state = read_state(path)
        assert (state["step"], state["scheduler"]["last_epoch"]) == (10, 9)
        assert state["scaler"]["scale"] == 32768


# ---- a loss that is not finite -------------------------------------------------------
STOPPED = "stopped in epoch 1: training has diverged; try a lower --lr\n"
DISTRIBUTED = [s for s in with_feature("distributed") if s != first_with("spawn")]


@pytest.mark.fault(
    what="a loss is not finite, on one rank or on all, and with it the weights",
    sees="`stopped in epoch ...: training has diverged`; exit code 1",
    lost="the run; the weights of the last epoch are valid, and with `--checkpoint-dir`"
    " the latest checkpoint is from before that step",
)
@pytest.mark.parametrize(
    "stage",
    [only_in_release(s, unless=s in (DISTRIBUTED[0], *DEFAULT)) for s in DISTRIBUTED],
)
def test_a_loss_that_is_not_finite_on_one_rank_ends_the_run(
    stage, two, device, tmp_path, fault
):
    """All ranks get its gradient, and so the same weights."""
    flags = [*small_workload(stage, SAMPLES).flags, "--device", device]
    flags += ["--out-dir", tmp_path / "out"]
    options = {"code": 1, "prepare": functools.partial(nan_logits, 2)}
    done = run_stage(stage, two, flags, tmp_path, **options)
    assert [rank.returncode for rank in done.ranks] == [1, 1]
    fault.assert_seen(done.stdout)
    assert done.stdout.endswith(STOPPED) and done.stdout.count("stopped") == 1
    assert "epoch 2" not in done.stdout
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.release
def test_a_run_that_skips_every_step_ends(two, device, tmp_path):
    """In fp16: its weights are finite, and too large for a forward pass."""
    flags = fp16_flags(STAGE, DIGITS, "--epochs", "2", "--device", device)
    flags += ["--lr", "1e6", "--clip-grad", "1e9", "--out-dir", tmp_path / "out"]
    done = run_stage(STAGE, two, flags, tmp_path, code=1)
    assert [rank.returncode for rank in done.ranks] == [1, 1]
    assert done.stdout.endswith(STOPPED)
    assert not list((tmp_path / "out").glob("*"))
