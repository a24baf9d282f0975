"""Checks sampler.py: each index, against torch's DistributedSampler."""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from exercises.checks import Recording
from exercises.checks import check_calls

# length, shuffle, seed, drop_last, and the epochs, each set before it is iterated over
CASES = [
    (12, False, 0, False, [0]),
    (12, True, 7, False, [0, 1, 5, 1]),
    (10, False, 0, False, [0]),
    (11, True, 3, False, [4]),
    (1, False, 0, False, [0]),
    (11, True, 3, True, [4]),
    (2, False, 0, True, [0]),
]


class Data:
    """A data set that knows only its length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def check(answer, rank):
    n = dist.get_world_size()
    for length, *options, epochs in CASES:
        torch.manual_seed(rank)  # nothing may depend on it
        state = torch.get_rng_state()
        case = "length {}, shuffle={}, seed={}, drop_last={}".format(length, *options)
        with Recording() as recording:
            ours = answer.DistributedSampler(Data(length), *options)
            right = DistributedSampler(Data(length), n, rank, *options)
            assert len(ours) == len(right), (
                f"len() is {len(ours)}, and not {len(right)}: {case}"
            )
            for number, epoch in enumerate(epochs):
                if number or epoch:  # it begins with epoch 0
                    ours.set_epoch(epoch)
                right.set_epoch(epoch)
                check_indices(ours, right, f"{case}, epoch {epoch}")
        check_calls(
            "the sampler", recording, [], ": each rank can make the order itself"
        )
        assert torch.equal(torch.get_rng_state(), state), (
            "torch's global generator has changed: shuffle with a torch.Generator"
        )


def check_indices(ours, right, case):
    """Assert that a rank has its indices."""
    wanted, found = [*right], [*ours]
    kinds = {type(index).__name__ for index in found} - {"int"}
    assert not kinds, f"an index is of the type {kinds.pop()}, and not an int"
    assert found == wanted, f"it has {found}, and not {wanted}: {case}"
    assert [*ours] == wanted, "a second iteration over the same epoch gives others"
