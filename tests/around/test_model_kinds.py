"""your_own_script/hugging_face: models of each kind that its page names are sharded.

Each is small and random. On two ranks it has the weights and buffers of
from_pretrained, trains what one process trains, and is saved as a download has it.
"""

import contextlib
import gc
import io
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers import AutoModelForImageTextToText
from transformers import AutoModelForSeq2SeqLM

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import TRANSFORMERS
from tests.training import load_program

pytestmark = [pytest.mark.ci, pytest.mark.slow]
commands.preloaded += TRANSFORMERS

SCRIPTS = ROOT / "your_own_script/hugging_face"

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = SIZES | TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
VISION = SIZES | {"image_size": 16, "patch_size": 8, "num_hidden_layers": 3}
IMAGE = 5  # the token in whose place an image is put


# ---- inputs --------------------------------------------------------------------------
def tokens(draw, count=12):
    """Return token numbers that are no special ones: {name: tensor}."""
    return {"input_ids": torch.randint(8, 64, (1, count), generator=draw)}


def image_and_text(draw):
    """Return four tokens of an image of 16 x 16 pixels, and text after them."""
    found = tokens(draw)
    found["input_ids"][:, 1:5] = IMAGE
    pixels = torch.randn(1, 3, 16, 16, generator=draw)
    return {**found, "pixel_values": pixels}


def text_to_text(draw):
    return {**tokens(draw), "decoder_input_ids": tokens(draw, 6)["input_ids"]}


# ---- kinds ---------------------------------------------------------------------------
@dataclass
class Kind:
    """A kind of model."""

    config: transformers.PreTrainedConfig
    auto_class: type = AutoModelForCausalLM
    make_inputs: callable = tokens
    lists: callable = None  # of a model: what shard_model is given
    from_rank_0: bool = False


def small(name, **changes):
    """Return a configuration of transformers, made small by make_model.py."""
    config = getattr(transformers, f"{name}Config")(**changes)
    return load_program(SCRIPTS / "make_model.py").shrink(config, 64, 32, 2)


def llava():
    vision, text = transformers.CLIPVisionConfig, transformers.LlamaConfig
    parts = {"vision_config": vision(**VISION), "text_config": text(**TEXT)}
    return transformers.LlavaConfig(**parts, image_token_index=IMAGE)


def falcon_h1():
    h1 = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
    h1 |= {"mamba_d_state": 8, "mamba_chunk_size": 4, "head_dim": 8}
    return transformers.FalconH1Config(**TEXT, **h1)


def layers_of_text(model):
    return [model.model.language_model.layers]


def both_stacks(model):
    return [model.encoder.block, model.decoder.block]


KINDS = {
    "falcon_h1": lambda: Kind(falcon_h1()),
    "mixtral": lambda: Kind(small("Mixtral"), from_rank_0=True),
    "deepseek_v3": lambda: Kind(small("DeepseekV3"), from_rank_0=True),
    "gpt_neox": lambda: Kind(small("GPTNeoX"), from_rank_0=True),
    "qwen3": lambda: Kind(small("Qwen3")),
    "gemma3": lambda: Kind(small("Gemma3Text")),
    "phi3": lambda: Kind(small("Phi3", pad_token_id=0)),
    "granite": lambda: Kind(small("Granite")),
    "llava": lambda: Kind(
        llava(), AutoModelForImageTextToText, image_and_text, layers_of_text, True
    ),
    "t5": lambda: Kind(
        small("T5", dropout_rate=0.0, decoder_start_token_id=2),
        AutoModelForSeq2SeqLM,
        text_to_text,
        both_stacks,
    ),
}
ON_PUSH = ("falcon_h1", "llava")


