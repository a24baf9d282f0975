"""Checks ddp.py: the weights at the start, then what three training steps send."""

import torch
from torch import nn

from exercises.checks import RANKS
from exercises.checks import Recording
from exercises.checks import difference

SOLVED = (
    "In its first backward pass, torch's DistributedDataParallel also finds out in "
    "which order the gradients really come, and each .grad is a view of its bucket, so "
    "that nothing is copied. "
    "The class is in torch/nn/parallel/distributed.py, its buckets and hooks are in "
    "torch/csrc/distributed/c10d/reducer.cpp."
)
BUCKET_SIZE = 63  # the weights of the last two layers: exactly one bucket


def check(answer, rank):
    train(answer, rank, frozen=False)
    train(answer, rank, frozen=True)


def make_model(seed, frozen):
    """Return a model of 12 weights, 231 numbers; frozen: one of 36 in the middle is."""
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(5)]
    layers[2].weight.requires_grad = not frozen
    return Model(*layers, nn.Linear(6, 3, dtype=torch.float64))


class Model(nn.Sequential):
    """Calls its layer 3 before 2, so the gradients do not come in reverse order."""

    def forward(self, inputs):
        for number in (0, 1, 3, 2, 4, 5):
            inputs = self[number](inputs)
        return inputs


def buckets_of(weights):
    """Return how many numbers each bucket has."""
    sizes = [0]
    for weight in weights:
        if sizes[-1] >= BUCKET_SIZE:
            sizes.append(0)
        sizes[-1] += weight.numel()
    return sizes


def train(answer, rank, frozen):
    """Compare three steps with those of one process that has all batches."""
    alone, model = make_model(0, frozen), make_model(rank, frozen)
    recording = Recording()
    begun = [0]  # when the last gradient came: how many all-reduces had begun
    for weight in model.parameters():
        if weight.requires_grad:  # runs before a hook of the answer
            weight.register_post_accumulate_grad_hook(
                lambda _: begun.append(len(recording.calls))
            )
    wrapped = answer.DDP(model, bucket_size=BUCKET_SIZE)
    for name, right in alone.named_parameters():
        kind = "" if right.requires_grad else ", which is frozen,"
        assert torch.equal(model.get_parameter(name), right), (
            f"rank {rank} begins with its own weights ({name}{kind} is not that of "
            "rank 0): broadcast them from rank 0"
        )
    trained = [weight for weight in alone.parameters() if weight.requires_grad]
    for step in (1, 2, 3):
        torch.manual_seed(step)  # the same batch on all ranks
        batch = torch.randn(2 * RANKS, 6, dtype=torch.float64)
        for each in (alone, model):
            each.zero_grad(set_to_none=step < 3)
        alone(batch).square().mean().backward()
        recording.events.clear()
        with recording:
            outputs = wrapped(batch[rank::RANKS])
            in_forward = len(recording.calls)
            assert difference(outputs, alone(batch[rank::RANKS])) < 1e-12, (
                "forward() does not return what the module does"
            )
            backward(outputs)
            in_backward = [*recording.events]
            wrapped.finish()
        assert not in_forward, (
            f"forward() calls {recording.calls[0].name}: the ranks begin with equal "
            "weights, and equal gradients keep them equal"
        )
        judge_calls(recording, in_backward, trained, step, frozen)
        late = len(recording.calls) - begun[-1]
        assert late == 1, (
            f"{late} all-reduces begin after the last gradient, not 1: each begins as "
            "soon as the gradients of its bucket are there"
        )
        judge_gradients(model, alone, step)


def backward(outputs):
    """Call backward(), and say more if a hook finds no gradient."""
    try:
        outputs.square().mean().backward()
    except (AttributeError, TypeError) as error:
        if "NoneType" in str(error):
            error.args = (f"{error}: a gradient of this bucket is not there yet",)
        raise


def judge_calls(recording, in_backward, trained, step, frozen):
    """Assert that a step called what it should, and when it should."""
    sizes = [call.numel for call in recording.of("all_reduce")]
    others = {call.name for call in recording.calls} - {"all_reduce"}
    right = buckets_of(trained[::-1])
    assert not others, (
        f"a step calls {others.pop()}: one all-reduce for each bucket is enough"
    )
    assert step == 1 or len(sizes) >= len(right), (
        f"step {step} has {len(sizes)} all-reduces, not {len(right)}: does each bucket "
        "count its gradients from the beginning again?"
    )
    assert not frozen or sizes == right, (
        f"with a frozen weight, the buckets have {sizes} numbers, and not {right}: is "
        "it in one, which then waits for its gradient?"
    )
    assert sizes, "there is no all-reduce: do the hooks count the gradients?"
    assert any(event.name == "all_reduce" for event in in_backward), (
        "nothing is sent before finish(): the hooks begin the all-reduces, during "
        "backward()"
    )
    assert all(event.name != "wait" for event in in_backward), (
        "backward() waits for an all-reduce: begin it with async_op=True, and wait in "
        "finish()"
    )
    assert len(sizes) < len(trained), (
        f"{len(sizes)} all-reduces for {len(trained)} weights: there are no buckets"
    )
    assert sizes != buckets_of(trained)[::-1], (
        f"buckets of {sizes} numbers begin with the first weights, whose gradients "
        "come last: take the weights in reverse"
    )
    assert sizes == right, (
        f"the buckets have {sizes} numbers, and not {right}: the next one begins as "
        f"soon as one has at least {BUCKET_SIZE}"
    )
    assert all(call.bytes == 8 * call.numel for call in recording.calls), (
        "the numbers are not sent with the gradient's dtype, float64"
    )
    waits = len(recording.events) - len(sizes)
    assert waits >= len(sizes), (
        f"step {step} waits for {waits} of its {len(sizes)} all-reduces: finish() has "
        "to call wait() of each"
    )
    assert waits == len(sizes), (
        f"step {step} waits {waits} times for {len(sizes)} all-reduces: is the list of "
        "those that are pending emptied?"
    )


def judge_gradients(model, alone, step):
    """Assert that the gradients are the means, as those of one process are."""
    for name, weight in alone.named_parameters():
        ours, right = model.get_parameter(name).grad, weight.grad
        if right is None:
            assert ours is None, f"the frozen weight {name} has got a gradient"
            continue
        assert ours is not None, f"step {step}: {name} has no gradient after finish()"
        assert difference(ours, RANKS * right) > 1e-12, (
            f"the gradient is the sum over the {RANKS} ranks: divide by their number"
        )
        assert difference(ours, right / RANKS) > 1e-12, (
            f"step {step}: the gradient of {name} is {RANKS} times too small: is it "
            "divided by the number of ranks twice?"
        )
        off = difference(ours, right)
        assert off < 1e-12, f"step {step}: the gradient of {name} is off by {off:.0e}"
