"""Checks fsdp.py: gradients against one process, collectives, and what is held."""

import time

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from exercises.checks import RANKS
from exercises.checks import Recording
from exercises.checks import difference
from exercises.checks import on_all_ranks

SOLVED = (
    "Torch's fully_shard gathers the next block while one computes, keeps a piece of"
    " each weight as a DTensor, so that names and checkpoints stay those of the model,"
    " and computes in bfloat16 with float32 pieces. It is in the folder"
    " torch/distributed/fsdp/_fully_shard, where _fsdp_param_group.py has unshard,"
    " reshard and the reduce-scatter."
)
SIZES = (12, 14, 15)  # of each block, the weights have 2 * 9 * SIZE numbers
SMALL = 100  # a piece has no more numbers; each weight has
BATCH = 2  # samples of a rank
# How often gloo gets a millisecond: its threads forget a tensor after wait() returns.
# On a busy machine, so many sleeps take longer.
TIMES = 3000


def check(answer, rank):
    alone, blocks = make_blocks(), make_blocks()
    weights = [list(block.parameters()) for block in blocks]
    holding = Holding(weights)
    for number, block in enumerate(blocks):
        block.insert(1, Probe(holding, number))
    with holding:
        model = nn.Sequential(*(answer.Sharded(block) for block in blocks))
    on_all_ranks(check_pieces, model, alone, rank)
    found = holding.held(0)
    assert not found, (
        f"rank {rank} holds {found} numbers of whole weights before the first forward"
        " pass, also if the block no longer has them, because others do: resize the"
        " storages of its parameters to 0 in __init__()"
    )
    for step in (1, 2, 3):  # the gradients of 2 are added to those of 1
        torch.manual_seed(step)
        batch = torch.randn(RANKS * BATCH, 9, dtype=torch.float64)  # of all ranks
        right = alone(batch)
        right.square().mean().backward()
        with holding:
            outputs = model(batch[rank::RANKS])
        on_all_ranks(check_forward, outputs, right[rank::RANKS], holding, rank)
        with holding:
            run_backward(outputs)
        del outputs
        on_all_ranks(check_backward, holding, rank)
        on_all_ranks(check_gradients, model, alone, step, rank)
        on_all_ranks(check_rest, weights, holding, rank)
        with torch.no_grad():  # a step of plain SGD
            for net in (model, alone):
                for weight in net.parameters():
                    weight -= 0.1 * weight.grad
        if step == 2:
            alone.zero_grad()
            model.zero_grad()
    with holding, torch.no_grad():
        outputs = model(batch[rank::RANKS])
    on_all_ranks(check_forward, outputs, alone(batch)[rank::RANKS], holding, rank)


def make_blocks():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(9, size), nn.Tanh(), nn.Linear(size, 9))
        for size in SIZES
    ]
    return nn.Sequential(*blocks).double()


def vector_of(block):
    return torch.cat([weight.detach().flatten() for weight in block.parameters()])


def padded(vector):
    return nn.functional.pad(vector, (0, -len(vector) % RANKS))


NUMBERS = [len(padded(vector_of(block))) for block in make_blocks()]


class Holding(Recording):
    """Knows which large tensors are in memory: weights, and results of operations.

    most: {block: numbers held in the middle of its pass} of the pass that it recorded
    """

    def __init__(self, weights):
        super().__init__()
        self.storages, self.most = {}, {}
        for weight in tree_leaves(weights):
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
        for _ in range(TIMES):
            if (found := self.held_now()) <= limit:
                break
            time.sleep(0.001)
        return found

    def held_now(self):
        sizes = []
        for weak in self.storages.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                sizes.append(storage.nbytes() // 8)
        return sum(size for size in sizes if size > SMALL)


class Probe(nn.Module):
    """Returns its input; notes what is held in the forward and the backward pass."""

    def __init__(self, holding, block):
        super().__init__()
        self.holding, self.block = holding, block

    def note(self, factor):
        limit = factor * NUMBERS[self.block]
        self.holding.most[self.block] = self.holding.held(limit)

    def forward(self, inputs):
        self.note(1)  # the weights
        return Noting.apply(inputs, self)


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, probe):
        ctx.probe = probe
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        ctx.probe.note(2)  # the weights and their gradients
        return gradient, None


