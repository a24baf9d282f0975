"""Checks sampler.py: each index, against torch's DistributedSampler."""

import torch
from torch.utils.data import DistributedSampler

from exercises.checks import RANKS
from exercises.checks import Recording

SOLVED = (
    "Torch's DistributedSampler also takes the number of ranks and the rank as "
    "arguments, so that it can be made for a process group other than the default one. "
    "It is in torch/utils/data/distributed.py, and what it repeats is counted twice in "
    "an evaluation."
)
# length, shuffle, seed, drop_last, and the epochs, each set before it is iterated over
CASES = [
    (12, False, 0, False, [0]),
    (12, True, 0, False, [0, 1, 5, 1]),
    (12, True, 7, False, [0, 2]),
    (10, False, 0, False, [0]),
    (11, True, 3, False, [4]),
    (1, False, 0, False, [0]),
    (10, False, 0, True, [0]),
    (11, True, 3, True, [4]),
    (2, False, 0, True, [0]),
    (12, True, 0, True, [1]),
]


class Data:
    """A data set that knows only its length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError(
            f"sample {index} is read: the sampler needs the length only"
        )


def check(answer, rank):
    for length, shuffle, seed, drop_last, epochs in CASES:
        torch.manual_seed(rank)  # nothing may depend on it
        state = torch.get_rng_state()
        case = f"length {length}, shuffle={shuffle}, seed={seed}, drop_last={drop_last}"
        with Recording() as recording:
            ours = answer.DistributedSampler(Data(length), shuffle, seed, drop_last)
            right = torchs(rank, length, shuffle, seed, drop_last)
            size = len(ours)
            assert size == len(right), (
                f"len() is {size} on rank {rank}, and not {len(right)}: {case}"
            )
            for number, epoch in enumerate(epochs):
                if number or epoch:  # it begins with epoch 0
                    ours.set_epoch(epoch)
                right.set_epoch(epoch)
                judge(ours, right, rank, epoch, f"{case}, epoch {epoch}")
        assert not recording.calls, (
            f"the sampler calls {recording.calls[0].name}: each rank can make the "
            "order by itself"
        )
        assert torch.equal(torch.get_rng_state(), state), (
            "torch's global generator has changed: shuffle with a torch.Generator"
        )


def torchs(rank, length, shuffle, seed, drop_last):
    """Return torch's sampler."""
    return DistributedSampler(Data(length), RANKS, rank, shuffle, seed, drop_last)


def judge(ours, right, rank, epoch, case):
    """Assert that a rank has its indices, and name the mistake if they are known."""
    wanted, found = [*right], [*ours]
    kinds = {type(index).__name__ for index in found} - {"int"}
    assert not kinds, f"an index is of the type {kinds.pop()}, and not an int"
    if found != wanted:
        for mistake, wrong in mistakes(right, rank, epoch).items():
            assert found != wrong, f"rank {rank} {mistake}: {case}"
    assert found == wanted, f"rank {rank} has {found}, and not {wanted}: {case}"
    assert [*ours] == wanted, "a second iteration over the same epoch gives others"


def mistakes(right, rank, epoch):
    """Return {what a rank does wrong: its indices then}."""
    length, shuffle, seed = len(right.dataset), right.shuffle, right.seed

    def of(rank=rank, shuffle=shuffle, seed=seed, epoch=epoch):
        other = torchs(rank, length, shuffle, seed, right.drop_last)
        other.set_epoch(epoch)
        return [*other]

    whole = [index for row in zip(*map(of, range(RANKS)), strict=True) for index in row]
    block = whole[rank * len(right) : (rank + 1) * len(right)]
    return {
        "has all indices, and not every third one": whole,
        "has a block of the order, and not every third index": block,
        "does not shuffle": of(shuffle=False),
        "shuffles although it should not": of(shuffle=True),
        "has the order of epoch 0: the generator's seed is seed + epoch": of(epoch=0),
        "does not use the seed: the generator's is seed + epoch": of(seed=0),
        "has an order of its own, in which some samples are on no rank": of(
            seed=seed + rank
        ),
    }
