"""Checks ring.py: the sums, and each message."""

import torch

from exercises.checks import RANKS
from exercises.checks import Recording

SOLVED = (
    "NCCL and gloo also cut the chunks into pieces, so that a rank sends one while it "
    "still adds another, and for small tensors, where the number of messages matters "
    "more than the bytes, NCCL uses trees. "
    "In torch, dist.all_reduce stands in torch/distributed/distributed_c10d.py, and "
    "hands the tensor to a backend such as torch/csrc/distributed/c10d/"
    "ProcessGroupGloo.cpp; your two halves are also collectives by themselves, "
    "dist.reduce_scatter_tensor and dist.all_gather_into_tensor, of which FSDP is made."
)
MESSAGES = 2 * (RANKS - 1)


def check(answer, rank):
    for shape in ((12,), (3, 4), (10,), (11,), (2, 4), (4,), (1000,)):
        reduce(answer, rank, shape)


def reduce(answer, rank, shape):
    """Let the answer reduce a tensor of this shape; assert all that the stub says."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(1, 1000, (RANKS, *shape), generator=generator).double()
    ours, right = numbers[rank].clone(), numbers.sum(0)
    with Recording() as recording:
        answer.all_reduce(ours)
    judge_messages(recording, rank, ours)
    judge_sums(ours, numbers[rank], right, rank)


def judge_messages(recording, rank, tensor):
    """Assert that this rank has sent what it should, and to whom."""
    sent, received = recording.of("send"), recording.of("recv")
    others = {call.name for call in recording.calls} - {"send", "recv"}
    assert not others, f"{others.pop()} is called: the ring is made of messages only"
    assert sent, f"rank {rank} sends nothing"
    right = (rank + 1) % RANKS
    to = {call.peer for call in sent} - {right}
    assert not to, (
        f"rank {rank} sends to rank {to.pop()}: in the ring it sends only to {right}"
    )
    numbers = sum(call.numel for call in sent)
    most = MESSAGES * -(-tensor.numel() // RANKS)
    assert numbers <= most, (
        f"rank {rank} sends {numbers} numbers of a tensor of {tensor.numel()}: with "
        f"{RANKS} chunks of about equal sizes it sends {most} at most"
    )
    sizes = [call.numel for call in sent]
    rows = ", also where that divides a row" if tensor.dim() > 1 else ""
    assert max(sizes) - min(sizes) <= 1, (
        f"rank {rank} sends chunks of {sizes} numbers of a tensor of "
        f"{[*tensor.shape]}: their sizes differ by one number at most{rows}"
    )
    assert all(call.bytes == 8 * call.numel for call in sent), (
        "the numbers are not sent with the tensor's dtype, float64"
    )
    assert len(sent) == MESSAGES, (
        f"rank {rank} sends {len(sent)} messages: 2 (n - 1) are {MESSAGES}"
    )
    waits = len(recording.events) - len(recording.calls)
    assert waits >= len(sent) + len(received), (
        f"rank {rank} waits for {waits} of {len(sent) + len(received)} messages: call "
        "wait() of each"
    )


def judge_sums(ours, before, right, rank):
    """Assert that a rank has the sums."""
    assert not torch.equal(ours, before), (
        f"the tensor of rank {rank} is what it was: the sums belong into it, in place"
    )
    assert not torch.equal(ours, right / RANKS), "these are the means: return the sums"
    same = (ours == before).sum().item()
    assert not 0 < same < RANKS, (
        f"{same} of the {right.numel()} numbers of rank {rank} are what they were: is "
        "every number in a chunk?"
    )
    where = f"of the {right.numel()} numbers of rank {rank}"
    larger, smaller = (ours > right).sum().item(), (ours < right).sum().item()
    assert not larger, (
        f"{larger} {where} are larger than the sum: something is added twice. In the "
        "second half, the sums are copied"
    )
    assert not smaller, (
        f"{smaller} {where} are not the sum of all ranks: does each chunk go around "
        "twice, first to be added and then to be copied?"
    )
    assert torch.equal(ours, right), f"rank {rank} has numbers that are not finite"
