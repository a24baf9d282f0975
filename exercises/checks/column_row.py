"""Checks column_row.py: two layers divided among the ranks against one process."""

import torch
import torch.distributed as dist

# backward() with a gradient needs it; otherwise each rank imports it, in seconds
import torch.fx.experimental.symbolic_shapes
from torch import nn

from exercises.checks import Recording
from exercises.checks import check_calls
from exercises.checks import check_close
from exercises.checks import check_piece
from exercises.checks import is_close
from exercises.checks import numbers_in
from exercises.checks import tensors_of_object

BATCH, INPUTS, UNITS, OUTPUTS = 4, 5, 10, 7  # 10 units: on three ranks 4, 3 and 3


def check(answer, rank):
    n = dist.get_world_size()
    numbers = torch.tensor([[1.0, 3.0], [10.0, 7.0]])
    mine, total = numbers * (rank + 1), numbers * sum(range(1, n + 1))
    check_copy(answer.Copy, mine, total)
    dist.barrier()
    check_sum(answer.Sum, mine, total)
    dist.barrier()
    torch.manual_seed(1)
    first, second = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, OUTPUTS)
    column, row = answer.Column(first), answer.Row(second)
    check_parts(column, first, 0, rank, n)
    check_parts(row, second, 1, rank, n)
    dist.barrier()
    x = torch.randn(BATCH, INPUTS, requires_grad=True)
    target = torch.randn(BATCH, OUTPUTS)
    right = second(nn.functional.gelu(first(x)))
    (right - target).square().sum().backward()
    expected, x.grad = x.grad, None
    with Recording() as forward:
        units = column(x)
        y = row(nn.functional.gelu(units))
    check_close("Column's output", units, first(x).tensor_split(n, 1)[rank])
    assert not is_close(y, right + (n - 1) * second.bias), (
        f"Row adds the bias on each rank, before the sum: y has it {n} times"
    )
    assert not is_close(y, right - second.bias), "Row does not add its bias"
    check_close("y", y, right)
    check_calls("the forward pass", forward, [("all_reduce", y.numel())])
    dist.barrier()
    with Recording() as backward:
        (y - target).square().sum().backward()
    hint = ": it is a sum over all ranks' units, so x goes through Copy, once"
    check_close("x's gradient", x.grad, expected, hint)
    check_calls("the backward pass", backward, [("all_reduce", x.numel())])
    for kind, layer, linear in (("Column", column, first), ("Row", row, second)):
        for name, right in parts_of(linear, "grad", kind == "Row", rank, n).items():
            hint = ": does y go through Sum, and has it the bias once, on each rank?"
            ours = getattr(layer, name).grad
            check_close(f"the gradient of {kind}.{name}", ours, right, hint)


def check_copy(answers, mine, total):
    x, other = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
    # both terms are given the same gradient, also in memory; the second one later
    same, output = 1 * other, answers.apply(x)
    check_close("Copy's output", output, x)
    (output + same).backward(mine.clone())
    hint = ": Copy's backward() sums into the tensor that it is given: clone it first"
    check_close(
        "the gradient of what is added to Copy's output", other.grad, mine, hint
    )
    check_close("what comes through Copy's backward()", x.grad, total)


def check_sum(add, mine, total):
    part = mine.clone().requires_grad_()
    output = add.apply(part)
    hint = ": Sum's forward() changes what it is given: clone it first"
    check_close("Sum's input", part, mine, hint)
    check_close("Sum's output", output, total)
    output.backward(mine)
    hint = ": each rank is given the whole one already"
    check_close("what comes through Sum's backward()", part.grad, mine, hint)


def parts_of(linear, attribute, is_row, rank, n):
    """Return {name: a rank's part} of a layer's weights, or of their gradients."""
    weight, bias = (
        each.detach() if attribute == "data" else each.grad
        for each in (linear.weight, linear.bias)
    )
    parts = {"weight": weight.tensor_split(n, int(is_row))[rank]}
    return parts | {"bias": bias if is_row else bias.tensor_split(n)[rank]}


def check_parts(layer, linear, dim, rank, n):
    """Compare what a rank holds of a layer; dim: along which its weight is divided."""
    kind = type(layer).__name__
    wanted = parts_of(linear, "data", dim, rank, n)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {*wanted}, f"{kind}'s parameters are {names}, not weight and bias"
    for name, right in wanted.items():
        found = getattr(layer, name)
        check_piece(
            f"{kind}.{name}", found, right, ": by tensor_split() along the units"
        )
    found = numbers_in(tensors_of_object(layer))
    numbers = sum(right.numel() for right in wanted.values())
    assert found == numbers, (
        f"{kind} holds {found} numbers, and its part has {numbers}: it needs nothing"
        " else of the layer that it was given"
    )
