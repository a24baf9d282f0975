"""Stage 05: mixed precision, loss scaling, clipping, gradients that are not finite."""

import functools
import math
import re
import types

import pytest
import torch
from torch import nn

from common import checkpoint
from nbtools.lesson import max_abs_diff
from tests.conftest import swept_unless
from tests.fault_injection import infinite_gradient
from tests.fault_injection import nan_logits
from tests.fault_injection import weights_kept
from tests.harness import FakeLoader
from tests.harness import assert_one_error_line
from tests.harness import call_all
from tests.harness import fork
from tests.harness import fork_ranks
from tests.harness import little_work
from tests.harness import load_stage_for_vectors
from tests.harness import make_checkpointer
from tests.harness import plain
from tests.harness import sharded
from tests.harness import shards_the_weights
from tests.harness import train_in_forks
from tests.resume_harness import read_state
from tools.stages import ROOT
from tools.stages import stages
from tools.stages import trains_on_text

WITH_AMP = stages()[4:]
ACCUMULATING = stages()[7:]
DOUBLE = ("--dtype", "float64", "--epochs", "2")
SAMPLES = 300  # 5 steps an epoch


@pytest.mark.parametrize(
    "stage, amp, flags",
    [
        ("05_amp", "bf16", ()),
        ("05_amp", "fp16", ()),
        *(
            swept_unless(amp == "fp16" and stage == ACCUMULATING[0], stage, amp, flags)
            for stage in ACCUMULATING
            for amp in ("bf16", "fp16")
            for flags in [("--grad-accum-steps", "3")]
        ),
    ],
)
def test_it_learns_in_mixed_precision(trained, several, stage, amp, flags):
    flags = ("--epochs", "1", *little_work(stage).flags, *flags)
    done = trained(stage, several, *flags, "--amp", amp, how=train_in_forks)
    (row,) = done.rows
    if trains_on_text(stage):  # without training every byte is as likely: log(256)
        assert row["val"]["loss"] < 0.75 * math.log(256)
    else:
        assert row["val"]["acc1"] >= 90
    full = trained(stage, several, *flags, how=train_in_forks).rows[0]["train"]["loss"]
    assert row["train"]["loss"] != full
    assert row["train"]["loss"] == pytest.approx(full, rel=0.02)
    weights = torch.load(done.weights)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_clipping_is_the_same_on_any_number_of_processes(trained, several):
    flags = (*DOUBLE, *little_work("05_amp", SAMPLES).flags)
    clipped = [
        trained("05_amp", n, *flags, "--clip-grad", "0.5", how=train_in_forks)
        for n in sorted({1, several})
    ]
    free = trained("01_single_gpu", 1, *flags, how=train_in_forks)
    assert max_abs_diff(clipped[0].weights, clipped[-1].weights) <= 1e-10
    assert max_abs_diff(clipped[0].weights, free.weights) > 1e-3
    never = trained("05_amp", 1, *flags, "--clip-grad", "1e9", how=train_in_forks)
    assert max_abs_diff(never.weights, free.weights) <= 1e-10


WRONG = {
    "an unknown format": (["--amp", "fp8"], "--amp"),
    "autocast of float64": (["--amp", "bf16", "--dtype", "float64"], "--amp"),
    "a norm of zero": (["--clip-grad", "0"], "--clip-grad"),
}


@pytest.mark.parametrize(
    "stage, what", [swept_unless(s == "05_amp", s, w) for s in WITH_AMP for w in WRONG]
)
def test_wrong_flags(stage, what, tmp_path):
    flags, named = WRONG[what]
    done = fork(ROOT / stage / "train.py", flags, tmp_path)()
    assert_one_error_line(done, named)


