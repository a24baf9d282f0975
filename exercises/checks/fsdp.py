"""Checks fsdp.py: gradients against one process, collectives, and what is held."""

import torch
import torch.distributed as dist
from torch import nn

from exercises.checks import Recording
from exercises.checks import check_calls
from exercises.checks import check_close
from exercises.checks import check_piece
from exercises.checks import numbers_in
from exercises.checks import tensors_of_object
from exercises.checks import vector_of
from harness.counting import Kept

SIZES = (12, 14, 15)  # of each block, the weights have 2 * 9 * SIZE numbers
SMALL = 100  # no activation has more numbers; each weight of a layer has


def check(answer, rank):
    n = dist.get_world_size()
    alone, blocks = make_blocks(), make_blocks()
    held = Held([*blocks.parameters()])
    sizes = [len(vector_of(block.parameters())) for block in blocks]
    probes = [Probe(held, size) for size in sizes]
    for block, probe in zip(blocks, probes, strict=True):
        block.insert(1, probe)
    model = held.model = nn.Sequential(*map(answer.Sharded, blocks))
    for sharded, block in zip(model, alone, strict=True):
        found = [*sharded.parameters()]
        assert len(found) == 1, (
            f"the module has {len(found)} parameters, not one, its piece"
        )
        right = vector_of(block.parameters()).chunk(n)[rank]
        check_piece("the piece", found[0], right)
    held.check_nothing("before the first forward pass")
    gathers = [("all_gather", size // n) for size in sizes]
    pairs = [*zip(gathers, [("reduce_scatter", size) for size in sizes], strict=True)]
    for step in (1, 2, 3):  # the gradients of 2 are added to those of 1
        torch.manual_seed(step)
        batch = torch.randn(2 * n, 9)  # of all ranks
        right = alone(batch)
        right.square().mean().backward()
        with held.kept, Recording() as forward:
            outputs = model(batch[rank::n])
        check_close("what forward() returns", outputs, right[rank::n])
        check_calls("the forward pass", forward, gathers)
        held.check_nothing("after the forward pass")
        dist.barrier()
        with Recording() as backward:
            outputs.square().mean().backward()
        held.kept.tensors.clear()
        check_calls("the backward pass", backward, [*sum(pairs[::-1], ())])
        for sharded, block in zip(model, alone, strict=True):
            right = vector_of(each.grad for each in block.parameters()).chunk(n)[rank]
            (piece,) = sharded.parameters()
            what = f"step {step}: the gradient of the piece"
            check_close(what, piece.grad, right, ": the mean, added to the .grad there")
        held.check_nothing("after the backward pass")
        dist.barrier()
        called = [int(probe.calls) for probe in probes]
        assert {*called} == {step}, (
            f"in {step} steps, the blocks are called {called} times"
        )
        with torch.no_grad():  # a step of plain SGD
            for net in (model, alone):
                for weight in net.parameters():
                    weight -= 0.1 * weight.grad
        if step == 2:
            alone.zero_grad()
            model.zero_grad()
    model.eval()
    assert not any(probe.training for probe in probes), (
        "eval() does not reach the block"
    )
    kept = [name for name in model.state_dict() if name.endswith("calls")]
    assert len(kept) == len(probes), "the block's buffers are not in state_dict()"
    with torch.no_grad():
        outputs = model(batch[rank::n])
    right = alone(batch)[rank::n]
    check_close("what forward() returns, under no_grad()", outputs, right)
    held.check_nothing("after a forward pass under no_grad()")


def make_blocks():
    torch.manual_seed(0)
    layers = [(nn.Linear(9, size), nn.Tanh(), nn.Linear(size, 9)) for size in SIZES]
    return nn.Sequential(*(nn.Sequential(*each) for each in layers))


class Held:
    """Knows which whole weights and gradients are in memory.

    Of the tensors that the modules have, of those with which the blocks came, and of
    the large ones that autograd keeps for the backward pass. model: the modules.
    """

    def __init__(self, came):
        self.came, self.model, self.kept = came, nn.Sequential(), Kept()

    def numbers(self):
        small = SMALL * torch.get_default_dtype().itemsize
        tensors = [t for t in self.kept.tensors if t.untyped_storage().nbytes() > small]
        tensors += self.came + [
            each.grad for each in self.came if each.grad is not None
        ]
        tensors += [t for t in tensors_of_object(self.model) if t.ndim]  # no buffers
        right = [*self.model.parameters()]
        right += [each.grad for each in right if each.grad is not None]
        return numbers_in(tensors, right)

    def check_nothing(self, when):
        found = self.numbers()
        assert not found, (
            f"{when} it holds {found} numbers of whole weights or gradients: resize the"
            " storages of the weights to 0, and set their .grad to None"
        )


class Probe(nn.Module):
    """Returns its input; counts its calls, and what is held in both passes."""

    def __init__(self, held, numbers):
        super().__init__()
        self.held, self.numbers = held, numbers
        self.register_buffer("calls", torch.zeros(()))

    def check(self, way, times):
        found = self.held.numbers()
        assert found <= times * self.numbers, (
            f"in the {way} pass of a block of {self.numbers} numbers, it holds {found}:"
            " of other blocks nothing is in memory, and of this one the weights once,"
            " and in the backward pass the gradients"
        )

    def forward(self, inputs):
        self.calls += 1
        self.check("forward", 1)
        return Noting.apply(inputs, self)


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, probe):
        ctx.probe = probe
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        ctx.probe.check("backward", 2)
        return gradient, None
