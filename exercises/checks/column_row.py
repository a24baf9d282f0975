"""Checks column_row.py: two layers on three ranks against one process, in float64."""

import copy
import gc
import weakref

import torch

# backward() with a gradient needs it; otherwise each rank imports it, in seconds
import torch.fx.experimental.symbolic_shapes
from torch import nn

from exercises.checks import RANKS
from exercises.checks import Recording
from exercises.checks import difference
from exercises.checks import on_all_ranks

SOLVED = (
    "Torch's ColwiseParallel and RowwiseParallel, in torch.distributed.tensor.parallel,"
    " get the same sums from the placements of DTensors, which also carry them through"
    " all other operations and into checkpoints. With SequenceParallel, the all-reduce"
    " becomes a reduce-scatter and a later all-gather: between the layers a rank then"
    " keeps only its part of the activations, too."
)
BATCH, INPUTS, UNITS, OUTPUTS = 4, 5, 10, 7  # 10 units: 4, 3 and 3 of them


def check(answer, rank):
    on_all_ranks(check_copy, answer.Copy, rank)
    on_all_ranks(check_sum, answer.Sum, rank)
    torch.manual_seed(1)
    first, second = (
        nn.Linear(*sizes, dtype=torch.float64)
        for sizes in ((INPUTS, UNITS), (UNITS, OUTPUTS))
    )
    column, row = answer.Column(first), answer.Row(second)
    on_all_ranks(check_parts, column, first, 0, rank)
    on_all_ranks(check_parts, row, second, 1, rank)
    x = torch.randn(BATCH, INPUTS, dtype=torch.float64, requires_grad=True)
    target = torch.randn(BATCH, OUTPUTS, dtype=torch.float64)
    right = second(nn.functional.gelu(first(x)))
    (right - target).square().sum().backward()
    expected, x.grad = x.grad, None
    with Recording() as forward:
        units = column(x)
        y = row(nn.functional.gelu(units))
    on_all_ranks(check_forward, units, y, first(x), right, second, rank)
    on_all_ranks(check_calls, forward, "forward", "y", BATCH * OUTPUTS)
    with Recording() as backward:
        (y - target).square().sum().backward()
    on_all_ranks(check_gradients, column, first, row, second, x.grad, expected, rank)
    on_all_ranks(check_calls, backward, "backward", "x", BATCH * INPUTS)


def numbers_of(rank):
    """Return some numbers of a rank, and their sum over the ranks."""
    ranks = torch.arange(RANKS, dtype=torch.float64)
    numbers = torch.tensor([[1.0, 3.0], [10.0, 7.0]], dtype=torch.float64)
    return numbers * (rank + 1), numbers * (ranks + 1).sum()


def check_copy(answers, rank):
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    other = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    gradient, total = numbers_of(rank)
    # both terms are given the same gradient, also in memory; the second one later
    given, same, output = gradient.clone(), 1 * other, answers.apply(x)
    assert difference(output, x.detach()) == 0, "Copy's output is not its input"
    (output + same).backward(given)
    assert x.grad is not None, "no gradient comes through Copy"
    assert difference(other.grad, gradient) == 0, (
        "Copy's backward() sums into the gradient that it is given, and others use it,"
        " too: clone it first"
    )
    assert difference(x.grad, gradient) > 0, (
        "Copy's backward() returns this rank's gradient, not the sum over the ranks"
    )
    assert difference(x.grad, total / RANKS) > 1e-9, (
        "Copy's backward() returns the mean of the ranks' gradients, not their sum"
    )
    assert difference(x.grad, total) < 1e-9, (
        "Copy's backward() does not return the sum of the ranks' gradients"
    )


def check_sum(add, rank):
    numbers, total = numbers_of(rank)
    part = numbers.clone().requires_grad_()
    output = add.apply(part)
    assert difference(part.detach(), numbers) == 0, (
        "Sum's forward() changes the tensor that it is given: clone it first"
    )
    assert difference(output, total / RANKS) > 1e-9, (
        "Sum's forward() returns the mean over the ranks, not the sum"
    )
    assert difference(output, total) < 1e-9, (
        "Sum's forward() does not return the sum of the ranks' inputs"
    )
    gradient = torch.ones(2, 2, dtype=torch.float64)
    output.backward(gradient)
    assert part.grad is not None, "no gradient comes through Sum"
    assert difference(part.grad, RANKS * gradient) > 1e-9, (
        "Sum's backward() sums the gradients: each rank has the whole one already, and"
        f" gets {RANKS} times as much"
    )
    assert difference(part.grad, gradient) < 1e-9, (
        "Sum's backward() does not return the gradient that it is given"
    )


