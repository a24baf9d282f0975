"""your_own_script/hugging_face: models of each kind that its page names are sharded.

Each is tiny and random. On two ranks it has the weights and buffers of from_pretrained,
trains what one process trains, and is saved under the names of a download.
"""

import contextlib
import gc
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers import AutoModelForCTC
from transformers import AutoModelForImageClassification
from transformers import AutoModelForImageTextToText
from transformers import AutoModelForSeq2SeqLM
from transformers import AutoModelForSpeechSeq2Seq

from harness import commands
from tests.conftest import only_in_release
from tests.hugging_face_harness import SCRIPTS
from tests.training import load_program

pytestmark = [pytest.mark.ci, pytest.mark.slow]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = SIZES | TOKENS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = SIZES | {"image_size": 16, "patch_size": 8, "num_hidden_layers": 3}
CODER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
CODER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
CODER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
IMAGE = 5  # the token in whose place an image is put


def tokens(draw, *lengths):
    """Return token numbers that are no special ones: {name: tensor}."""
    return {"input_ids": torch.randint(8, 64, lengths or (1, 12), generator=draw)}


def image_and_text(draw):
    """Return four tokens of an image of 16 x 16 pixels, and text after them."""
    found = tokens(draw)
    found["input_ids"][:, 1:5] = IMAGE
    return {**found, "pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}


def image_of_smolvlm(draw):
    found = image_and_text(draw)
    found["input_ids"] = torch.cat([found["input_ids"], tokens(draw)["input_ids"]], 1)
    found["input_ids"][:, 2:5] = 9
    return {**found, "pixel_values": found["pixel_values"][None]}


def image_of_qwen(draw):
    found = tokens(draw)
    found["input_ids"][:, 1:6] = torch.tensor([6, *[IMAGE] * 4])
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=draw)
    grid = torch.tensor([[1, 4, 4]])
    return {**found, "pixel_values": pixels, "image_grid_thw": grid}


def sound(draw):
    features = torch.randn(1, 16, 40, generator=draw)
    decoder = tokens(draw, 1, 6)["input_ids"]
    return {"input_features": features, "decoder_input_ids": decoder}


def wave(draw):
    return {"input_values": torch.randn(1, 400, generator=draw)}


def image(draw):
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}


def text_to_text(draw):
    decoder = tokens(draw, 1, 6)["input_ids"]
    return {**tokens(draw), "decoder_input_ids": decoder}


def both_lists(model):
    base = model.base_model
    return [part.layers for part in (base.encoder, base.decoder)]


def both_stacks(model):
    return [model.encoder.block, model.decoder.block]


def layers_of_text(model):
    return [model.model.language_model.layers]


@dataclass
class Kind:
    """A kind of model; the table of the page has the same."""

    config: transformers.PreTrainedConfig
    auto_class: type = AutoModelForCausalLM
    make_inputs: callable = tokens
    lists: callable = None  # of a model: what shard_model is given
    from_rank_0: bool = False
    says: tuple = ()  # what check_loading.py finds


