"""Checks zero1.py: three steps against AdamW on one process."""

import torch
import torch._dynamo  # otherwise each rank does, for its optimizer, in seconds
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from exercises.checks import Recording
from exercises.checks import check_calls
from exercises.checks import check_close
from exercises.checks import check_piece
from exercises.checks import numbers_in
from exercises.checks import tensors_of_object
from exercises.checks import vector_of

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
OPTIONS |= {"amsgrad": True, "maximize": True}


def check(answer, rank):
    n = dist.get_world_size()
    model, alone = make_model(), make_model()
    ours = answer.ZeRO1(model.parameters(), **OPTIONS)
    right = torch.optim.AdamW(alone.parameters(), **OPTIONS)
    used = []  # the optimizers that take a step, and each weight with its gradient

    def note(optimizer, *_):
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        grads = [None if each.grad is None else each.grad.clone() for each in weights]
        weights = [each.detach() for each in weights]  # an answer may free them later
        used.append((optimizer, [*zip(weights, grads, strict=True)]))

    register_optimizer_step_pre_hook(note)
    for step in (1, 2, 3):
        batch = torch.randn(12, 5)  # the same on all ranks
        right.zero_grad()
        alone(batch).square().mean().backward()
        gradient = vector_of(weight.grad for weight in alone.parameters())
        right.step()
        model(batch[rank::n]).square().mean().backward()
        before = vector_of(model.parameters())
        used.clear()
        with Recording() as recording:
            ours.step()
        dist.barrier()
        wanted = [("reduce_scatter", len(before)), ("all_gather", len(before) // n)]
        check_calls("step()", recording, wanted, ": all weights are one vector")
        check_optimizer(used, gradient.chunk(n)[rank])
        dist.barrier()
        after = vector_of(model.parameters())
        assert not torch.equal(after, before), (
            "the model's weights are still the old ones: write into them what was"
            " gathered"
        )
        what = f"step {step}: the vector of the model's weights"
        check_close(what, after, vector_of(alone.parameters()), ", beside AdamW's")
        ours.zero_grad()
        assert not any(weight.grad is not None for weight in model.parameters()), (
            "after zero_grad() the model's weights still have a .grad, which needs"
            " memory even if it is zero: set it to None"
        )
        check_kept(ours, model, len(before) // n)


def make_model():
    """Return a model of 170 numbers, which three ranks cannot divide equally."""
    torch.manual_seed(0)
    layers = (nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 8), nn.Linear(8, 4))
    return nn.Sequential(*layers)


def check_optimizer(used, gradient):
    """Compare what AdamW was given: its update hardly depends on a factor."""
    assert [type(each) for each, _ in used] == [torch.optim.AdamW], (
        f"step() calls the step() of {[type(each).__name__ for each, _ in used]}, not"
        " once that of torch.optim.AdamW"
    )
    ((optimizer, pairs),) = used
    found = {name: optimizer.param_groups[0][name] for name in OPTIONS}
    assert found == OPTIONS, f"AdamW has {found}, not {OPTIONS}: hand on all options"
    found = sum(weight.numel() for weight, _ in pairs)
    assert found == len(gradient), (
        f"AdamW keeps state for {found} numbers, and not for the {len(gradient)} of"
        " this rank's piece"
    )
    check_close("the gradient of this rank's piece", pairs[0][1], gradient)
    check_piece("this rank's piece", pairs[0][0], pairs[0][0])


def check_kept(ours, model, piece):
    """Count the numbers of all tensors that the answer's object has, also in lists."""
    found = numbers_in(tensors_of_object(ours), model.parameters())
    assert found <= piece, (
        f"between two steps it keeps {found} numbers besides the model and AdamW's"
        f" state, and its piece has {piece}: set to None, gradients included, what"
        " step() no longer needs"
    )
