"""docs/symptoms.md: what it quotes is shown here, and its silent faults happen.

What torch says of a mistake is in test_torch_names_it.py; other faults without an error
are in the notebooks to which their rows lead.
"""

import re

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness import commands
from harness.stages import ROOT

PAGE = (ROOT / "docs/symptoms.md").read_text()
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what you see")
]
SHOWN = ("*/*.ipynb", "tests/*/*.py", "recipes/*", "docs/faults.md")
SHOWN += ("docs/uneven_inputs.md",)


def shown():
    """Return all that notebooks, tests and recipes show, outputs without colors."""
    found = []
    for path in [path for pattern in SHOWN for path in ROOT.glob(pattern)]:
        if path.suffix != ".ipynb":
            found.append(path.read_text())
            continue
        for cell in nbformat.read(path, as_version=4).cells:
            outputs = cell.get("outputs", [])
            found += [cell.source, *(each.get("text", "") for each in outputs)]
    return re.sub(r"\x1b\[\d+m", "", "\n".join(found))


def test_what_the_page_quotes_is_shown_or_has_a_mark():
    text = shown()
    for see, _cause, _cure in ROWS:
        for words, mark in re.findall(r"`([^`]+)`([†‡]?)", see):
            pattern = ".*".join(map(re.escape, words.split("...")))
            assert mark or re.search(pattern, text), f"shown nowhere: {words}"


# ---- one process ---------------------------------------------------------------------
release = pytest.mark.release  # a new torch changes it, and not a push
in_group = pytest.mark.usefixtures("group")


def make():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_steps(model, optimizer, number=2):
    for _ in range(number):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(path, model, optimizer):
    weights, state = state_dict.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load(path, model, optimizer):
    weights, state = state_dict.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    both = {"model_state_dict": weights, "optim_state_dict": state}
    state_dict.set_state_dict(model, optimizer, **both)


@release
@in_group
@pytest.mark.parametrize("gradients", [False, True])
def test_the_optimizers_state_is_not_loaded_beside_gradients(tmp_path, gradients):
    before, (model, optimizer) = make(), make()
    take_steps(*before)
    save(tmp_path, *before)
    model(torch.ones(1, 4)).sum().backward()  # a warm-up
    if not gradients:
        optimizer.zero_grad()
    load(tmp_path, model, optimizer)
    assert len(optimizer.state) == (0 if gradients else 4)


@release
@in_group
@pytest.mark.parametrize("shard_first", [False, True])
def test_to_empty_unties_weights_unless_they_are_sharded(shard_first):
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
    if shard_first:
        fully_shard(model)
    model.to_empty(device="cpu")
    assert (model[1].weight is model[0].weight) == shard_first


def test_a_collective_without_a_group():
    words = "Default process group has not been initialized"
    with pytest.raises(ValueError, match=words):
        dist.barrier()


# ---- two ranks -----------------------------------------------------------------------
def gather(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def norms_of_meshes(_rank):
    """Only a mesh that has all ranks averages over all of them."""
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for used, equal in ((mesh, True), (mesh["shard"], False)):
        torch.manual_seed(0)
        layer = fully_shard(nn.Linear(4, 4), mesh=used)
        layer(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
        norm = nn.utils.get_total_norm([w.grad for w in layer.parameters()])
        one, other = gather(norm.full_tensor().item())
        assert (abs(one - other) < 1e-4) == equal


def wrap_only_the_adapters(rank):
    """Wrap a holder of a model's adapters, and call the model: nothing averages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    batch = torch.full((2, 4), 1.0 + rank)
    for wrapped, called, equal in (
        (model[1], model, False),
        (model, None, True),
    ):
        wrapper = DistributedDataParallel(wrapped)
        (called or wrapper)(batch).square().sum().backward()
        one, other = gather(model[1].weight.grad.norm().item())
        assert (abs(one - other) < 1e-4) == equal
        model.zero_grad()


def be_a_rank(rank, function, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    function(rank)
    dist.destroy_process_group()


@release
@pytest.mark.parametrize(
    "function",
    [norms_of_meshes, wrap_only_the_adapters],
)
def test_what_two_ranks_do_without_an_error(function, tmp_path):
    calls = [(rank, function, tmp_path) for rank in (0, 1)]
    commands.call_in_forks(be_a_rank, calls)
