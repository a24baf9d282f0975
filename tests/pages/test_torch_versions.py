"""docs/running.md, *What torch changed*, is true of the torch that is installed.

A row says since when; each function here returns whether this torch does what the row
says of now.
"""

import inspect
import re
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness import commands
from harness.counting import Collectives
from harness.stages import ROOT

pytestmark = pytest.mark.release  # another torch changes it, and no push
PAGE = (ROOT / "docs/running.md").read_text()
ROWS = re.findall(r"^\| (2\.\d\d) \| ([^|]+) \|", PAGE, re.MULTILINE)


def tied_weights():
    """Return whether torch refuses a weight that is in two groups."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for part in (*model, model):
        fully_shard(part)
    try:
        model(torch.ones(1, 4))
    except ValueError:
        return True
    return False


def random_weights():
    torch.manual_seed(0)
    return round(nn.init.trunc_normal_(torch.empty(64))[0].item(), 3) != -0.009


def gradients_in_float32():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(16, 16, bias=False), mp_policy=policy)
    with Collectives() as calls:
        model(torch.ones(2, 16)).sum().backward()
    (dtype,) = (dtype for name, dtype, *_ in calls.seen if name == "reduce_scatter")
    return dtype is torch.float32


def warns_of_broadcast_buffers():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    return any(each.category is FutureWarning for each in caught)


NOW = {  # {a text of a row: whether it is so}
    "tied weights": tied_weights,
    "trunc_normal_": random_weights,
    "MixedPrecisionPolicy": gradients_in_float32,
    "broadcast_buffers=False": warns_of_broadcast_buffers,
    "dist.barrier(timeout=)": lambda: (
        "timeout" in inspect.signature(dist.barrier).parameters
    ),
    "dist.all_gather_single": lambda: hasattr(dist, "all_gather_single"),
    "dist.set_timeout": lambda: hasattr(dist, "set_timeout"),
    "reset_iter_state": lambda: hasattr(FSDPModule, "reset_iter_state"),
}


def assert_it_is_so_since(text, since):
    dist.init_process_group("fake", rank=0, world_size=2)
    installed = [int(number) for number in torch.__version__.split(".")[:2]]
    assert NOW[text]() == (installed >= [int(n) for n in since.split(".")])
    dist.destroy_process_group()


@pytest.mark.parametrize("text", NOW)
def test_a_row_is_true_since_its_version(text):
    (since,) = [version for version, what in ROWS if text in what]
    commands.call_in_forks(assert_it_is_so_since, [(text, since)])
