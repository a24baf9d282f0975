"""docs/symptoms.md quotes what torch says of a mistake: each is made here, and says it.

These are mistakes with FSDP2, with pretrained models, with tensor parallelism and with
pipelines whose error or warning is enough to find the row. Look for the words of your
message: the function below them is a program that gets it. Mistakes that raise no
error, or whose error blames something else, are in the notebooks what_goes_wrong.ipynb
and fsdp_mistakes.ipynb.
"""

import copy
import gc
import json
import re
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from common.gpt import GPT
from common.gpt import Attention
from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from tests.symptoms_harness import PAGE
from tests.symptoms_harness import rows
from tests.training import TRANSFORMERS

sys.path.insert(0, str(ROOT / first_with("tensor_parallel") / "demos"))

import mistakes

pytestmark = pytest.mark.release  # wordings change with torch, and not with a push

commands.preloaded += TRANSFORMERS

FILE = "../tests/pages/test_torch_names_it.py"
MISTAKES = {}  # {the words of a row: the function that makes the mistake}
UNLIKE = {}  # {the words of a row: a version of torch that words it in another way}


def says(words, unlike=None):
    """Add a function to the table; `...` in the words stands for anything."""

    def add(mistake):
        assert words not in MISTAKES
        MISTAKES[words], UNLIKE[words] = mistake, unlike
        return mistake

    return add


# ---- FSDP2 ---------------------------------------------------------------------------
def make(depth=2, width=16, heads=2):
    torch.manual_seed(0)
    return GPT(32, 8, width, depth, heads)


def make_mesh():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model, mesh=None):
    mesh = mesh or make_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def get_loss(model):
    tokens = torch.arange(16).view(2, 8)
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@says("aten.embedding.default got mixed torch.Tensor and DTensor")
def forward_called(_):
    shard(make()).forward(torch.arange(8)[None])


@says("Invariant encountered: value was None when it should not be")
def root_before_blocks(_):
    model = fully_shard(make(), mesh=make_mesh())
    for block in model.blocks:
        fully_shard(block, mesh=make_mesh())
    get_loss(model)


@says("only be applied to a module once")
def fully_shard_twice(_):
    shard(shard(make()))


@says("FSDP state has already been lazily initialized")
def one_block_called(_):
    model = shard(make())
    model.blocks[0](torch.ones(2, 8, 16))
    get_loss(model)


@says("c10d.broadcast_.default does not have a sharding strategy")
def ddp_around_fsdp(_):
    nn.parallel.DistributedDataParallel(shard(make()))


@says("object has no attribute 'no_sync'")
def no_sync(_):
    shard(make()).no_sync()


@says("object has no attribute 'module'")
def module(_):
    shard(make()).module.state_dict()


@says("aten.copy_.default got mixed torch.Tensor and DTensor")
def whole_weights_loaded(_):
    shard(make()).load_state_dict(make().state_dict())


@says("already managed by another FSDP group", unlike="2.11")
def tied_in_two_groups(_):
    model = make()
    model.head.weight = model.tokens.weight
    for part in (model.tokens, model.head, model):
        fully_shard(part, mesh=make_mesh())
    get_loss(model)


@says("Inplace update to inference tensor outside InferenceMode is not allowed")
def inference_mode(_):
    evaluate_in_inference_mode(shard(make()))


@says("Inference tensors do not track version counter", unlike="2.15")
def inference_mode_on_one_rank(_):
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    evaluate_in_inference_mode(shard(make(), mesh["one"]))


def evaluate_in_inference_mode(model):
    with torch.inference_mode():
        get_loss(model)
    get_loss(model).backward()


@says("FSDP does not support deepcopy")
def deepcopy(_):
    copy.deepcopy(shard(make()))


@says("FSDP expects uniform original parameter dtype but got")
def norms_in_another_dtype(_):
    model = make().bfloat16()
    for block in model.blocks:
        block.norm1.float()
    get_loss(shard(model))


@says("expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float")
def trained_float32_beside_frozen_bfloat16(_):
    frozen = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    adapter = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(frozen, adapter)
    fully_shard(model, mesh=make_mesh())(torch.ones(2, 4, dtype=torch.bfloat16))


