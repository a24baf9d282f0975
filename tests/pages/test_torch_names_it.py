"""docs/symptoms.md quotes what torch says of a mistake: these are made, and say it.

Mistakes that raise no error, or whose error blames something else, are in the
notebooks.
"""

import argparse
import gc
import json
import re
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import commands
from harness.stages import ROOT

pytestmark = pytest.mark.release  # wordings change with torch, and not with a push

PAGE = (ROOT / "docs/symptoms.md").read_text()
ONES = torch.ones(2, 4)


# ---- models --------------------------------------------------------------------------
def layers(number=2, width=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(number)])


def shard(model):
    for part in (*model, model):
        fully_shard(part)
    return model


def backward(model, clip=False):
    model(ONES).sum().backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def grid():
    return dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


def split(*styles):
    """Return two layers of which some are split in a style; None: not in the plan."""
    plan = {str(n): style for n, style in enumerate(styles) if style}
    return parallelize_module(layers(), grid()["tp"], plan)


# ---- mistakes of more than a line ----------------------------------------------------
def penalty_outside_of_forward(_):
    model = shard(layers())
    penalty = sum(weight.square().sum() for weight in model.parameters())
    (model(ONES).sum() + penalty).backward()


def root_before_blocks(_):
    model = fully_shard(layers())
    fully_shard(model[0])
    model(ONES)


def one_block_called(_):
    model = shard(layers())
    model[0](ONES)
    model(ONES)


def inference_mode(_):
    model = shard(layers())
    with torch.inference_mode():
        model(ONES)
    backward(model)


def float32_beside_frozen_bfloat16(_):
    frozen = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(4, 4, bias=False))
    fully_shard(model)(ONES.bfloat16())


class CalledTwice(nn.Linear):
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


# ---- mistakes with files -------------------------------------------------------------
def load(saved, wanted, folder):
    dcp.save({"state": saved}, checkpoint_id=folder / "saved")
    dcp.load({"state": wanted}, checkpoint_id=folder / "saved")


def load_another(model, folder):
    load(shard(layers()).state_dict(), model.state_dict(), folder)


def a_weight_without_a_gradient(folder):
    states = []
    for take_step in (backward, torch.optim.AdamW):
        model = fully_shard(layers())
        model[1].forward = lambda x: x  # its weight is used nowhere
        optimizer = take_step(model if take_step is backward else model.parameters())
        states.append(get_optimizer_state_dict(model, optimizer))
    load(*states, folder)


def only_what_it_trusts(folder):
    torch.save({"args": argparse.Namespace(lr=0.1)}, folder / "all.pt")
    dist.barrier()
    torch.load(folder / "all.pt")


MISTAKES = {
    # FSDP2
    "aten.embedding.default got mixed": lambda _: fully_shard(
        nn.Sequential(nn.Embedding(4, 4))
    ).forward(torch.ones(2).long()),
    "aten.mm.default got mixed": penalty_outside_of_forward,
    "Invariant encountered: value was None when it should not be": root_before_blocks,
    "FSDP state has already been lazily initialized": one_block_called,
    "c10d.broadcast_.default does not have a sharding strategy": (
        lambda _: DistributedDataParallel(shard(layers()))
    ),
    "object has no attribute 'no_sync'": lambda _: shard(layers()).no_sync(),
    "object has no attribute 'module'": lambda _: shard(layers()).module,
    "Inplace update to inference tensor outside InferenceMode is not allowed": (
        inference_mode
    ),
    "FSDP expects uniform original parameter dtype but got": lambda _: fully_shard(
        nn.Sequential(layers(1), layers(1).bfloat16())
    )(ONES),
    "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float": (
        float32_beside_frozen_bfloat16
    ),
    "None of the inputs have requires_grad=True. Gradients will be None": (
        lambda _: checkpoint(layers(), ONES, use_reentrant=True)
    ),
    "mark a variable ready only once": lambda _: backward(
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), CalledTwice(4, 4)))
    ),
    # tensor parallelism
    "aten._foreach_norm.Scalar got mixed": lambda _: backward(
        split(None, ColwiseParallel(output_layouts=Replicate())), clip=True
    ),
    "a and b must have same reduction dim": (
        lambda _: split(ColwiseParallel(), ColwiseParallel())(ONES)
    ),
    "aten.addmm.default got mixed": lambda _: split(
        ColwiseParallel(use_local_output=False)
    )(ONES),
    "aten.native_layer_norm.default got mixed": lambda _: parallelize_module(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        grid()["tp"],
        {"0": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)},
    )(ONES),
    "mat1 and mat2 shapes cannot be multiplied": (
        lambda _: split(ColwiseParallel())(ONES)
    ),
    # checkpoints
    "Missing key in checkpoint state_dict: ...step.": a_weight_without_a_gradient,
    "Missing key in checkpoint state_dict: ..._orig_mod.": lambda folder: load_another(
        nn.Sequential(torch.compile(layers(1)[0])), folder
    ),
    "Missing key in checkpoint state_dict: ...": (
        lambda folder: load_another(shard(layers(3)), folder)
    ),
    "Size mismatch between saved": (
        lambda folder: load_another(shard(layers(width=8)), folder)
    ),
    "No such file or directory: '.../.metadata'": (
        lambda folder: dcp.load(layers().state_dict(), checkpoint_id=folder / "none")
    ),
    "UnpicklingError: Weights only load failed": only_what_it_trusts,
}
UNLIKE = {  # torch 2.11 does not say these
    "No such file or directory: '.../.metadata'",
    "aten._foreach_norm.Scalar got mixed",
}


# ---- the proof -----------------------------------------------------------------------
def get_message(mistake, folder):
    """Return what a mistake says: its warnings, and its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = ""
        try:
            mistake(folder)
        except (Exception, dcp.CheckpointException) as raised:  # not an Exception
            error = f"{type(raised).__name__}: {raised}"
    return "\n".join([*(str(warning.message) for warning in caught), error])


def be_a_rank(rank, folder):
    """Be one of two ranks that make all mistakes; write what each says to a file."""
    store = dist.FileStore(str(folder / "store"), 2)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    said = {}
    for number, (words, mistake) in enumerate(MISTAKES.items()):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        torch.manual_seed(0)
        said[words] = get_message(mistake, own)
        gc.collect()
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(said))
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """Return {words: what the mistake says, on either rank}."""
    folder = tmp_path_factory.mktemp("mistakes")
    commands.call_in_forks(be_a_rank, [(rank, folder) for rank in range(2)])
    one, other = (json.loads((folder / f"{n}.json").read_text()) for n in range(2))
    return {words: f"{one[words]}\n{other[words]}" for words in MISTAKES}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_says_what_its_row_quotes(words, messages):
    assert f"`{words}`" in PAGE, "no row for this mistake"
    if words in UNLIKE and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 does not say it")
    pattern = ".*".join(map(re.escape, words.split("...")))
    assert re.search(pattern, messages[words]), messages[words]
