"""Checks zero1.py: three steps against AdamW on one process, in float64."""

import torch
import torch._dynamo  # otherwise each rank does, for its optimizer, in seconds
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from exercises.checks import RANKS
from exercises.checks import Recording
from exercises.checks import difference
from exercises.checks import on_all_ranks

SOLVED = (
    "DeepSpeed and Megatron divide the optimizer as you did, with buckets that are sent"
    " while backward() runs, and with a float32 piece for weights of 16 bits. Torch's"
    " torch.distributed.optim.ZeroRedundancyOptimizer stands beside DDP: it gives each"
    " rank whole weights, and broadcasts them."
)
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
NUMBERS, PADDED = 170, 171  # of the model, and up to a multiple of the ranks


def check(answer, rank):
    model, alone = make_model(), make_model()
    ours = answer.ZeRO1(model.parameters(), **OPTIONS)
    right = torch.optim.AdamW(alone.parameters(), **OPTIONS)
    used = []  # the optimizers that take a step, their weights and gradients before it

    def note(optimizer, *_):
        groups = optimizer.param_groups
        weights = [weight for group in groups for weight in group["params"]]
        grads = [weight.grad for weight in weights]
        used.append((optimizer, *map(copies, (weights, grads))))

    register_optimizer_step_pre_hook(note)
    for step in (1, 2, 3):
        batch = torch.randn(12, 5, dtype=torch.float64)  # the same on all ranks
        right.zero_grad()
        alone(batch).square().mean().backward()
        right.step()
        model(batch[rank::RANKS]).square().mean().backward()
        before = vector_of(model)
        used.clear()
        with Recording() as recording:
            ours.step()
        on_all_ranks(check_optimizer, used, rank)
        on_all_ranks(check_collectives, recording, rank)
        on_all_ranks(check_piece, *used[0], before, alone, rank)
        on_all_ranks(check_weights, model, alone, before, step, rank)
        ours.zero_grad()
        grads = [
            weight.grad for weight in model.parameters() if weight.grad is not None
        ]
        assert not any(grad.any() for grad in grads), (
            f"step {step}: after zero_grad() the model's weights have their gradients"
            " still, and the next ones are added"
        )
        assert not grads, (
            f"step {step}: after zero_grad() the gradients are zeros, which need as"
            " much memory as before: set them to None"
        )
        on_all_ranks(check_kept, ours, model, rank)


def make_model():
    torch.manual_seed(0)
    layers = (nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 8), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


def copies(tensors):
    return [each if each is None else each.detach().clone() for each in tensors]


def vector_of(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def pieces_of(vector):
    return nn.functional.pad(vector, (0, PADDED - NUMBERS)).chunk(RANKS)


def check_optimizer(used, rank):
    assert used, "step() calls the step() of no optimizer of torch"
    assert len(used) == 1, f"step() calls the step() of {len(used)} optimizers, not one"
    optimizer, *_ = used[0]
    assert type(optimizer) is torch.optim.AdamW, (
        f"the optimizer is {type(optimizer).__name__}, not torch.optim.AdamW"
    )
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    found = sum(weight.numel() for weight in weights)
    assert found < NUMBERS, (
        f"rank {rank}'s optimizer keeps state for all {NUMBERS} weights: give it only"
        " its piece"
    )
    expected = PADDED // RANKS
    assert found == expected, (
        f"rank {rank}'s optimizer has {found} numbers; its piece of {NUMBERS} weights"
        f" and {PADDED - NUMBERS} zero has {expected}"
    )
    for name, right in OPTIONS.items():
        ours = optimizer.param_groups[0][name]
        assert ours == right, (
            f"the optimizer's {name} is {ours}, not {right}: hand on all options"
        )
    held = sum(weight.untyped_storage().nbytes() // 8 for weight in weights)
    assert held == found, (
        f"rank {rank}'s piece is a view into a vector of {held} numbers, which stays in"
        " memory: clone it"
    )


def check_collectives(recording, rank):
    for call in recording.of("all_reduce"):
        raise AssertionError(
            f"rank {rank} gets the sum of {call.numel} numbers by an all-reduce, and"
            " uses those of its piece: a reduce-scatter sends half as much"
        )
    for name in ("reduce_scatter", "all_gather"):
        given = [call.numel for call in recording.of(name)]
        assert given, f"step() calls no {name.replace('_', '-')}"
        wanted = PADDED if name == "reduce_scatter" else PADDED // RANKS
        assert given == [wanted], (
            f"rank {rank} gives {name.replace('_', '-')} {given} numbers, not once"
            f" {wanted}: all weights are one vector"
        )
    others = {call.name for call in recording.calls}
    others = sorted(others - {"reduce_scatter", "all_gather"})
    assert not others, f"step() also calls {' and '.join(others)}"


def check_piece(optimizer, olds, grads, before, alone, rank):
    """Compare what AdamW was given; its update hardly depends on a factor.

    olds, grads: the optimizer's weights, and before: the model's, before the step
    """
    (gradient,) = grads
    assert difference(olds[0], pieces_of(before)[rank]) == 0, (
        f"rank {rank}'s optimizer updates other numbers than piece {rank} of the"
        f" weights (of the pieces 0 to {RANKS - 1}, in the weights' order)"
    )
    assert gradient is not None, (
        f"rank {rank}'s piece has no .grad when its optimizer takes a step"
    )
    vector = torch.cat([weight.grad.flatten() for weight in alone.parameters()])
    pieces = pieces_of(vector)
    assert difference(gradient, RANKS * pieces[rank]) > 1e-9, (
        f"the gradient is the sum over {RANKS} ranks: divide it by their number"
    )
    off = difference(gradient, pieces[rank])
    assert off < 1e-12, (
        f"rank {rank}'s gradient is off by {off:.0e}: is it the mean over the ranks, of"
        " the weights of its piece?"
    )


def check_kept(ours, model, rank):
    """Count the numbers of all tensors that the answer's object has, also in lists."""
    of_model = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    tensors = filter(torch.is_tensor, tree_leaves(vars(ours)))
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors
    }
    held = sum(
        each.nbytes() // 8 for at, each in storages.items() if at not in of_model
    )
    assert held < NUMBERS, (
        f"between two steps rank {rank} keeps {held} numbers besides the model: do not"
        " make an attribute of what step() no longer needs"
    )


def check_weights(model, alone, before, step, rank):
    """Compare the model's weights after a step; before: what they were before it."""
    ours, right = vector_of(model), vector_of(alone)
    where = f"step {step}, rank {rank}: "
    assert difference(ours, before) > 0, (
        f"{where}the model's weights are still the old ones: write into them what was"
        " gathered"
    )
    pairs = zip(pieces_of(ours), pieces_of(right), strict=True)
    wrong = [owner for owner, pair in enumerate(pairs) if difference(*pair) > 1e-12]
    assert not wrong or rank in wrong, (
        f"{where}the model has the new weights of its own piece, but not of rank"
        f" {wrong[0]}'s"
    )
    again = "; does the optimizer keep its state between two steps?" if step > 1 else ""
    assert not wrong, (
        f"{where}the weights differ by {difference(ours, right):.0e} from those of"
        f" AdamW on one process{again}"
    )
