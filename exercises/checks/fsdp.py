"""Checks fsdp.py: gradients against one process, collectives, and what is held."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from exercises.checks import Recording
from exercises.checks import check_calls
from exercises.checks import check_close
from exercises.checks import check_piece
from exercises.checks import vector_of

SIZES = (12, 14, 15)  # of each block, the weights have 2 * 9 * SIZE numbers
SMALL = 100  # on three ranks, a piece has no more numbers; each weight has
# How often gloo gets a millisecond: its threads forget a tensor after wait() returns.
# On a busy machine, so many sleeps take longer.
TIMES = 3000


def check(answer, rank):
    n = dist.get_world_size()
    alone, blocks = make_blocks(), make_blocks()
    holding = Holding([*blocks.parameters()])
    sizes = [len(vector_of(block.parameters())) for block in blocks]
    probes = [Probe(holding, size) for size in sizes]
    for block, probe in zip(blocks, probes, strict=True):
        block.insert(1, probe)
    with holding:
        model = nn.Sequential(*map(answer.Sharded, blocks))
    for sharded, block in zip(model, alone, strict=True):
        found = [*sharded.parameters()]
        assert len(found) == 1, (
            f"the module has {len(found)} parameters, not one, its piece"
        )
        right = vector_of(block.parameters()).chunk(n)[rank]
        check_piece("the piece", found[0], right)
    holding.check_nothing("before the first forward pass")
    gathers = [("all_gather", size // n) for size in sizes]
    pairs = [*zip(gathers, [("reduce_scatter", size) for size in sizes], strict=True)]
    for step in (1, 2, 3):  # the gradients of 2 are added to those of 1
        torch.manual_seed(step)
        batch = torch.randn(2 * n, 9)  # of all ranks
        right = alone(batch)
        right.square().mean().backward()
        with holding:
            outputs = model(batch[rank::n])
        check_close("what forward() returns", outputs, right[rank::n])
        check_calls("the forward pass", holding, gathers)
        holding.check_nothing("after the forward pass")
        dist.barrier()
        with holding:
            outputs.square().mean().backward()
        del outputs
        check_calls("the backward pass", holding, [*sum(pairs[::-1], ())])
        for sharded, block in zip(model, alone, strict=True):
            right = vector_of(each.grad for each in block.parameters()).chunk(n)[rank]
            (piece,) = sharded.parameters()
            what = f"step {step}: the gradient of the piece"
            check_close(what, piece.grad, right, ": the mean, added to the .grad there")
        holding.check_nothing("after the backward pass")
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
    with holding, torch.no_grad():
        outputs = model(batch[rank::n])
    check_close(
        "what forward() returns, under no_grad()", outputs, alone(batch)[rank::n]
    )
    holding.check_nothing("after a forward pass under no_grad()")


def make_blocks():
    torch.manual_seed(0)
    layers = [(nn.Linear(9, size), nn.Tanh(), nn.Linear(size, 9)) for size in SIZES]
    return nn.Sequential(*(nn.Sequential(*each) for each in layers))


class Holding(Recording):
    """Knows which large tensors are in memory: weights, and results of operations.

    Only on three ranks, where pieces are smaller than weights.
    """

    def __init__(self, weights):
        super().__init__()
        self.counts, self.storages = dist.get_world_size() == 3, {}
        for weight in weights:
            self.remember(weight)

    def __enter__(self):
        self.events.clear()
        return super().__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        self.works.clear()  # they keep their tensors
        for each in filter(torch.is_tensor, tree_leaves(result)):
            self.remember(each)
        return result

    def remember(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = StorageWeakRef(storage)

    def held(self, limit):
        """Return how many numbers all large tensors have that are in memory now.

        limit: what is right; as long as it is more, gloo gets some time to forget
        """
        for _ in range(TIMES if self.counts else 0):
            if (found := self.held_now()) <= limit:
                return found
            time.sleep(0.001)
        return self.held_now() if self.counts else 0

    def held_now(self):
        sizes = []
        for weak in self.storages.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                sizes.append(storage.nbytes() // 8)
        return sum(size for size in sizes if size > SMALL)

    def check_nothing(self, when):
        found = self.held(0)
        assert not found, (
            f"{when} it holds {found} numbers of whole weights or gradients: resize the"
            " storages of the weights to 0, and set their .grad to None"
        )


class Probe(nn.Module):
    """Returns its input; counts its calls, and what is held in both passes."""

    def __init__(self, holding, numbers):
        super().__init__()
        self.holding, self.numbers = holding, numbers
        self.register_buffer("calls", torch.zeros(()))

    def check(self, way, times):
        found = self.holding.held(times * self.numbers)
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