def check_pieces(model, alone, rank):
    for number, (sharded, block) in enumerate(zip(model, alone, strict=True)):
        found = list(sharded.parameters())
        where = f"block {number}, rank {rank}: "
        assert len(found) == 1, (
            f"{where}the module has {len(found)} parameters, not one, its piece"
        )
        right = padded(vector_of(block)).chunk(RANKS)[rank]
        assert found[0].shape == right.shape, (
            f"{where}the piece is {[*found[0].shape]}, not {[*right.shape]}"
        )
        assert difference(found[0].detach(), right) == 0, (
            f"{where}the piece has not the numbers of piece {rank} of the weights"
        )
        held = found[0].untyped_storage().nbytes() // 8
        assert held == right.numel(), (
            f"{where}the piece is a view into a vector of {held} numbers, which stays"
            " in memory: clone it"
        )


def check_forward(outputs, right, holding, rank):
    off = difference(outputs.detach(), right.detach())
    assert off < 1e-12, (
        f"rank {rank}'s outputs are off by {off:.0e}: does each block compute with what"
        " was gathered for this pass?"
    )
    check_calls(holding, "forward", ["all_gather"] * len(SIZES), rank)
    for block, found in holding.most.items():
        assert found <= NUMBERS[block], (
            f"in the forward pass of block {block}, which has {NUMBERS[block]} numbers,"
            f" rank {rank} holds {found}: resize the storages of other blocks to 0,"
            " because autograd keeps their tensors, and keep what was gathered once"
        )
    found = holding.held(0)
    assert not found, (
        f"after the forward pass rank {rank} holds {found} numbers of whole weights:"
        " resize their storages to 0, because autograd keeps the tensors"
    )


def run_backward(outputs):
    try:
        outputs.square().mean().backward()
    except RuntimeError as error:
        assert "storage of size 0" not in str(error), (
            "the backward pass meets a weight without memory: gather before it, and"
            " resize the storage that the weight had in the forward pass, because"
            " autograd has kept that one"
        )
        raise


def check_backward(holding, rank):
    names = ["all_gather", "reduce_scatter"] * len(SIZES)
    check_calls(holding, "backward", names, rank)
    for block, found in holding.most.items():
        assert found <= 2 * NUMBERS[block], (
            f"in the backward pass of block {block}, which has {NUMBERS[block]}"
            f" numbers, rank {rank} holds {found} of weights and gradients: are those"
            " of the blocks after it freed?"
        )


def check_calls(recording, way, wanted, rank):
    """Compare the collectives of a pass; wanted: their names, in order."""
    found = [call.name for call in recording.calls]
    assert "all_reduce" not in found, (
        f"rank {rank} gets whole gradients by an all-reduce in the {way} pass, and"
        " keeps one piece: a reduce-scatter sends half as much"
    )
    for name in ("all_gather", "reduce_scatter"):
        ours, right = found.count(name), wanted.count(name)
        assert ours == right, (
            f"the {way} pass of {len(SIZES)} blocks calls {ours}"
            f" {name.replace('_', '-')}s, not {right}"
        )
    others = sorted({*found} - {*wanted})
    assert not others, f"the {way} pass calls {' and '.join(others)}"
    assert found == wanted, f"the {way} pass calls {', '.join(found)}, in this order"
    sizes = NUMBERS if way == "forward" else NUMBERS[::-1]
    for name, parts in (("all_gather", RANKS), ("reduce_scatter", 1)):
        given = [call.numel for call in recording.of(name)]
        right = [size // parts for size in sizes]
        assert given in ([], right), (
            f"rank {rank} gives its {name.replace('_', '-')}s in the {way} pass {given}"
            f" numbers, not {right}"
        )


def check_gradients(model, alone, step, rank):
    for number, (sharded, block) in enumerate(zip(model, alone, strict=True)):
        (piece,) = sharded.parameters()
        where = f"step {step}, rank {rank}, block {number}: the piece"
        assert piece.grad is not None, f"{where} has no gradient"
        gradient = torch.cat([weight.grad.flatten() for weight in block.parameters()])
        right = padded(gradient).chunk(RANKS)[rank]
        assert difference(piece.grad, RANKS * right) > 1e-9, (
            f"the gradient is the sum over {RANKS} ranks: divide it by their number"
        )
        off = difference(piece.grad, right)
        added = ": is it added to the .grad that is there?" if step == 2 else ""
        assert off < 1e-12, f"{where}'s gradient is off by {off:.0e}{added}"


def check_rest(weights, holding, rank):
    """Compare what is there between two steps: the pieces and their gradients only."""
    left = sum(weight.grad is not None for weight in tree_leaves(weights))
    assert not left, (
        f"after the backward pass {left} whole weights have their gradient still, on"
        f" rank {rank}: set it to None when it is reduced"
    )
    found = holding.held(0)
    assert not found, (
        f"after the backward pass rank {rank} holds {found} numbers of whole weights or"
        " gradients: free them when the gradients are reduced"
    )