def make_kinds():
    t = transformers
    mamba = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2} | TOKENS
    mamba |= {"state_size": 8, "n_groups": 1, "num_hidden_layers": 2, "chunk_size": 4}
    h1 = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
    h1 |= {"mamba_d_state": 8, "mamba_chunk_size": 4, "head_dim": 8}
    jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
    jamba |= {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8}
    jamba |= {"mamba_dt_rank": 4, "use_mamba_kernels": False}
    qwen = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 8}
    qwen |= {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    }
    deepseek = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    deepseek |= {
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "v_head_dim": 8,
    }
    deepseek |= {
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1,
    }
    deepseek |= {"moe_intermediate_size": 16, "num_key_value_heads": 4}
    wav = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
    wav |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8} | NO_DROPOUT
    wav |= {"num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0}
    llava = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**VISION),
        text_config=t.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )
    smol = t.SmolVLMConfig(
        vision_config=VISION,
        text_config=t.LlamaConfig(**TEXT).to_dict(),
        image_token_id=IMAGE,
        scale_factor=2,
    )
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "fullatt_block_indexes": [1]}
    vision |= {"window_size": 16}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    qwen_vl = t.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=TEXT | {"num_hidden_layers": 3, "rope_parameters": rope},
        image_token_id=IMAGE,
        vision_start_token_id=6,
    )
    whisper = {"num_mel_bins": 16, "max_source_positions": 20, "vocab_size": 64}
    whisper |= {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
    whisper |= {"decoder_start_token_id": 0, "max_target_positions": 16}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 |= {"vocab_size": 64, "dropout_rate": 0.0, "decoder_start_token_id": 2}
    return {
        "mamba2": Kind(t.Mamba2Config(**mamba)),
        "falcon_h1": Kind(t.FalconH1Config(**TEXT, **h1)),
        "jamba": Kind(t.JambaConfig(**TEXT, **jamba), from_rank_0=True),
        "qwen3_next": Kind(
            t.Qwen3NextConfig(**TEXT | EXPERTS | qwen), from_rank_0=True
        ),
        "deepseek_v3": Kind(t.DeepseekV3Config(**TEXT | deepseek), from_rank_0=True),
        "llava": Kind(
            llava,
            AutoModelForImageTextToText,
            image_and_text,
            layers_of_text,
            from_rank_0=True,
        ),
        "qwen2_5_vl": Kind(
            qwen_vl, AutoModelForImageTextToText, image_of_qwen, from_rank_0=True
        ),
        "smolvlm": Kind(smol, AutoModelForImageTextToText, image_of_smolvlm),
        "whisper": Kind(
            t.WhisperConfig(**CODER, **whisper),
            AutoModelForSpeechSeq2Seq,
            sound,
            both_lists,
            says=("frozen here only: model.encoder.embed_positions.weight",),
        ),
        "wav2vec2": Kind(
            t.Wav2Vec2Config(**SIZES, **wav, vocab_size=16), AutoModelForCTC, wave
        ),
        "t5": Kind(t.T5Config(**t5), AutoModelForSeq2SeqLM, text_to_text, both_stacks),
        "vit": Kind(
            t.ViTConfig(**VISION),
            AutoModelForImageClassification,
            image,
            from_rank_0=True,
        ),
    }


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "final_dropout": 0.0}
NO_DROPOUT |= {"activation_dropout": 0.0, "feat_proj_dropout": 0.0}
NAMES = ("mamba2", "falcon_h1", "jamba", "qwen3_next", "deepseek_v3", "llava")
NAMES += ("qwen2_5_vl", "smolvlm", "whisper", "wav2vec2", "t5", "vit")
ON_PUSH = ("falcon_h1", "llava")


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
    """Return a sharded model of a folder, as fsdp.py loads it."""
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
    """Return the model of one process, in one dtype, with what is frozen by default."""
    plain = kind.auto_class.from_pretrained(folder, dtype=torch.float64)
    for weight in plain.parameters():
        weight.data = weight.data.double()
    return plain


def train(model, samples):
    """Take two steps; a sample's loss does not depend on what is beside it."""
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
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
    kind = make_kinds()[name]
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    sharded = load_program(SCRIPTS / "sharded.py")
    exact = load_program(SCRIPTS.parent / "check_yours.py").KeepFloat64()
    torch.set_default_dtype(torch.float64)
    model = load(kind, folder / "read", sharded, mesh)
    plain = load_plain(kind, folder / "read")
    checks = load_program(SCRIPTS / "check_loading.py")
    (*said,) = checks.find_differences(model, plain)
    assert said == [*kind.says]
    for name, weight in model.named_parameters():  # Whisper's positions
        plain.get_parameter(name).requires_grad_(weight.requires_grad)
    draw = torch.Generator().manual_seed(1)
    samples = [kind.make_inputs(draw) for _ in range(world_size)]
    samples = [
        {n: x.double() if x.is_floating_point() else x for n, x in each.items()}
        for each in samples
    ]
    with exact:
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
        plain.save_pretrained(folder / "plain")
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
    "name", [only_in_release(each, unless=each in ON_PUSH) for each in NAMES]
)
def test_a_kind_of_model(name, tmp_path):
    kind = make_kinds()[name]
    save_model(kind, tmp_path / "read")
    calls = [(rank, 2, name, tmp_path) for rank in range(2)]
    commands.call_in_forks(be_a_rank, calls)
    assert names_in(tmp_path / "written") == names_in(tmp_path / "plain")
    assert names_in(tmp_path / "written") == names_in(tmp_path / "read")
    _, info = kind.auto_class.from_pretrained(
        tmp_path / "written", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