# ---- pretrained models ---------------------------------------------------------------
def load_llama(folder, tied=False):
    """Write a small model without a file on rank 0; return it, sharded, on all."""
    name = "tied" if tied else "llama"
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
        model.save_pretrained(folder / name)
        model.base_model.save_pretrained(folder / f"{name}-base")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    return fully_shard(model, mesh=make_mesh())


@says("Missing key in checkpoint state_dict: lm_head.weight.")
def state_dict_of_a_tied_model(folder):
    state = load_llama(folder, tied=True).state_dict()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder / "tied"))


@says("Missing key in checkpoint state_dict: model.embed_tokens.weight.")
def names_of_a_base_model(folder):
    weights = dict(load_llama(folder, tied=True).named_parameters())
    reader = dcp.HuggingFaceStorageReader(folder / "tied-base")
    dcp.load(weights, storage_reader=reader)


@says("with a meta device context manager")
def from_pretrained_on_meta(folder):
    load_llama(folder)
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")


@says(
    "Operator aten._is_all_true.default does not have a sharding strategy registered",
    unlike="2.11",
)
def embedding_resized_late(folder):
    load_llama(folder).resize_token_embeddings(40)


@says("Attempted to access the data pointer on an invalid python storage")
def save_pretrained_without_a_state_dict(folder):
    load_llama(folder).save_pretrained(folder / "saved")


@says("is deprecated and will be removed in v6")
def old_name(folder):
    load_llama(folder).gradient_checkpointing_enable()


@says("Missing key in checkpoint state_dict: ..._orig_mod.")
def block_compiled_before_loading(folder):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=make_mesh())
    dcp.save(model.state_dict(), checkpoint_id=folder / "blocks")
    model = nn.Sequential(torch.compile(nn.Linear(4, 4)))
    dcp.load(dict(model.named_parameters()), checkpoint_id=folder / "blocks")


# ---- tensor parallelism --------------------------------------------------------------
def make_grid(names=("dp", "tp")):
    """Return a mesh with one tp group of all ranks."""
    return dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)


def make_plan(**others):
    """Return the stage's plan; others: what is different for some layers."""
    plan = mistakes.make_plan()
    changed = {name: others.get(name.split(".")[-1], plan[name]) for name in plan}
    return {name: part for name, part in changed.items() if part}


