"""docs/symptoms.md: what it quotes is shown here, and its silent faults happen.

What torch says of a mistake is in test_torch_names_it.py; other faults without an error
are in the notebooks to which their rows lead.
"""

import copy
import math
import re
import sys

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from common.gpt import GPT
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
def test_a_parameter_group_without_parameters(tmp_path):
    model = nn.Linear(4, 4)
    groups = [{"params": [], "lr": 1e-5}, {"params": list(model.parameters())}]
    both = model, torch.optim.AdamW(groups)
    take_steps(*both)
    save(tmp_path, *both)
    load(tmp_path, *both)
    with pytest.raises(KeyError, match="betas"):
        take_steps(*both)


@release
@in_group
def test_a_scheduler_takes_the_decayed_rate_after_dcp_load(tmp_path):
    before, after = make(), make()
    scheduler, right = CosineAnnealingLR(before[1], 10), make()
    again = CosineAnnealingLR(right[1], 10)  # before loading
    for _ in range(3):
        take_steps(*before, number=1)
        scheduler.step()
    save(tmp_path, *before)
    load(tmp_path, *after)
    words = "param 'initial_lr' is not specified in param_groups[0]"
    with pytest.raises(KeyError, match=re.escape(words)):
        CosineAnnealingLR(after[1], 10, last_epoch=2)
    assert CosineAnnealingLR(after[1], 10).base_lrs[0] < 0.08
    load(tmp_path, *right)
    again.load_state_dict(scheduler.state_dict())
    assert again.base_lrs == [0.1]
    assert right[1].param_groups[0]["lr"] == before[1].param_groups[0]["lr"]


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


@release
@in_group
def test_clipping_weights_of_two_meshes():
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    parts = [fully_shard(nn.Linear(4, 4), mesh=mesh[name]) for name in "ab"]
    parts[1](parts[0](torch.ones(2, 4))).square().sum().mul(1000).backward()
    gradients = [[weight.grad for weight in part.parameters()] for part in parts]
    norms = [nn.utils.get_total_norm(each).full_tensor() for each in gradients]
    total = torch.stack(norms).norm()
    for part in parts:
        nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, total)
    clipped = torch.stack([one.full_tensor().norm() for one in sum(gradients, [])])
    assert total > 1 and abs(clipped.norm() - 1) < 1e-4


def test_a_collective_without_a_group():
    words = "Default process group has not been initialized"
    with pytest.raises(ValueError, match=words):
        dist.barrier()


def test_weights_of_zero_have_a_norm_of_0_and_a_loss_of_ln_vocabulary():
    model, tokens = GPT(32, 8, 16, 2, 2), torch.arange(8)[None]
    nn.utils.vector_to_parameters(
        torch.zeros(sum(weight.numel() for weight in model.parameters())),
        model.parameters(),
    )
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    assert abs(loss.item() - math.log(32)) < 1e-5
    assert nn.utils.get_total_norm([w.grad for w in model.parameters()]) == 0


@release
def test_a_function_that_is_compiled_for_every_shape():
    for dynamic, gives_up in ((False, True), (True, False)):
        program = (
            "import torch\n"
            f"f = torch.compile(lambda x: x * 2, backend='eager', dynamic={dynamic})\n"
            "for size in range(2, 12): f(torch.ones(size))\n"
        )
        done = commands.run([sys.executable, "-c", program])
        assert ("hit config.recompile_limit (8)" in done.stderr) == gives_up


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


def reduce_metrics(rank):
    """Average what a rank has logged, where the other one has logged something else."""
    metrics = [{"mask": 10.0, "kpt": 100.0}, {"kpt": 200.0, "text": 5.0}][rank]
    for name, value in metrics.items():
        total = torch.tensor(value)
        dist.all_reduce(total)
        metrics[name] = total.item() / 2
    assert rank or metrics == {
        "mask": 105,
        "kpt": 52.5,
    }  # of mask and kpt, kpt and text


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


def penalty(rank):
    """A term of the loss over sharded weights, by full_tensor, is that of a process."""
    torch.manual_seed(0)
    one = nn.Linear(4, 4)
    model, batch = fully_shard(copy.deepcopy(one)), torch.randn(4, 4)
    terms = [weight.square().sum() for weight in one.parameters()]
    (one(batch).mean() + sum(terms)).backward()
    terms = [weight.square().sum().full_tensor() for weight in model.parameters()]
    (model(batch[2 * rank :][:2]).mean() + sum(terms)).backward()
    for right, weight in zip(one.parameters(), model.parameters(), strict=True):
        assert weight.grad.full_tensor().allclose(right.grad)


def be_a_rank(rank, function, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    function(rank)
    dist.destroy_process_group()


@release
@pytest.mark.parametrize(
    "function",
    [norms_of_meshes, reduce_metrics, wrap_only_the_adapters, penalty],
)
def test_what_two_ranks_do_without_an_error(function, tmp_path):
    calls = [(rank, function, tmp_path) for rank in (0, 1)]
    commands.call_in_forks(be_a_rank, calls)
