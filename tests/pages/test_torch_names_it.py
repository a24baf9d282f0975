"""docs/symptoms.md quotes what torch says of a mistake: each is made here, and says it.

Look for the words of your message: what stands beside them is a program that gets it.
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
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from common.gpt import GPT
from harness import commands
from harness.stages import ROOT
from tests.training import TRANSFORMERS

pytestmark = pytest.mark.release  # wordings change with torch, and not with a push

commands.preloaded += TRANSFORMERS

PAGE = (ROOT / "docs/symptoms.md").read_text()
ONES = torch.ones(2, 4)


# ---- models --------------------------------------------------------------------------
def layers(number=2, width=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(number)])


def shard(model, mesh=None):
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def backward(model, clip=False, **adamw):
    model(ONES).sum().backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def grid():
    return dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


def split(*styles):
    """Return two layers of which some are split in a style; None: not in the plan."""
    plan = {str(n): style for n, style in enumerate(styles) if style}
    return parallelize_module(layers(), grid()["tp"], plan)


def split_gpt(heads=2, **others):
    """Return the loss of a GPT that is split as in stage 14, except some layers."""
    columns, rows = ColwiseParallel(), RowwiseParallel(use_local_output=False)
    same = RowwiseParallel(input_layouts=Replicate(), use_local_output=False)
    plan = {"tokens": same, "positions": same, "attention.qkv": columns}
    plan |= {"attention.out": rows, "up": columns, "down": rows}
    plan |= {"head": ColwiseParallel(output_layouts=Replicate())} | others
    outside = ("tokens", "positions", "head")
    plan = {n if n in outside else f"blocks.*.{n}": p for n, p in plan.items() if p}
    model, mesh = GPT(32, 8, 4 * heads, 1, heads), grid()["tp"]
    distribute_module(parallelize_module(model, mesh, plan), mesh)
    tokens = torch.arange(24, 32)[None]  # in the second half of the vocabulary
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


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


def tied_in_two_groups(_):
    model = layers()
    model[1].weight = model[0].weight
    shard(model)(ONES)


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


def first_step_under_no_sync(_):
    wrapped = DistributedDataParallel(layers(), static_graph=True)
    with wrapped.no_sync():
        wrapped(ONES).sum().backward()


def transposed_buffer(_):
    model = layers()
    model.register_buffer("pe", torch.zeros(1, 5, 3).transpose(0, 1))
    DistributedDataParallel(model)(ONES)


def two_meshes(_):
    model = split(ColwiseParallel(use_local_output=False))
    fully_shard(model[1], mesh=grid()["dp"])
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def loss_parallel_around_forward(_):
    with loss_parallel():
        loss = split_gpt(head=ColwiseParallel(use_local_output=False))
    loss.backward()


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


def llama(folder, tied=False):
    """Write a small model without a file on rank 0; return it, sharded, on all."""
    if dist.get_rank() == 0:
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / "llama")
        model.base_model.save_pretrained(folder / "base")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    return fully_shard(model)


def read(weights, path):
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(path))


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
    "aten.copy_.default got mixed torch.Tensor and DTensor": (
        lambda _: shard(layers()).load_state_dict(layers().state_dict())
    ),
    "already managed by another FSDP group": tied_in_two_groups,
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
    "Attempted to access the data pointer on an invalid python storage": (
        lambda folder: llama(folder).save_pretrained(folder / "saved")
    ),
    # DDP, and its sampler
    "sampler option is mutually exclusive with shuffle": (
        lambda _: DataLoader(range(4), sampler=range(2), shuffle=True)
    ),
    "mark a variable ready only once": lambda _: backward(
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), CalledTwice(4, 4)))
    ),
    "expect_autograd_hooks_ INTERNAL ASSERT FAILED": first_step_under_no_sync,
    "device_ids and output_device arguments only work with": (
        lambda _: DistributedDataParallel(layers(), device_ids=[0])
    ),
    "DistributedDataParallel is not needed when a module doesn't": (
        lambda _: DistributedDataParallel(layers().requires_grad_(False))
    ),
    "refer to a single memory location": transposed_buffer,
    "appears not to match sizes of the same param in process 0": lambda _: (
        DistributedDataParallel(
            layers(width=4 + dist.get_rank()),
            process_group=dist.new_group(
                timeout=timedelta(seconds=2)
            ),  # the other waits
        )
    ),
    # tensor parallelism
    "aten._foreach_norm.Scalar got mixed": lambda _: backward(
        split(None, ColwiseParallel(output_layouts=Replicate())), clip=True
    ),
    "aten._foreach_mul_.Scalar got mixed": lambda _: backward(
        split(None, ColwiseParallel(output_layouts=Replicate())), foreach=True
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
    "shape '[...]' is invalid for input of size": (
        lambda _: split(None, ColwiseParallel())(ONES).view(2, 2, 2)
    ),
    "unflatten: Provided sizes ... don't multiply up to the size of dim": (
        lambda _: split_gpt(heads=3)
    ),
    "Target ... is out of bounds": lambda _: split_gpt(head=ColwiseParallel()),
    "aten.nll_loss_forward.default got mixed": (
        lambda _: split_gpt(head=ColwiseParallel(use_local_output=False))
    ),
    "aten.nll_loss_backward.default got mixed": loss_parallel_around_forward,
    "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding": (
        lambda _: split_gpt(**{"attention.qkv": None, "attention.out": None})
    ),
    "Found placements length: 1, and device_mesh.ndim: 2": (
        lambda _: parallelize_module(layers(), grid(), {"0": ColwiseParallel()})
    ),
    "Cannot concatenate overlapping meshes": (
        lambda _: fully_shard(split(ColwiseParallel()), mesh=grid())
    ),
    "Cannot distribute a DTensor with device mesh ... to a different device mesh": (
        lambda _: parallelize_module(
            shard(layers(), grid()["dp"]), grid()["tp"], {"0": ColwiseParallel()}
        )
    ),
    "All operands in aten.stack.default must have the same mesh": two_meshes,
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
    "Missing key in checkpoint state_dict: lm_head.weight.": lambda folder: read(
        llama(folder, tied=True).state_dict(), folder / "llama"
    ),
    "Missing key in checkpoint state_dict: model.embed_tokens.weight.": (
        lambda folder: read(
            dict(llama(folder, tied=True).named_parameters()), folder / "base"
        )
    ),
    "metadata is None": (
        lambda folder: dcp.load(layers().state_dict(), checkpoint_id=folder / "none")
    ),
    "No such file or directory: '.../.metadata'": (
        lambda folder: dcp.load(layers().state_dict(), checkpoint_id=folder / "none")
    ),
    "UnpicklingError: Weights only load failed": only_what_it_trusts,
    "unexpected pos ... vs": lambda _: torch.save(torch.ones(100_000), "/dev/full"),
}
UNLIKE = {  # torch 2.11 does not say these
    "No such file or directory: '.../.metadata'",
    "already managed by another FSDP group",
    "aten._foreach_norm.Scalar got mixed",
    "aten._foreach_mul_.Scalar got mixed",
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