# ---- gradients that are not finite ---------------------------------------------------
class Steps:
    """Takes steps by a stage's own loop, in a process group of this process only.

    The model is a linear layer; with `norm` batch norm stands before it.
    """

    def __init__(self, stage):
        self.stage = stage
        self.module = load_stage_for_vectors(stage)

    def __call__(self, scale, steps=1, images=None, amp="fp16", clip=None, norm=False):
        """Train for `steps` steps from a loss scale of `scale`.

        Returns `moved`, how far the weights went; `steps`, which the scheduler counts;
        `scale`, what the scaler has in the end; `model`, `optimizer` and `metrics`.
        """
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if norm:
            model = nn.Sequential(nn.BatchNorm1d(4), model)
        if shards_the_weights(self.stage):
            sharded(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        options = {"init_scale": scale, "growth_interval": 10**6}
        scaler = torch.amp.GradScaler("cpu", enabled=amp == "fp16", **options)
        args = types.SimpleNamespace(
            device=torch.device("cpu"),
            dtype=torch.float32,
            seed=0,
            amp=amp,
            clip_grad=clip,
            grad_accum_steps=1,
            checkpoint_dir=None,
            checkpoint_every=100,
            keep_checkpoints=2,
        )
        images = torch.randn(6, 4) if images is None else images
        loader = FakeLoader([(images, torch.arange(6) % 3)] * steps)
        before = [plain(each).detach().clone() for each in model.parameters()]
        arguments = [args, 1, model, loader, optimizer, scheduler, scaler]
        if int(self.stage[:2]) >= 9:
            parts = [model, optimizer, scheduler, scaler]
            arguments.append(make_checkpointer(self.module, args, loader, *parts))
        if int(self.stage[:2]) >= 10:
            arguments.append(lambda: types.SimpleNamespace(wait=no_signal))
        metrics = self.module.train_one_epoch(*arguments)
        after = map(plain, model.parameters())
        moves = [a - b for a, b in zip(after, before, strict=True)]
        return types.SimpleNamespace(
            moved=math.hypot(*(move.norm().item() for move in moves)),
            steps=scheduler.last_epoch,
            scale=scaler.get_scale(),
            model=model,
            optimizer=optimizer,
            metrics=metrics[0] if isinstance(metrics, tuple) else metrics,
        )


def no_signal():
    """Return what stage 10's vote comes to as long as no rank has got a signal."""
    return [torch.tensor([0, 0])]


@pytest.fixture(params=WITH_AMP)
def take(request):
    request.getfixturevalue("group")
    return Steps(request.param)


def test_an_overflow_in_fp16_is_skipped_and_halves_the_scale(take, capsys):
    done = take(2.0**60)
    assert (done.moved, done.steps, done.scale) == (0, 0, 2.0**59)
    text = "step 1: skipped, gradient not finite, loss scale 1.15292e+18\n"
    assert capsys.readouterr().out == text
    done = take(2.0**10)
    assert done.moved > 0.1 and (done.steps, done.scale) == (1, 2.0**10)
    assert capsys.readouterr().out == ""


def test_after_skipped_steps_training_continues(take, capsys):
    done = take(2.0**30, steps=40)
    skipped = re.findall(r"^step (\d+): skipped", capsys.readouterr().out, re.M)
    assert skipped == [str(step) for step in range(1, len(skipped) + 1)]
    assert 5 < len(skipped) < 40
    assert done.steps == 40 - len(skipped)
    assert done.scale == 2.0 ** (30 - len(skipped))
    assert done.metrics["count"] == 40 * 6 and math.isfinite(done.metrics["loss"])


def test_a_skipped_step_leaves_weights_momentum_schedule_and_statistics_sane(take):
    """Batch norm has seen the images of the step, which are finite, as in any other."""
    done = take(2.0**60, norm=True)
    assert (done.moved, done.steps) == (0, 0)
    assert not done.optimizer.state
    assert done.optimizer.param_groups[0]["lr"] == 0.5
    for buffer in done.model.buffers():
        assert buffer.isfinite().all()
    usual = take(2.0**10, norm=True)
    assert usual.moved > 0.1 and usual.optimizer.state
    for one, other in zip(done.model.buffers(), usual.model.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_gradient_is_clipped_after_it_is_unscaled(take):
    free = take(2.0**10)
    clipped = take(2.0**10, clip=0.01)
    assert free.moved > 0.1
    assert clipped.moved == pytest.approx(0.5 * 0.01, rel=1e-3)


NAN_IMAGES = torch.full((6, 4), torch.nan)


@pytest.mark.parametrize("amp", ["fp16", "bf16", "off"])
def test_a_loss_that_is_not_finite_ends_the_run(take, amp):
    """No smaller scale can help then."""
    text = "^rank 0, step 1: gradient not finite, loss nan$"
    with pytest.raises(FloatingPointError, match=text):
        take(2.0**10, images=NAN_IMAGES, amp=amp)


@pytest.mark.parametrize("amp", ["fp16", "bf16", "off"])
def test_an_infinite_gradient_ends_the_run_if_no_loss_scale_can_be_lowered(take, amp):
    """The loss is finite here: only the gradient overflows."""

    def overflow(_module, _inputs, output):
        output.register_hook(lambda gradient: gradient + torch.inf)

    hook = nn.modules.module.register_module_forward_hook(overflow)
    try:
        with pytest.raises(FloatingPointError, match=r"step 1: .* not finite, loss \d"):
            take(1, amp=amp)
    finally:
        hook.remove()


def is_default(stage):
    return stage in ("05_amp", "08_grad_accumulation", "10_preemption")


@pytest.mark.parametrize("stage", [swept_unless(is_default(s), s) for s in WITH_AMP])
def test_all_ranks_skip_a_step_that_overflows_on_one(stage, two, device, tmp_path):
    """Step 7 is the second of epoch 2."""
    out = tmp_path / "out"
    work = little_work(stage, SAMPLES)
    flags = [*work.flags, "--amp", "fp16", "--epochs", "2", "--device", device]
    flags += ["--out-dir", out]
    if int(stage[:2]) >= 9:
        flags += ["--checkpoint-dir", tmp_path / "checkpoints"]
    faults = [
        functools.partial(infinite_gradient, 7),
        functools.partial(weights_kept, 9, tmp_path),
    ]
    prepare = functools.partial(call_all, *faults)
    ends = fork_ranks(stage, two, flags, tmp_path, prepare=prepare)
    done = [end() for end in ends]
    assert [one.returncode for one in done] == [0] * len(ends), done
    text = "step 7: skipped, gradient not finite, loss scale 65536\n"
    assert done[0].stdout.count("skipped") == done[0].stdout.count(text) == 1
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, first, second))
    last = torch.load(out / "last.pt").values()  # in another order than the optimizer's
    assert sorted(map(torch.Tensor.tolist, first), key=str) == sorted(
        map(torch.Tensor.tolist, last), key=str
    )
    rows = checkpoint.read_metrics(out)
    assert [row["train"]["count"] for row in rows] == [work.train] * 2
    assert all(math.isfinite(row["train"]["loss"]) for row in rows)
    if int(stage[:2]) >= 9:
        (path,) = (tmp_path / "checkpoints").glob("step-000000010*")
        state = read_state(path)
        assert (state["step"], state["scheduler"]["last_epoch"]) == (10, 9)
        assert state["scaler"]["scale"] == 32768


