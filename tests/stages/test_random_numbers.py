"""03_ddp_launch/what_goes_wrong: each rank draws random numbers of its own.

All begin with the same weights nevertheless. A stage that spawns its processes cannot
be prepared to note their numbers. That dropout draws the same numbers in a resumed run
is shown in test_resume.py.
"""

import functools

import pytest
import torch
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DistributedSampler

from harness.stages import features
from harness.stages import first_with
from harness.stages import with_feature
from tests.conftest import only_in_release
from tests.training import run_stage
from tests.training import small_workload


def note_numbers(folder):
    """Have every rank of a run save what its first random numbers are, folder/RANK.pt.

    seed: the generator's when the first epoch begins, from which a loader draws its
    workers' seeds; dropout: which of 64 numbers dropout would keep in the first step.
    """
    set_epoch, noted = DistributedSampler.set_epoch, {}

    def begin(sampler, epoch):
        noted.setdefault("seed", torch.initial_seed())
        set_epoch(sampler, epoch)

    def draw(module, inputs):
        if module.training and "seed" in noted and "dropout" not in noted:
            ones = torch.ones(64, device=inputs[0].device)
            noted["dropout"] = torch.nn.functional.dropout(ones)
            torch.save(noted, folder / f"{dist.get_rank()}.pt")

    DistributedSampler.set_epoch = begin
    register_module_forward_pre_hook(draw)


@pytest.fixture
def numbers(two, device, tmp_path):
    """Return a function that trains a stage and returns what every rank has drawn."""

    def get(stage, *more):
        work = small_workload(stage, 48)  # one step
        flags = ["--device", device, "--epochs", "1", *work.flags, *more]
        prepare = functools.partial(note_numbers, tmp_path)
        run_stage(stage, two, flags, tmp_path / "run", prepare=prepare)
        return [torch.load(tmp_path / f"{rank}.pt") for rank in range(two)]

    return get


# The later ones have the same line.
DEFAULT = [first_with(feature) for feature in ("torchrun", "checkpoints")]


@pytest.mark.parametrize(
    "stage",
    [only_in_release(s, unless=s in DEFAULT) for s in with_feature("torchrun")],
)
def test_ranks_draw_different_numbers(stage, numbers):
    """For dropout, and for the workers that read their samples.

    A stage that resumes has a seed for each step, and none for its first workers.
    """
    first, second = numbers(stage)
    assert not torch.equal(first["dropout"], second["dropout"])
    if "checkpoints" not in features(stage):
        assert first["seed"] != second["seed"]


def test_a_tp_group_draws_the_same_numbers(numbers):
    """Otherwise its copies of a weight drift apart, as 14/what_goes_wrong says."""
    first, second = numbers(first_with("tensor_parallel"), "--tensor-parallel", "2")
    assert torch.equal(first["dropout"], second["dropout"])
