"""Stage 05: mixed precision, the scaler, clipping, and a loss that is no number."""

import types

from common import checkpointer
from nbtools.lesson import max_abs_diff
from nbtools.lesson import sections
from tests.harness import fork
from tests.harness import fork_ranks
from tests.harness import train_in_forks
from tests.test_chain import load
from tools.stages import ROOT
from tools.stages import stages

import pytest
import torch
from torch import distributed as dist
from torch import nn

WITH_AMP = stages()[4:]
RAISING = WITH_AMP[:4]  # later ones skip a step whose loss is not finite
DOUBLE = ("--dtype", "float64", "--epochs", "2")


def test_amp_off_gives_the_weights_of_stage_04_bit_for_bit(trained, several):
    flags = ("--epochs", "2")
    before, after = [
        trained(stage, several, *flags, how=train_in_forks) for stage in ("04_ddp_spawn", "05_amp")
    ]
    assert max_abs_diff(before.weights, after.weights) == 0
    assert before.epochs == after.epochs


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_it_learns_in_mixed_precision(trained, several, amp):
    done = trained("05_amp", several, "--amp", amp, "--epochs", "3", how=train_in_forks)
    losses = [row["train"]["loss"] for row in done.rows]
    assert losses[-1] < 0.1 * losses[0]
    assert done.rows[-1]["val"]["acc1"] >= 95
    full = trained("05_amp", several, "--epochs", "3", how=train_in_forks)
    full = full.rows[0]["train"]["loss"]
    assert losses[0] != full and losses[0] == pytest.approx(full, rel=0.02)
    weights = torch.load(done.weights)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_clipping_is_the_same_on_any_number_of_processes(trained, several):
    small = (*DOUBLE, "--data", "fake", "--image-size", "8", "--images", "300")
    clipped = [
        trained("05_amp", n, *small, "--clip-grad", "0.5", how=train_in_forks)
        for n in sorted({1, several})
    ]
    whole = trained("01_single_gpu", 1, *small, how=train_in_forks)
    assert max_abs_diff(clipped[0].weights, clipped[-1].weights) <= 1e-10
    assert max_abs_diff(clipped[0].weights, whole.weights) > 1e-3
    never = trained("05_amp", 1, *small, "--clip-grad", "1e9", how=train_in_forks)
    assert max_abs_diff(never.weights, whole.weights) <= 1e-10


def test_the_next_two_stages_train_by_the_same_lines():
    """So what is trained here holds for them too; tests/test_accumulation.py trains the others."""
    lines = [sections(stage)["4. one training epoch"] for stage in WITH_AMP[:3]]
    assert lines[0] == lines[1] == lines[2]


@pytest.mark.fault(
    stages="05 to 08",
    what="the loss is infinite or no number, on one rank or on all",
    sees="`FloatingPointError: rank ..., step ...: loss nan`; exit code 1",
    seconds=30,
    lost="the run; the weights of the last epoch are sound",
)
def test_a_loss_that_is_no_number_ends_the_run_with_step_and_rank(tmp_path, device, several, fault):
    flags = ["--lr", "1e6", "--device", device, "--out-dir", str(tmp_path / "out")]
    (end,) = fork_ranks("05_amp", several, flags, tmp_path, seconds=fault.seconds)
    done = end()
    assert done.returncode == 1
    fault.assert_seen(done.stderr)
    assert any(f"step {step}: loss nan" in done.stderr for step in range(2, 26))
    assert not (tmp_path / "out").exists()


