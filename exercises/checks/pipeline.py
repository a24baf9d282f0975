"""Checks pipeline.py: the passes of each stage, what they send, and the gradients."""

import weakref
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # see column_row.py
from torch import nn

from exercises.checks import Recording
from exercises.checks import check_close
from exercises.checks import check_waits

TOKENS, WIDTH, CLASSES, BATCH = 7, 6, 4, 2


def check(answer, rank):
    n = dist.get_world_size()
    for count in (7, 2, 1):
        torch.manual_seed(count)
        alone, parts = make_parts(n), make_parts(n)
        inputs = [torch.randint(TOKENS, (BATCH,)) for _ in range(count)]
        targets = [torch.randint(CLASSES, (BATCH,)) for _ in range(count)]
        loss_fn = nn.functional.cross_entropy
        for x, target in zip(inputs, targets, strict=True):
            (loss_fn(alone(x), target) / count).backward()
        part = Recorded(parts[rank], rank)
        with Exchanges() as exchanges:
            like = torch.zeros(BATCH, WIDTH)
            answer.train_step(part, inputs, targets, loss_fn, like)
        check_waits("train_step()", exchanges)
        dist.barrier()
        check_passes(part, schedule(rank, n, count), n - rank)
        check_exchanges(exchanges, rank, n, count)
        dist.barrier()
        check_order(exchanges, n)
        weights = zip(parts[rank].parameters(), alone[rank].parameters(), strict=True)
        for ours, right in weights:
            hint = ": it is that of the mean over the micro-batches"
            check_close("a weight's gradient", ours.grad, right.grad, hint)


def make_parts(n):
    """Return the parts of a model: of tokens, of numbers in between, and of classes."""
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n - 2)]
    last = nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *middle, last)


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
        self.groups, self.in_batch = [], False

    def __enter__(self):
        begin = dist.batch_isend_irecv

        def batch(operations):
            self.groups.append([])
            self.in_batch = True
            try:
                return begin(operations)
            finally:
                self.in_batch = False

        super().__enter__()
        self.patches.enter_context(mock.patch.object(dist, begin.__name__, batch))
        return self

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation == torch.ops.c10d.send.default:
            # The message is kept, and may not keep an output whose graph it has.
            args = ([tensor.detach() for tensor in args[0]], *args[1:])
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def note(self, operation, args, result):
        before = len(self.events)
        super().note(operation, args, result)
        for event in self.events[before:]:
            if not self.in_batch:
                self.groups.append([])
            self.groups[-1].append((event.name, event.peer))


def schedule(stage, stages, count):
    """Return the passes of a stage in 1F1B."""
    ahead = min(stages - 1 - stage, count)
    forward = [f"F{number}" for number in range(count)]
    backward = [f"B{number}" for number in range(count)]
    pairs = zip(forward[ahead:], backward, strict=False)
    middle = [each for pair in pairs for each in pair]
    return [*forward[:ahead], *middle, *backward[count - ahead :]]


def check_passes(part, right, most):
    """Compare the passes with those of 1F1B; most: the outputs that it may keep."""
    assert part.passes == right, (
        f"the order is {' '.join(part.passes)}, and not {' '.join(right)}"
    )
    assert part.kept <= most, (
        f"{part.kept} outputs are still there when the next forward pass begins: forget"
        " those that have been backward"
    )


def check_exchanges(exchanges, stage, stages, count):
    found = sorted((call.name, call.peer, call.numel) for call in exchanges.calls)
    neighbors = [each for each in (stage - 1, stage + 1) if 0 <= each < stages]
    pairs = [(name, each) for name in ("recv", "send") for each in neighbors]
    wanted = [(*pair, BATCH * WIDTH) for pair in pairs for _ in range(count)]
    assert found == wanted, (
        f"it calls {found}, and not {wanted} (what, with which stage, how many numbers)"
    )


def check_order(exchanges, stages):
    """Let the stages exchange in the order of their calls, as with nccl."""
    left = [None] * stages
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
    stuck = [f"stage {rank} in {left[rank][0]}" for rank in range(stages) if left[rank]]
    assert not stuck, (
        f"with nccl, the stages wait for each other forever: {', '.join(stuck)}."
        " Begin those that belong together in one dist.batch_isend_irecv"
    )
