"""Checks pipeline.py: the passes of each stage, what they send, and the gradients."""

import sys
import weakref

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # see column_row.py
from torch import nn

from exercises.checks import RANKS
from exercises.checks import Recording
from exercises.checks import difference
from exercises.checks import on_all_ranks

SOLVED = (
    "Torch's Schedule1F1B, in torch.distributed.pipelining, also sends and receives in"
    " one batch, and its PipelineStage finds out the shapes itself. Other schedules"
    " wait less: ScheduleInterleaved1F1B gives a stage several parts of the model, and"
    " ScheduleInterleavedZeroBubble puts off the gradients of the weights."
)
WIDTH, BATCH = 6, 2


def check(answer, rank):
    for count in (7, 2, 1):
        torch.manual_seed(count)
        shape, options = (BATCH, WIDTH), {"dtype": torch.float64}
        alone, parts = make_parts(), make_parts()
        inputs = [torch.randn(shape, **options) for _ in range(count)]
        targets = [torch.randn(shape, **options) for _ in range(count)]
        given = [each.clone() for each in inputs]
        for x, target in zip(inputs, targets, strict=True):
            (nn.functional.mse_loss(alone(x), target) / count).backward()
        part = Recorded(parts[rank], rank)
        with Exchanges() as exchanges:
            like = torch.zeros(shape, **options)
            train_step(answer, part, given, targets, like)
        check_waits(exchanges, count, rank)  # first: what is in flight disturbs others
        on_all_ranks(check_passes, part, count, rank)
        on_all_ranks(check_exchanges, exchanges, count, rank)
        on_all_ranks(check_order, exchanges, rank)
        on_all_ranks(check_gradients, parts[rank], alone[rank], count, rank)


def make_parts():
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(RANKS))
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def train_step(answer, part, inputs, targets, like):
    """Call the answer, and say more if it counts too many micro-batches."""
    try:
        answer.train_step(part, inputs, targets, nn.functional.mse_loss, like)
    except (IndexError, StopIteration) as error:
        if len(inputs) < RANKS:
            said = f"{error}, ".lstrip(", ")
            error.args = (
                f"{said}with {len(inputs)} micro-batches for {RANKS} stages: no more"
                " forward passes than these come before the first backward pass",
            )
        raise


class Recorded(nn.Module):
    """A part that notes its passes, and how many of its outputs are still there.

    passes: ["F0", "F1", "B0", ...]; kept: the most outputs that there were before a
        forward pass
    """

    def __init__(self, part, stage):
        super().__init__()
        self.stage = stage
        self.part, self.passes, self.outputs, self.kept = part, [], [], 0

    def forward(self, inputs):
        assert self.stage == 0 or inputs.requires_grad, (
            f"what stage {self.stage} has received does not require a gradient, so it"
            " gets none to send back: call requires_grad_() before the part"
        )
        there = [output for output in self.outputs if output() is not None]
        self.kept = max(self.kept, len(there))
        number = len(self.outputs)
        self.passes.append(f"F{number}")
        output = Noting.apply(self.part(inputs), self.passes, number)
        self.outputs.append(weakref.ref(output))
        return output


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, passes, number):
        ctx.passes, ctx.number = passes, number
        return output

    @staticmethod
    def backward(ctx, gradient):
        ctx.passes.append(f"B{ctx.number}")
        return gradient, None, None


class Exchanges(Recording):
    """Also notes in `groups` the sends and receives that begin together.

    groups: lists of (name, neighbor), as long as a dist.batch_isend_irecv has
        operations; a call outside of one is a group of its own
    """

    def __init__(self):
        super().__init__()
        self.groups, self.batch = [], None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        before = len(self.events)
        if operation == torch.ops.c10d.send.default:
            # The message is kept, and may not keep an output whose graph it has.
            args = ([tensor.detach() for tensor in args[0]], *args[1:])
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        for event in self.events[before:]:
            if event.name in ("send", "recv"):
                self.join_group(event.name, event.peer)
        return result

    def join_group(self, name, neighbor):
        frame = sys._getframe()
        while frame and frame.f_code.co_name != "batch_isend_irecv":
            frame = frame.f_back
        if frame is None or frame is not self.batch:
            self.groups.append([])
        self.batch = frame  # keeps it, so that no other gets its address
        self.groups[-1].append((name, neighbor))