def make_short_plan():
    """Return a plan of the matrices in the blocks; all else is left as it is."""
    return {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def split(model, mesh, **others):
    parallelize_module(model, mesh["tp"], make_plan(**others))
    distribute_module(model, mesh["tp"])
    return model


@says("unflatten: Provided sizes ... don't multiply up to the size of dim")
def heads_that_tp_does_not_divide(_):
    get_loss(split(make(width=12, heads=3), make_grid()))


class Fixed(Attention):
    """The number of heads is fixed."""

    def forward(self, x):
        qkv = self.qkv(x).view(*x.shape[:2], 2, 3, self.head_dim)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@says("shape '[...]' is invalid for input of size")
def number_of_heads_fixed(_):
    model = make()
    for block in model.blocks:
        block.attention = Fixed(16, 2)
    get_loss(split(model, make_grid()))


@says("Found placements length: 1, and device_mesh.ndim: 2")
def whole_mesh_for_parallelize_module(_):
    parallelize_module(make(), make_grid(), make_plan())


@says("Cannot distribute a DTensor with device mesh ... to a different device mesh")
def fully_shard_first(_):
    mesh = make_grid()
    split(shard(make(), mesh["dp"]), mesh)


@says("Cannot concatenate overlapping meshes")
def whole_mesh_for_fully_shard(_):
    mesh = make_grid()
    fully_shard(split(make(), mesh), mesh=mesh)


@says("All operands in aten.stack.default must have the same mesh")
def weights_of_two_meshes(_):
    mesh = make_grid()
    model = parallelize_module(make(), mesh["tp"], make_short_plan())
    shard(model, mesh["dp"])
    get_loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@says("aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor", unlike="2.11")
def plain_weights_and_clipping(_):
    model = parallelize_module(make(), make_grid()["tp"], make_short_plan())
    get_loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@says("aten._foreach_mul_.Scalar got mixed", unlike="2.11")
def plain_weights_and_foreach(_):
    model = parallelize_module(make(), make_grid()["tp"], make_short_plan())
    get_loss(model).backward()
    torch.optim.AdamW(model.parameters(), foreach=True).step()


@says("Parallelize plan key ... could not be resolved")
def names_that_match_nothing(_):
    plan = {"model.blocks.*.up": ColwiseParallel()}
    parallelize_module(make(), make_grid()["tp"], plan)


@says("a and b must have same reduction dim")
def colwise_twice(_):
    get_loss(split(make(), make_grid(), down=ColwiseParallel()))


@says("aten.addmm.default got mixed torch.Tensor and DTensor")
def only_the_first_of_a_pair(_):
    get_loss(split(make(), make_grid(), down=None))


@says("mat1 and mat2 shapes cannot be multiplied")
def only_the_first_of_a_pair_and_plain_norms(_):
    plan = make_short_plan()
    del plan["blocks.*.down"]
    get_loss(parallelize_module(make(), make_grid()["tp"], plan))


@says("_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding")
def attention_not_in_the_plan(_):
    get_loss(split(make(), make_grid(), qkv=None, out=None))


@says("aten.native_layer_norm.default got mixed torch.Tensor and DTensor")
def norms_not_distributed(_):
    get_loss(parallelize_module(make(), make_grid()["tp"], make_plan()))


@says("aten.nll_loss_forward.default got mixed torch.Tensor and DTensor")
def without_loss_parallel(_):
    head = ColwiseParallel(use_local_output=False)
    get_loss(split(make(), make_grid(), head=head))


@says("aten.nll_loss_backward.default got mixed")
def loss_parallel_around_forward(_):
    head = ColwiseParallel(use_local_output=False)
    model = split(make(), make_grid(), head=head)
    with loss_parallel():
        loss = get_loss(model)
    loss.backward()


@says("IndexError: Target ... is out of bounds")
def logits_left_split(_):
    model = split(make(), make_grid(), head=ColwiseParallel())
    tokens = torch.arange(24, 32)[None]  # of a vocabulary of 32: in the second half
    functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


# ---- pipelines -----------------------------------------------------------------------
def make_schedule(micro_batches=2):
    """Return the schedule of two linear layers, of which each rank has one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=2))  # the other rank waits so long
    cpu = torch.device("cpu")
    stage = PipelineStage(nn.Linear(4, 4), rank, ranks, cpu, group=group)
    loss_fn = functional.mse_loss
    return Schedule1F1B(stage, micro_batches, loss_fn=loss_fn), stage


@says("Number of microbatches ... must be")
def fewer_micro_batches_than_ranks(_):
    make_schedule(micro_batches=1)


@says("loss_fn and target required", unlike="2.11")
def targets_on_the_first_rank(_):
    schedule, stage = make_schedule()
    if stage.is_first:
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    else:
        schedule.step()


@says("forward() missing 1 required positional argument")
def inputs_on_the_last_rank(_):
    schedule, stage = make_schedule()
    if stage.is_first:
        schedule.step()
    else:
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


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
    for words, mistake in MISTAKES.items():
        said[words] = get_message(mistake, folder)
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


def quoted():
    """Return the words of all rows that link to this file."""
    seen = [see for see, _, file, _ in rows() if file == FILE]
    return [words for see in seen for words in re.findall(r"`([^`]+)`", see)]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_says_what_its_row_quotes(words, messages):
    assert words in quoted(), f"{PAGE} has no row for this mistake"
    if torch.__version__.startswith(f"{UNLIKE[words]}."):
        pytest.skip(f"torch {torch.__version__} says it in other words")
    pattern = ".*".join(map(re.escape, words.split("...")))
    assert re.search(pattern, messages[words]), messages[words]


def test_every_row_that_links_here_has_its_mistake():
    assert set(quoted()) == set(MISTAKES)
