"""Checks evaluate.py: both metrics against one process, and what is sent."""

import torch
from torch import nn

from exercises.checks import RANKS
from exercises.checks import Recording

SOLVED = (
    "Libraries such as torchmetrics keep sums like these for each metric; for a metric "
    "that is no mean over samples, such as AUROC, they gather the outputs of all. "
    "Torch has no function for it, only dist.all_reduce, in "
    "torch/distributed/distributed_c10d.py, whose argument op can be SUM, MIN or MAX: "
    "what cannot be made of these, such as a median, has to be gathered."
)
# How many samples are in each rank's batches: as many batches on all, then others.
SHARDS = [([4, 1], [4, 2], [3, 3]), ([4, 4, 1], [4, 2], []), ([], [3], [4, 4, 4, 1])]


def check(answer, rank):
    for sizes, training in zip(SHARDS, (True, False, True), strict=True):
        evaluate(answer, rank, sizes, training)


class Model(nn.Module):
    """A linear layer after dropout; keeps how each forward pass was made."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4, dtype=torch.float64)
        self.dropout, self.passes = nn.Dropout(), []

    def forward(self, inputs):
        self.passes.append((len(inputs), self.training, torch.is_grad_enabled()))
        return self.layer(self.dropout(inputs))


def evaluate(answer, rank, sizes, training):
    """Compare the metrics with those of one process that has all samples."""
    shards, model = make_shards(sizes), Model().train(training)
    empty = "" if sizes[rank] else ", whose shard is empty,"
    with Recording() as recording:
        try:
            found = answer.evaluate(model, [*shards[rank]])
        except ZeroDivisionError:
            assert recording.calls, (
                f"rank {rank}{empty} calls no all-reduce, and then divides by 0"
            )
            raise
    passes = [size for size, _, _ in model.passes]
    assert passes == sizes[rank], (
        f"on rank {rank}, the model has got batches of {passes}, and not {sizes[rank]}"
    )
    for _, was_training, grad_enabled in model.passes:
        assert not was_training, (
            "the model is in training mode, with dropout: call eval()"
        )
        assert not grad_enabled, "activations are kept: evaluate under torch.no_grad()"
    modes = {True: "training", False: "evaluation"}
    assert model.training == training, (
        f"the model came in {modes[training]} mode, and is given back in "
        f"{modes[model.training]} mode: note model.training before eval()"
    )
    assert isinstance(found, tuple) and len(found) == 2, (
        f"rank {rank}{empty} returns {type(found).__name__}, and not loss and accuracy"
    )
    for value in found:
        kind = type(value).__name__
        assert kind == "float", f"rank {rank}{empty} returns a {kind}, and not a float"
    judge_calls(recording, rank, empty)
    judge_metrics(found, model, shards, rank)


def make_shards(sizes):
    """Return the batches of all ranks, the same on each."""
    generator = torch.Generator().manual_seed(sum(sizes[0]))

    def batch(size):
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(4, (size,), generator=generator)

    return [[batch(size) for size in shard] for shard in sizes]


def judge_calls(recording, rank, empty):
    """Assert that there was one all-reduce, and of little."""
    others = {call.name for call in recording.calls} - {"all_reduce"}
    assert not others, f"{others.pop()} is called: one all-reduce of sums is enough"
    calls = len(recording.calls)
    assert calls, f"rank {rank}{empty} calls no all-reduce"
    assert calls == 1, (
        f"{calls} all-reduces: put the sums into one tensor, and reduce that after the "
        "loop"
    )
    call = recording.calls[0]
    assert call.numel <= 4, f"{call.numel} numbers are all-reduced: three sums suffice"
    assert call.bytes == 8 * call.numel, (
        "the sums are not in float64: in float32, a sum stops counting at 16777216"
    )


def judge_metrics(found, model, shards, rank):
    """Assert that the metrics are exact, and name the mistake if they are known."""
    model.eval()
    losses, corrects = [], []  # a list for each rank, of a tensor for each batch
    with torch.no_grad():
        for shard in shards:
            outputs = [(model.layer(inputs), targets) for inputs, targets in shard]
            losses.append([cross_entropy(*each) for each in outputs])
            corrects.append(
                [(out.argmax(1) == right).double() for out, right in outputs]
            )
    for name, ours, values in zip(
        ("loss", "accuracy"), found, (losses, corrects), strict=True
    ):
        batches = [batch for shard in values for batch in shard]
        samples = torch.cat(batches)
        right = samples.mean()
        means = [torch.cat(shard).mean() for shard in values if shard]
        wrong = {
            "the sum over all samples, and not their mean": samples.sum(),
            "that of this rank's shard alone": local_mean(values[rank]),
            "the sum of the batches' means, divided by the number of samples": sum(
                batch.mean() for batch in batches
            )
            / len(samples),
            "the mean of the means of the batches, so that small batches count more": (
                torch.stack([batch.mean() for batch in batches]).mean()
            ),
            "the mean of the means of the ranks that have samples, so that a small "
            "shard counts more": torch.stack(means).mean(),
            "the mean over the ranks, one of which has no sample": sum(means) / RANKS,
            "a percentage": 100 * right,
            f"{RANKS} times too large: divide by the samples of all ranks": RANKS
            * right,
        }
        for mistake, value in wrong.items():
            assert differ(ours, value) or not differ(value, right), (
                f"rank {rank}: the {name} is {mistake}"
            )
        close = abs(ours - right) < 1e-6
        hint = ", about as exact as float32: are all sums float64?" if close else ""
        assert not differ(ours, right), (
            f"rank {rank}: the {name} is {ours:.8f}, and not {right:.8f}{hint}"
        )


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def local_mean(shard):
    return torch.cat(shard).mean() if shard else torch.tensor(torch.nan)


def differ(one, two):
    return not abs(one - two) < 1e-12