# ---- a model of a kind ---------------------------------------------------------------
class Exact(TorchFunctionMode):
    """Compute in float64 where a model asks for float32, as many norms do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if each is torch.float32 else each for each in args]
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def save_model(kind, folder):
    """Write a small model in bfloat16, as a download has it."""
    torch.manual_seed(0)
    with contextlib.suppress(AttributeError):
        kind.config.experts_implementation = "eager"  # others take no float64
    model = kind.auto_class.from_config(kind.config)
    for weight in model.parameters():  # otherwise some are 0, and so are gradients
        torch.nn.init.normal_(weight, std=0.1)
    model.bfloat16().save_pretrained(folder)


def load(kind, folder, sharded, mesh):
    """Return a sharded model of a folder, as fine_tune.py loads it."""
    model = sharded.make_model(folder, kind.auto_class, torch.float64)
    lists = kind.lists(model) if kind.lists else ()
    sharded.shard_model(model, mesh, bf16=False, lists=lists)
    sharded.allocate(model, torch.device("cpu"))
    if kind.from_rank_0:
        sharded.load_from_rank_0(model, folder, kind.auto_class)
    else:
        sharded.load_weights(model, folder)
    return model


def load_plain(kind, folder):
    """Return the model of one process, in one dtype."""
    plain = kind.auto_class.from_pretrained(folder, dtype=torch.float64)
    for weight in plain.parameters():
        weight.data = weight.data.double()
    return plain


def train(model, samples):
    """Take two steps; a sample's loss does not depend on what is beside it."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        for inputs in samples:
            loss = model(**inputs).logits.square().mean() / len(samples)
            loss.backward()
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def be_a_rank(rank, world_size, name, folder):
    """Load, compare with from_pretrained, train, save; in one of the ranks."""
    kind = KINDS[name]()
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    sharded = load_program(SCRIPTS / "sharded.py")
    torch.set_default_dtype(torch.float64)
    model = load(kind, folder / "read", sharded, mesh)
    plain = load_plain(kind, folder / "read")
    find_differences = load_program(SCRIPTS / "make_model.py").find_differences
    assert not [*find_differences(model, plain)]
    draw = torch.Generator().manual_seed(1)
    samples = [kind.make_inputs(draw) for _ in range(world_size)]
    with Exact():
        train(model, [samples[rank]])
        train(plain, samples)
    before = load_plain(kind, folder / "read").state_dict()
    moved = 0
    for name, weight in plain.state_dict().items():
        assert (whole(model.state_dict()[name]) - weight).abs().max() < 1e-9, name
        moved = max(moved, (weight.double() - before[name].double()).abs().max())
    assert moved > 1e-4
    weights = sharded.gather_weights(model)
    if rank == 0:
        sharded.save_model(model, weights, folder / "written")
    del model
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()


def names_in(folder):
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.parametrize(
    "name", [only_in_release(each, unless=each in ON_PUSH) for each in KINDS]
)
def test_a_kind_of_model(name, tmp_path):
    kind = KINDS[name]()
    save_model(kind, tmp_path / "read")
    calls = [(rank, 2, name, tmp_path) for rank in range(2)]
    commands.call_in_forks(be_a_rank, calls)
    assert names_in(tmp_path / "written") == names_in(tmp_path / "read")
    _, info = kind.auto_class.from_pretrained(
        tmp_path / "written", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]


def find_groups(folder):
    """Be a process that shards a LLaVA: its text, and not the tower of 3 blocks."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    sharded = load_program(SCRIPTS / "sharded.py")
    mesh = dist.init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(llava())
    model.config.text_config.num_hidden_layers = 5
    with pytest.raises(sharded.ModelError, match="there is no list of 5 blocks: "):
        sharded.shard_model(model, mesh, bf16=False)
    model.config.text_config.num_hidden_layers = 2
    with contextlib.redirect_stderr(io.StringIO()) as said:
        sharded.shard_model(model, mesh, bf16=False)
    names = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    torch.save((names, said.getvalue()), folder / "seen")
    dist.destroy_process_group()


def test_blocks_are_found_by_their_number(tmp_path):
    """With a line about what stays whole, if that is much."""
    commands.call_in_forks(find_groups, [(tmp_path,)])
    ends = ["model.language_model.embed_tokens", "lm_head"]
    blocks = [f"model.language_model.layers.{n}" for n in range(2)]
    names, said = torch.load(tmp_path / "seen")
    assert {*names} == {"", *ends, *blocks}
    assert re.fullmatch(r"[0-9,]+ of [0-9,]+ parameters are in no block.*\n", said)
