"""What the checks share: recording the collectives of a rank, and comparing tensors.

A check is a module with `check(answer, rank)`, which asserts, each time with a message
that names the mistake. `answer` is the reader's module, and `rank` the rank that runs,
one of a gloo group; check.py shows it in front of the message.

All ranks run the whole check, and the message of the lowest that fails is shown. A rank
that has failed takes part in nothing more, so whoever comes to the next collective of
the check waits there, and says nothing else.
"""

import contextlib
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from harness.counting import Count
from harness.counting import collective_of
from harness.counting import size
from harness.counting import tensors_of


class Call(NamedTuple):
    """One call of a collective.

    name: as in torch.distributed ("all_reduce", "send", ...), or "wait" for the wait()
    of one, which those that are not asynchronous also call; numel: the numbers that
    this rank gives to it, for "recv" those that it gets, for "barrier" and "wait" 0;
    peer: the rank to which it sends, or from which it receives.
    """

    name: str
    numel: int = 0
    peer: int | None = None


class Recording(Count):
    """Notes what a block of code, and the backward passes in it, call on this rank.

    with Recording() as recording:
        model(batch).sum().backward()
    recording.events    # [Call("all_reduce", 105), Call("wait")]
    recording.calls     # the same without the waits
    """

    def __init__(self):
        super().__init__()
        self.events = []
        self.works = []  # to keep them: gloo does not end a message that nobody keeps

    @property
    def calls(self):
        return [event for event in self.events if event.name != "wait"]

    def __enter__(self):
        self.patches = contextlib.ExitStack()
        for kind in (dist.Work, torch._C.Future):
            patch = mock.patch.object(kind, "wait", self.noting(kind.wait))
            self.patches.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def noting(self, wait):
        """Return a wait() that is noted."""

        def noted(*args, **kwargs):
            self.events.append(Call("wait"))
            return wait(*args, **kwargs)

        return noted

    def note(self, operation, args, result):
        if name := collective_of(operation):
            self.works.append(result)
            given = tensors_of(args)[-1] if name != "barrier" else []
            peer = args[2] if name in ("send", "recv") else None
            self.events.append(Call(name, sum(each.numel() for each in given), peer))


def check_calls(what, recording, wanted, hint=""):
    """Assert that `what` calls these collectives: pairs (name, numbers given)."""
    found = [(call.name, call.numel) for call in recording.calls]
    texts = [
        ", ".join(f"{name} of {numel} numbers" for name, numel in calls)
        for calls in (found, wanted)
    ]
    found_text, wanted_text = (text or "no collective" for text in texts)
    assert found == wanted, f"{what} calls {found_text}, and not {wanted_text}{hint}"


def check_waits(what, recording, hint=""):
    """Assert that as many collectives were waited for as were called."""
    calls = len(recording.calls)
    waits = len(recording.events) - calls
    assert waits == calls, (
        f"{what} calls wait() {waits} times for {calls} collectives: once for each"
        f"{hint}"
    )


def difference(ours, right):
    """Return the largest difference between two tensors, or inf."""
    if not torch.is_tensor(ours) or ours.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    return (ours - right).detach().abs().max().nan_to_num(float("inf")).item()


def is_close(ours, right):
    """Return whether two tensors differ by the default dtype's rounding only."""
    exact = torch.get_default_dtype() == torch.float64
    return difference(ours, right) < (1e-12 if exact else 1e-5)


def check_close(what, ours, right, hint=""):
    """Assert that a tensor is right, and say what it is if it is a multiple of that."""
    if is_close(ours, right):
        return
    n = dist.get_world_size()
    assert torch.is_tensor(ours), f"{what} is {ours}, and not a tensor{hint}"
    assert ours.shape == right.shape, (
        f"{what} is {[*ours.shape]}, and not {[*right.shape]}{hint}"
    )
    assert not is_close(ours, n * right), f"{what} is {n} times too large{hint}"
    assert not is_close(n * ours, right), f"{what} is {n} times too small{hint}"
    raise AssertionError(f"{what} is off by {difference(ours, right):.0e}{hint}")


def vector_of(tensors):
    """Return tensors as one vector, with zeros up to a multiple of the ranks."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(vector, (0, -len(vector) % dist.get_world_size()))


def check_piece(what, piece, right, hint=""):
    """Assert that a piece of a tensor is right, and keeps nothing else in memory."""
    check_close(what, piece, right, hint)
    held = piece.untyped_storage().nbytes() // piece.element_size()
    assert held == piece.numel(), (
        f"{what} is a view into {held} numbers, which stay in memory: clone it"
    )


def tensors_of_object(thing):
    """Return the tensors of an object, their gradients, and those of its modules."""
    leaves = tree_leaves(vars(thing))
    found = [each for each in leaves if torch.is_tensor(each)]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    for each in leaves:
        if isinstance(each, nn.Module):
            found += tensors_of_object(each)
    return found


def numbers_in(tensors, without=()):
    """Return how many numbers are in the memory of tensors, except of some others."""
    without = list(without)
    held = size([*tensors, *without]) - size(without)
    return held // torch.get_default_dtype().itemsize