def check_parts(layer, linear, dim, rank):
    """Compare what a rank holds of a layer; dim: along which its weight is divided."""
    kind = "Row" if dim else "Column"
    names = [name for name, _ in layer.named_parameters()]
    assert sorted(names) == ["bias", "weight"], (
        f"{kind}'s parameters are {', '.join(names) or 'none'}, not weight and bias"
    )
    whole = linear.bias.detach()
    wanted = {
        "weight": linear.weight.detach().tensor_split(RANKS, dim)[rank],
        "bias": whole if dim else whole.tensor_split(RANKS)[rank],
    }
    hint = ": is it that of tensor_split() along the units?"
    for name, right in wanted.items():
        found = getattr(layer, name).detach()
        assert found.shape == right.shape, (
            f"{kind}.{name} is {[*found.shape]} on rank {rank}, not {[*right.shape]}"
            f"{hint if right.shape != whole.shape else ''}"
        )
        assert difference(found, right) == 0, (
            f"{kind}.{name} on rank {rank} has not the numbers of its part of the layer"
        )
        held = found.untyped_storage().nbytes() // found.element_size()
        assert held == right.numel(), (
            f"{kind}.{name} on rank {rank} keeps {held} numbers in memory, and uses"
            f" {right.numel()}: clone the part"
        )
        at = getattr(linear, name).untyped_storage().data_ptr()
        assert found.untyped_storage().data_ptr() != at, (
            f"{kind}.{name} is in the memory of the layer that was given: copy it"
        )
    given = copy.deepcopy(linear)
    weight, other = weakref.ref(given.weight), type(layer)(given)
    del given
    gc.collect()
    assert weight() is None, (
        f"{type(other).__name__} keeps the whole layer that it was given: rank {rank}"
        " needs its part only"
    )


def check_forward(units, y, right_units, right, second, rank):
    part = right_units.detach().tensor_split(RANKS, 1)[rank]
    assert units.shape == part.shape, (
        f"Column returns {[*units.shape]} on rank {rank}, not its units {[*part.shape]}"
    )
    assert difference(units.detach(), part) < 1e-12, (
        f"Column's units on rank {rank} are not those of the layer"
    )
    nodes, names = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [each for each, _ in node.next_functions if each]
    assert "SumBackward" in names, (
        "y does not go through Sum: autograd does not know what dist.all_reduce does"
    )
    y, right, bias = y.detach(), right.detach(), second.bias.detach()
    assert difference(y, right + (RANKS - 1) * bias) > 1e-9, (
        f"Row adds the bias on each rank, before the sum: y has it {RANKS} times"
    )
    assert difference(y, right - bias) > 1e-9, "Row does not add its bias"
    assert difference(y, right) < 1e-12, (
        f"y on rank {rank} differs from one process's by {difference(y, right):.0e}"
    )


def check_calls(recording, way, name, numbers):
    others = {call.name for call in recording.calls} - {"all_reduce"}
    assert not others, f"the {way} pass calls {' and '.join(sorted(others))}"
    found = [call.numel for call in recording.calls]
    assert found == [numbers], (
        f"the {way} pass has all-reduces of {found} numbers, not one of {numbers}, the"
        f" size of {name}"
    )


def check_gradients(column, first, row, second, found, expected, rank):
    """Compare the gradients of x, and of the four parts with those of the layers."""
    assert found is not None, "x gets no gradient: does it go through Copy?"
    off = difference(found, expected)
    assert off < 1e-12, (
        f"x's gradient on rank {rank} differs from one process's by {off:.0e}: it is a"
        " sum over all ranks' units, so it goes through Copy, once"
    )
    for kind, layer, linear in (("Column", column, first), ("Row", row, second)):
        for name, weight in linear.named_parameters():
            right = weight.grad
            if kind == "Column" or name == "weight":
                right = right.tensor_split(RANKS, 0 if kind == "Column" else 1)[rank]
            ours = getattr(layer, name).grad
            bias = (
                ": each rank has the whole bias, and gets its whole gradient. Is it in"
                " the output once, on each rank?"
            )
            hint = bias if (kind, name) == ("Row", "bias") else ""
            assert ours is not None, (
                f"{kind}.{name} gets no gradient on rank {rank}{hint}"
            )
            assert difference(ours, RANKS * right) > 1e-9, (
                f"{kind}.{name} gets {RANKS} times its gradient"
            )
            off = difference(ours, right)
            assert off < 1e-12, (
                f"{kind}.{name}'s gradient on rank {rank} differs from one process's by"
                f" {off:.0e}{hint}"
            )