def schedule(stage, count):
    """Return the passes of a stage in 1F1B."""
    ahead = min(RANKS - 1 - stage, count)
    forward = [f"F{number}" for number in range(count)]
    backward = [f"B{number}" for number in range(count)]
    pairs = zip(forward[ahead:], backward, strict=False)
    return [
        *forward[:ahead],
        *(each for pair in pairs for each in pair),
        *backward[count - ahead :],
    ]


def in_flight(passes):
    """Return the most micro-batches that are forward, but not yet backward."""
    numbers = [0]
    for each in passes:
        numbers.append(numbers[-1] + (1 if each[0] == "F" else -1))
    return max(numbers)


def check_waits(exchanges, count, stage):
    calls = len(exchanges.calls)
    waits = len(exchanges.events) - calls
    assert waits >= calls, (
        f"stage {stage}, {count} micro-batches: {calls} sends and receives, and {waits}"
        " times wait(): a tensor must not be used or freed before"
    )


def check_passes(part, count, stage):
    where = f"stage {stage}, {count} micro-batches: "
    found, right = part.passes, schedule(stage, count)
    forward = sum(each[0] == "F" for each in found)
    assert forward == count, f"{where}the part is called {forward} times"
    backward = len(found) - forward
    assert backward == count, (
        f"{where}there are {backward} backward passes of micro-batches"
    )
    most = in_flight(found)
    assert most <= in_flight(right), (
        f"{where}{most} are in flight at once, not {in_flight(right)}: begin with the"
        f" backward passes when there is a gradient ({' '.join(found)})"
    )
    assert found == right, (
        f"{where}the order is {' '.join(found)}, not {' '.join(right)}"
    )
    assert part.kept <= in_flight(right), (
        f"{where}{part.kept} outputs are still there when the next forward pass begins:"
        " forget those that have been backward"
    )


def check_exchanges(exchanges, count, stage):
    where = f"stage {stage}, {count} micro-batches: "
    neighbors = [each for each in (stage - 1, stage + 1) if 0 <= each < RANKS]
    found = [event for group in exchanges.groups for event in group]
    for name, neighbor in found:
        assert neighbor in neighbors, (
            f"{where}{name} with stage {neighbor}, which is no neighbor"
        )
    for neighbor in neighbors:
        for name in ("send", "recv"):
            calls = found.count((name, neighbor))
            assert calls == count, (
                f"{where}{calls} times {name} with stage {neighbor}, not {count}"
            )
    others = sorted({each.name for each in exchanges.calls} - {"send", "recv"})
    assert not others, f"{where}calls {' and '.join(others)}"
    sizes = {each.numel for each in exchanges.calls}
    assert sizes == {BATCH * WIDTH}, (
        f"{where}what is exchanged has {sorted(sizes)} numbers, not {BATCH * WIDTH}"
    )


def check_order(exchanges, stage):
    """Let the stages exchange in the order of their calls, as with nccl."""
    left = [None] * RANKS
    dist.all_gather_object(left, exchanges.groups)
    while any(left):
        first = [{*groups[0]} if groups else set() for groups in left]
        met = False
        for rank, groups in enumerate(left):
            for name, other in first[rank]:
                answer = ("recv" if name == "send" else "send", rank)
                if answer in first[other]:
                    met = True
                    groups[0].remove((name, other))
        if not met:
            break
        left = [groups if not groups or groups[0] else groups[1:] for groups in left]
    assert not any(left), (
        f"with nccl, the stages wait for each other forever: {stuck(left)};"
        " begin those that belong together in one dist.batch_isend_irecv"
    )


def stuck(left):
    """Return in words what each stage waits for."""
    words = {"send": "to send to", "recv": "to receive from"}
    return ", ".join(
        f"stage {rank} "
        + " and ".join(f"{words[name]} {other}" for name, other in groups[0])
        for rank, groups in enumerate(left)
        if groups
    )


def check_gradients(part, alone, count, stage):
    where = f"stage {stage}, {count} micro-batches: "
    for ours, right in zip(part.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None, f"{where}the weights have no gradients"
        assert count == 1 or difference(ours.grad, count * right.grad) > 1e-9, (
            f"{where}the gradients are the sum over the micro-batches, not their mean"
        )
        off = difference(ours.grad, right.grad)
        assert off < 1e-12, (
            f"{where}the gradients are off by {off:.0e} from those of one process"
        )
