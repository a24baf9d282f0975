"""Checks ddp.py: the weights at the start, then what three training steps send."""

import torch
import torch.distributed as dist
from torch import nn

from exercises.checks import Recording
from exercises.checks import check_calls
from exercises.checks import check_close
from exercises.checks import check_waits

BUCKET_SIZE = 84  # of 231: the second bucket has exactly so many, the last has half


def check(answer, rank):
    for frozen in (False, True):
        train(answer, rank, dist.get_world_size(), frozen)


class Model(nn.Module):
    """Has 12 weights, 231 numbers, and takes two inputs.

    It calls its layer 3 before 2, so the gradients do not come in reverse order. With
    `frozen`, a weight of 36 numbers in the middle is.
    """

    def __init__(self, seed, frozen):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, size) for size in (6, 6, 6, 6, 6, 3))
        self.layers[2].weight.requires_grad = not frozen

    def forward(self, one, other):
        x = one + other
        for number in (0, 1, 3, 2, 4, 5):
            x = self.layers[number](x)
        return x


def buckets_of(weights):
    """Return how many numbers each bucket has."""
    sizes = [0]
    for weight in weights:
        if sizes[-1] >= BUCKET_SIZE:
            sizes.append(0)
        sizes[-1] += weight.numel()
    return sizes


def train(answer, rank, n, frozen):
    """Compare three steps with those of one process that has all batches."""
    alone, model = Model(0, frozen), Model(rank, frozen)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    recording = Recording()
    begun = []  # when each gradient came: how many all-reduces had begun
    for weight in trained:  # these hooks run before those of the answer
        weight.register_post_accumulate_grad_hook(
            lambda _: begun.append(len(recording.calls))
        )
    wrapped = answer.DDP(model, bucket_size=BUCKET_SIZE)
    for name, right in alone.named_parameters():
        assert torch.equal(model.get_parameter(name), right), (
            f"it begins with its own weights ({name} is not that of rank 0): broadcast"
            " all of them from rank 0, also those that are frozen"
        )
    buckets = [("all_reduce", size) for size in buckets_of(trained[::-1])]
    for step in (1, 2, 3):
        torch.manual_seed(step)  # the same batch on all ranks
        batch = torch.randn(2, 2 * n, 6)
        own = batch[:, rank::n]
        for each in (alone, model):
            each.zero_grad(set_to_none=step < 3)
        alone(*batch).square().mean().backward()
        recording.events.clear()
        with recording:
            outputs = wrapped(*own)
            check_calls("forward()", recording, [])
            check_close("what forward() returns", outputs, alone(*own))
            outputs.square().mean().backward()
            in_backward = [event.name for event in recording.events]
            wrapped.finish()
        check_when(recording, in_backward, begun[-1])
        check_calls(
            f"step {step}{' with a frozen weight' * frozen}",
            recording,
            buckets,
            ": take the weights that are trained in reverse, begin the next bucket as"
            f" soon as one has at least {BUCKET_SIZE}, count anew in each step",
        )
        check_waits("finish()", recording, " of this step")
        for name, weight in alone.named_parameters():
            what = f"step {step}: the gradient of {name}"
            ours = model.get_parameter(name).grad
            if weight.grad is None:
                assert ours is None, f"{what}, which is frozen, is not None"
            else:
                check_close(what, ours, weight.grad, ", of the mean over the ranks")


def check_when(recording, in_backward, begun):
    """Assert that the all-reduces begin in time; begun: before the last gradient."""
    calls = len(recording.calls)
    assert not calls or "all_reduce" in in_backward, (
        "nothing is sent before finish(): the hooks begin the all-reduces, during "
        "backward()"
    )
    assert "wait" not in in_backward, (
        "backward() waits for an all-reduce: begin it with async_op=True, and wait in "
        "finish()"
    )
    assert calls - begun <= 1, (
        f"{calls - begun} all-reduces begin after the last gradient, not 1: each begins"
        " as soon as the gradients of its bucket are there"
    )
