"""Checks accumulate.py: the gradients against one process, and what is sent when."""

import torch
import torch._dynamo  # DDP imports it, which takes each rank seconds, in its first step
import torch.distributed as dist
from torch import nn

from exercises.checks import RANKS
from exercises.checks import Recording
from exercises.checks import difference

SOLVED = (
    "FSDP2 has set_requires_gradient_sync(False) in place of no_sync: its gradients "
    "then stay whole, so that a rank needs the memory for all of them. "
    "no_sync stands in torch/nn/parallel/distributed.py, where forward() passes on to "
    "torch/csrc/distributed/c10d/reducer.cpp whether this backward pass will send."
)
# How many samples each rank's micro-batches have, in each step.
STEPS = [
    ([2, 2], [2, 2], [2, 2]),
    ([4, 4, 1], [3, 4], [2]),
    ([1], [4, 2, 4, 4], [4, 3]),
]


def check(answer, rank):
    alone, model = make_model(), make_model()
    ddp = nn.parallel.DistributedDataParallel(model)
    events = note_passes(model)
    for step, sizes in enumerate(STEPS, start=1):
        batches = make_batches(step, sizes)
        model.zero_grad()
        events.clear()
        with Recording() as recording:
            answer.accumulate_gradients(ddp, [*batches[rank]])
        judge_passes(events, sizes[rank], rank)
        judge_calls(recording, model, rank, step)
        judge_gradients(model, alone, batches, rank, step)


def make_model():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 4, dtype=torch.float64))


def make_batches(step, sizes):
    """Return the micro-batches of all ranks, the same on each."""
    generator = torch.Generator().manual_seed(step)

    def batch(size):
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(4, (size,), generator=generator)

    return [[batch(size) for size in some] for some in sizes]


def note_passes(model):
    """Return a list to which each forward pass adds its size, each backward pass 0."""
    events = []

    def forward(_, inputs, outputs):
        events.append(len(inputs[0]))
        if outputs.requires_grad:
            outputs.register_hook(lambda _: events.append(0))

    model.register_forward_hook(forward)
    return events


def judge_passes(events, sizes, rank):
    """Assert that one micro-batch follows the other."""
    forward = [size for size in events if size]
    assert forward == sizes, (
        f"on rank {rank}, the forward passes have {forward} samples, and not {sizes}"
    )
    assert events.count(0) == len(sizes), (
        f"on rank {rank}, there are {events.count(0)} backward passes for {len(sizes)} "
        "micro-batches"
    )
    assert events == [number for size in sizes for number in (size, 0)], (
        "a forward pass comes before the backward pass of the one before it: the "
        "activations of both are in memory"
    )


def judge_calls(recording, model, rank, step):
    """Assert that each gradient was all-reduced once, and little else."""
    # In its second step DDP broadcasts in which order it will take the gradients.
    others = {call.name for call in recording.calls} - {"all_reduce", "broadcast"}
    assert not others, (
        f"{others.pop()} is called: for the number of samples, an all-reduce is enough"
    )
    weights = sum(weight.numel() for weight in model.parameters())
    sums = [call for call in recording.of("all_reduce") if call.numel < weights]
    times = len(recording.of("all_reduce")) - len(sums)
    assert times, (
        f"step {step}, rank {rank}: the gradients are not all-reduced. The last micro-"
        "batch is not in no_sync()"
    )
    assert times == 1, (
        f"step {step}, rank {rank}: the gradients are all-reduced {times} times. All "
        "micro-batches except the last are in no_sync(), with their forward pass"
    )
    assert len(sums) <= 1 and all(call.numel == 1 for call in sums), (
        f"step {step}: besides the gradients, there are {len(sums)} all-reduces, of "
        f"{[call.numel for call in sums]} numbers: one of one number is enough"
    )


def judge_gradients(model, alone, batches, rank, step):
    """Assert that the gradients are right, and name the mistake if they are known."""
    sums = [[gradient_of_sum(alone, *batch) for batch in some] for some in batches]
    sizes = [[len(targets) for _, targets in some] for some in batches]
    pairs = [*zip(sums, sizes, strict=True)]  # of each rank
    means = [[g / n for g, n in zip(*pair, strict=True)] for pair in pairs]
    whole = sum(map(sum, sums))
    right = whole / sum(map(sum, sizes))
    wrong = {
        f"{RANKS} times too small: DDP also divides by the number of ranks": right
        / RANKS,
        f"{RANKS} times too large": RANKS * right,
        "a mean over the ranks, as if each had the same number of samples: divide by "
        "that of all": sum(sum(some) / sum(n) for some, n in pairs) / RANKS,
        "a mean of means of the micro-batches, as if all had the same number of "
        "samples: divide sums by that of all": (
            sum(sum(some) / len(some) for some in means) / RANKS
        ),
        "a sum of means of the micro-batches": sum(map(sum, means)) / RANKS,
        "a sum over the samples: divide by the number of all": whole / RANKS,
    }
    grads = [weight.grad for weight in model.parameters()]
    assert all(grad is not None for grad in grads), f"rank {rank} has no gradients"
    ours = torch.cat([grad.flatten() for grad in grads])
    for mistake, value in wrong.items():
        assert difference(ours, value) > 1e-12 or difference(value, right) < 1e-12, (
            f"step {step}: the gradient is {mistake}"
        )
    of_ranks = [torch.empty_like(ours) for _ in range(RANKS)]
    dist.all_gather(of_ranks, ours)
    assert all(difference(ours, each) < 1e-12 for each in of_ranks), (
        f"step {step}: the ranks have different gradients: what was added, or changed, "
        "after the all-reduce?"
    )
    off = difference(ours, right)
    assert off < 1e-12, (
        f"step {step}, rank {rank}: the gradient is off by {off:.0e}: is something "
        "left out, or multiplied more than once?"
    )


def gradient_of_sum(model, inputs, targets):
    """Return the gradient of the sum of the losses, as one vector."""
    loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
    grads = torch.autograd.grad(loss, [*model.parameters()])
    return torch.cat([grad.flatten() for grad in grads])
