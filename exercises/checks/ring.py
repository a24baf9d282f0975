"""Checks ring.py: the sums, and each message."""

import torch
import torch.distributed as dist

from exercises.checks import Recording
from exercises.checks import check_waits


def check(answer, rank):
    n = dist.get_world_size()
    for shape in ((12,), (3, 4), (10,), (11,), (2, 4), (4,), (1000,)):
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randint(1, 1000, (n, *shape), generator=generator)
        numbers = numbers.to(torch.get_default_dtype())
        ours = numbers[rank].clone()
        with Recording() as recording:
            answer.all_reduce(ours)
        check_messages(recording, (rank + 1) % n, n, ours)
        check_sums(ours, numbers[rank], numbers.sum(0), n)


def check_messages(recording, right, n, tensor):
    """Assert that this rank has sent what it should, when, and to whom."""
    others = {call.name for call in recording.calls} - {"send", "recv"}
    assert not others, f"it calls {', '.join(others)}: a ring is made of messages only"
    sent = [call for call in recording.calls if call.name == "send"]
    assert {call.peer for call in sent} <= {right}, (
        f"it sends to the ranks {[call.peer for call in sent]}: in the ring it sends"
        f" only to {right}"
    )
    sizes = [call.numel for call in sent]
    most = -(-tensor.numel() // n)  # numbers of a chunk
    assert len(sizes) == 2 * (n - 1) and {*sizes} <= {most, tensor.numel() // n}, (
        f"it sends {sizes} numbers of a tensor of {[*tensor.shape]}: 2 (n - 1)"
        " messages, each one of n chunks whose sizes differ by one number at most, also"
        " where that divides a row"
    )
    check_waits("all_reduce()", recording)
    begun = [event.name for event in recording.events].index("wait")
    assert "send" in [event.name for event in recording.events[:begun]], (
        "it waits before it has begun to send: then the ranks take turns"
    )


def check_sums(ours, before, right, n):
    """Assert that a rank has the sums."""
    assert not torch.equal(ours, before), (
        "the tensor is what it was: the sums belong into it, in place"
    )
    assert not torch.equal(ours, right / n), "these are the means: return the sums"
    larger, smaller = (ours > right).sum().item(), (ours < right).sum().item()
    assert not larger, (
        f"{larger} of {right.numel()} numbers are larger than the sum: something is"
        " added twice, or before it has arrived; in the second half, sums are copied"
    )
    assert not smaller, (
        f"{smaller} of {right.numel()} numbers are not the sum of all ranks: does each"
        " chunk go around twice, first to be added and then to be copied?"
    )
    assert torch.equal(ours, right), "there are numbers that are not finite"