WRONG = {
    "an unknown format": (["--amp", "fp8"], "--amp"),
    "autocast of float64": (["--amp", "bf16", "--dtype", "float64"], "--amp"),
    "a norm of zero": (["--clip-grad", "0"], "--clip-grad"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("stage", WITH_AMP)
def test_wrong_flags(stage, what, tmp_path):
    flags, named = WRONG[what]
    done = fork(ROOT / stage / "train.py", flags, tmp_path)()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"train.py: error: {named}")


class Batches(list):
    """Batches in a list, with what the training loop asks of a loader."""

    def __init__(self, batches):
        super().__init__(batches)
        self.dataset = types.SimpleNamespace()
        self.sampler = types.SimpleNamespace(set_epoch=lambda epoch: None)


class Step:
    """Takes steps with a linear model, by a stage's own loop; the group has this process only."""

    def __init__(self, stage):
        self.module = load(stage)

    def __call__(self, scale, clip=None, images=None, steps=1, amp=torch.float16):
        """Return how far the weights went, how many steps the scheduler counts, and the scale."""
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        options = {"init_scale": scale, "growth_interval": 10**6, "enabled": amp is not None}
        scaler = torch.amp.GradScaler("cpu", **options)
        args = types.SimpleNamespace(
            **{**dict.fromkeys(checkpointer.DECISIVE), "dtype": torch.float32, "seed": 0},
            **{"device": torch.device("cpu"), "grad_accum_steps": 1, "signals": [], "checkpoints": None},
            checkpoint_every=100,
        )
        args.amp, args.clip_grad = amp, clip
        args.checkpoints = checkpointer.Checkpointer(args, None, model, optimizer, scheduler, scaler)
        images = torch.randn(6, 4) if images is None else images
        before = [parameter.detach().clone() for parameter in model.parameters()]
        batches = Batches([(images, torch.arange(6) % 3)] * steps)
        self.module.train_one_epoch(args, 1, model, batches, optimizer, scheduler, scaler)
        moves = [(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
        return torch.cat(moves).norm().item(), scheduler.last_epoch, scaler.get_scale()


@pytest.fixture
def group():
    """A group of this process only."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(params=WITH_AMP)
def step(request, group):
    return Step(request.param)


def test_a_skipped_step_leaves_weights_and_schedule_alone(step, capsys):
    moved, steps, scale = step(2.0**60)
    assert (moved, steps, scale) == (0, 0, 2.0**59)
    text = "step 1: skipped, gradient not finite, loss scale 1.15292e+18\n"
    assert text in capsys.readouterr().out
    moved, steps, scale = step(2.0**10)
    assert moved > 0.1 and (steps, scale) == (1, 2.0**10)


def test_after_skipped_steps_it_goes_on(step, capsys):
    _, steps, scale = step(2.0**30, steps=40)
    skipped = capsys.readouterr().out.count("skipped")
    assert 5 < skipped < 40
    assert steps == 40 - skipped
    assert scale == 2.0 ** (30 - skipped)


def test_the_gradient_is_clipped_after_it_is_unscaled(step):
    free, _, _ = step(2.0**10)
    clipped, _, _ = step(2.0**10, clip=0.01)
    assert free > 0.1
    assert clipped == pytest.approx(0.01, rel=1e-3)


NO_NUMBER = torch.full((6, 4), torch.nan)


@pytest.mark.parametrize("stage", RAISING)
def test_a_loss_that_is_no_number_changes_no_weight(stage, group):
    with pytest.raises(FloatingPointError, match="rank 0, step 1: loss nan"):
        Step(stage)(2.0**10, images=NO_NUMBER)


@pytest.mark.parametrize("amp, scale", [(torch.float16, 2.0**10), (torch.bfloat16, 1), (None, 1)])
@pytest.mark.parametrize("stage", WITH_AMP[len(RAISING) :])
def test_later_a_gradient_that_is_no_number_is_skipped(stage, amp, scale, group, capsys):
    step = Step(stage)
    assert step(scale, images=NO_NUMBER, amp=amp)[:2] == (0, 0)
    assert (
        f"step 1: skipped, gradient not finite, loss scale {scale:g}\n" in capsys.readouterr().out
    )
    moved, steps, _ = step(scale, amp=amp)
    assert moved > 0.1 and steps == 1
