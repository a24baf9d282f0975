"""docs/torch_versions.md is true of the torch that is installed.

The page's tables are the tests' tables: a row says since when, or in which versions.
"""

import copy
import importlib
import inspect
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from common.gpt import GPT
from harness import commands
from harness.counting import Collectives
from harness.stages import ROOT
from tests import fsdp_ranks

pytestmark = pytest.mark.release  # another torch changes it, and no push

PAGE = (ROOT / "docs/torch_versions.md").read_text()
ROWS = re.findall(r"^\| (2\.\d\d(?:, 2\.\d\d)*) \| (.+?) \| (.+?) \|", PAGE, re.M)
NAMES = [
    (since, name)
    for since, names, _ in ROWS
    for name in re.findall(r"`(torch[^`]+)`", names)
    if not names.startswith("**")
]
BEHAVIORS = {
    re.search(r"\*\*(.+?)\*\*", what)[1].replace("`", ""): since
    for since, what, _ in ROWS
    if what.startswith("**")
}


def holds(since):
    """Return whether a row is about the version that is installed."""
    installed = [int(number) for number in torch.__version__.split(".")[:2]]
    versions = [[int(n) for n in one.split(".")] for one in since.split(", ")]
    return installed in versions if len(versions) > 1 else installed >= versions[0]


def exists(name):
    """Return whether torchrun has an option, or torch a name or an argument."""
    program, _, option = name.partition(" ")
    if option:
        return option in commands.run([program, "--help"]).stdout
    path, _, argument = name.removesuffix("=)").partition("(")
    module, *attributes = path.split(".")
    found = importlib.import_module(module)
    for attribute in attributes:
        found = getattr(found, attribute, None)
    if argument:
        return argument in inspect.signature(found).parameters
    return found is not None


@pytest.mark.parametrize("since, name", NAMES)
def test_a_name_is_there_since_the_version(since, name):
    assert exists(name) == holds(since)


FIRST = (-0.009, 1.4609375)  # what torch 2.11 draws, by the two ways


# ---- what each rank does: each returns whether it sees what the row says of `now` ----
def warns(function, *args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return any(one.category is FutureWarning for one in caught)


def tied_weights():
    """Return whether torch refuses; otherwise, assert that it trains another model."""
    torch.manual_seed(0)
    alone = GPT(32, 8, 16, 2, 2)
    alone.head.weight = alone.tokens.weight
    model = copy.deepcopy(alone)
    for part in (model.tokens, model.head, model):
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (2,)))
    tokens = torch.arange(8)[None]
    try:
        for one in (alone, model):
            optimizer = torch.optim.SGD(one.parameters(), 0.5)
            one(tokens).square().mean().backward()
            optimizer.step()
    except ValueError:
        return True
    trained = (model.tokens.weight.full_tensor(), model.head.weight.full_tensor())
    assert not trained[0].allclose(trained[1], atol=1e-3)
    assert not trained[0].allclose(alone.tokens.weight, atol=1e-3)
    return False


def random_weights():
    torch.manual_seed(0)
    weights = nn.init.trunc_normal_(torch.empty(64))
    torch.manual_seed(0)
    numbers = torch.randn(64, dtype=torch.bfloat16)
    changed = [FIRST[0] != round(weights[0].item(), 3), FIRST[1] != numbers[0].item()]
    assert len({*changed}) == 1
    return changed[0]


def frozen_weights():
    """Return whether the end of backward waits by the device's own kind of stream."""
    source = inspect.getsource(FSDPParamGroup.finalize_backward)
    assert "wait_event" in source
    return "torch.accelerator.current_stream().wait_event" not in source


def gradients_in_bf16():
    model = nn.Linear(16, 16, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)
    with Collectives() as calls:
        model(torch.ones(2, 16)).sum().backward()
    (dtype,) = (dtype for name, dtype, *_ in calls.seen if name == "reduce_scatter")
    return dtype is torch.float32


def nn_functional():
    return warns(all_gather, torch.ones(2, requires_grad=True))


def gloo_all_to_all():
    try:
        dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(2)] * 2)
    except RuntimeError as error:
        assert "Backend gloo does not support alltoall" in str(error)
        return False
    return True


def old_names():
    part, whole = torch.ones(2), torch.ones(4)
    warned = warns(dist.all_gather_into_tensor, whole, part)
    assert warned == warns(dist.reduce_scatter_tensor, part, whole)
    return warned


def broadcast_buffers():
    return warns(DistributedDataParallel, nn.Linear(2, 2), broadcast_buffers=False)


IN_RANKS = {
    "tied weights": tied_weights,
    "random weights": random_weights,
    "gradients in bf16": gradients_in_bf16,
    "frozen weights": frozen_weights,
    "torch.distributed.nn.functional": nn_functional,
    "all_to_all with gloo": gloo_all_to_all,
    "old names": old_names,
    "broadcast_buffers=False": broadcast_buffers,
}


def call(_rank, _processes, what):
    return IN_RANKS[what]()


TORCHRUN = "two runs on one machine"


def test_each_row_has_its_function():
    assert {*BEHAVIORS} == {*IN_RANKS, TORCHRUN}


@pytest.mark.parametrize("what", IN_RANKS)
def test_it_happens_since_the_version(what, tmp_path):
    calls = [(call, rank, 2, tmp_path, what) for rank in range(2)]
    commands.call_in_forks(fsdp_ranks.in_group, calls)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == holds(BEHAVIORS[what])


def test_torchrun_takes_a_free_port(tmp_path):
    script = tmp_path / "port.py"
    script.write_text("import os\nprint(os.environ['MASTER_PORT'])\n")
    done = commands.run(["torchrun", "--nproc-per-node=1", script])
    assert (done.stdout.strip() != "29500") == holds(BEHAVIORS[TORCHRUN])


def test_nccl_in_the_package():
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    (line,) = re.findall(r"^NCCL in the packages.*$", PAGE, re.M)
    version = torch.__version__.split("+")[0]
    assert f" {version}" not in line or f" {nccl} with" in line