@pytest.mark.fault(
    stages="05 to 13",
    what="the loss is not finite, on one rank or on all, or a gradient overflows and"
    " there is no loss scale to lower",
    sees="`FloatingPointError: rank 1, step ...: gradient not finite, loss nan`; exit"
    " code 1",
    seconds=30,
    lost="the run; the weights of the last epoch are valid, and with stages 09 and 10"
    " the latest checkpoint is from before that step",
)
@pytest.mark.parametrize("stage", [swept_unless(is_default(s), s) for s in WITH_AMP])
def test_a_loss_that_is_not_finite_on_one_rank_ends_the_run(
    stage, two, device, tmp_path, fault
):
    """With fp16 the other rank's loss is finite, and it would go on if it could."""
    flags = ["--amp", "fp16", "--device", device, "--out-dir", tmp_path / "out"]
    flags += little_work(stage).flags
    prepare = functools.partial(nan_logits, 7)
    options = {"prepare": prepare, "seconds": fault.seconds}
    done = [end() for end in fork_ranks(stage, two, flags, tmp_path, **options)]
    assert [one.returncode for one in done] == [1] * len(done), done
    fault.assert_seen(done[-1].stderr)
    text = "FloatingPointError: rank 1, step 7: gradient not finite, loss nan\n"
    assert text in done[-1].stderr
    assert "rank 0, step" not in done[0].stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_diverges_ends_with_rank_and_step(tmp_path, device, several):
    flags = ["--lr", "1e6", "--device", device, "--out-dir", tmp_path / "out"]
    (end,) = fork_ranks("05_amp", several, flags, tmp_path)
    done = end()
    assert done.returncode == 1
    assert re.search(r"rank \d, step (\d+): gradient not finite, loss", done.stderr)
    assert not (tmp_path / "out").exists()
