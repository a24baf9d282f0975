"""your_own_script/hugging_face: models of each kind that its page names are sharded.

Each is small and random. On two ranks it has the weights and buffers of
from_pretrained, computes the same output, and is saved as a download has it. That a
sharded model trains what one process trains is in test_hugging_face.py.
"""

import gc
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers import AutoModelForImageTextToText
from transformers import AutoModelForSeq2SeqLM

from harness import commands
from harness.stages import ROOT
from tests.training import TRANSFORMERS
from tests.training import load_program

pytestmark = [pytest.mark.release, pytest.mark.slow]
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


# ---- a model of a kind ---------------------------------------------------------------
def save_model(kind, folder):
    """Write a small model in bfloat16, as a download has it."""
    torch.manual_seed(0)
    model = kind.auto_class.from_config(kind.config)
    for weight in model.parameters():  # otherwise some are 0
        torch.nn.init.normal_(weight, std=0.1)
    model.bfloat16().save_pretrained(folder)


def load(kind, folder, sharded, mesh):
    """Return a sharded model of a folder, as fine_tune.py loads it."""
    model = sharded.make_model(folder, kind.auto_class, torch.float32)
    lists = kind.lists(model) if kind.lists else ()
    sharded.shard_model(model, mesh, bf16=False, lists=lists)
    sharded.allocate(model, torch.device("cpu"))
    if kind.from_rank_0:
        sharded.load_from_rank_0(model, folder, kind.auto_class)
    else:
        sharded.load_weights(model, folder)
    return model


def be_a_rank(rank, world_size, name, folder):
    """Load, compare with from_pretrained, save; in one of the ranks."""
    kind = KINDS[name]()
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    sharded = load_program(SCRIPTS / "sharded.py")
    model = load(kind, folder / "read", sharded, mesh).eval()
    plain = kind.auto_class.from_pretrained(folder / "read", dtype=torch.float32)
    find_differences = load_program(SCRIPTS / "make_model.py").find_differences
    assert not [*find_differences(model, plain)]
    inputs = kind.make_inputs(torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, right = model(**inputs).logits, plain.eval()(**inputs).logits
    assert right.std() > 1e-3
    torch.testing.assert_close(ours, right)
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


@pytest.mark.parametrize("name", KINDS)
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
