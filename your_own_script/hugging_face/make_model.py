"""Write a small model that stands for a pretrained one: python make_model.py llama

In the place of llama can be a folder with a config.json. The model is then of that
kind, with fewer and narrower layers. What is written has what a download has, a
config.json and weights in bfloat16, except that the weights are random and that there
is no tokenizer. With --check it is loaded twice, by your fine_tune.py, with what flags
it gets, and by from_pretrained, and what differs is printed. The exit code is then 1.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from torch import distributed as dist
from transformers import AutoConfig
from transformers import GPT2Config
from transformers import LlamaConfig

import fine_tune
import sharded

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = {
    "llama": LlamaConfig(num_key_value_heads=8),
    "llama-tied": LlamaConfig(num_key_value_heads=8, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_positions=128, **NO_DROPOUT),
}
CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}


def shrink(config, vocab_size=256, width=64, depth=4):
    """Make the sizes of a configuration small, in place.

    A part beside the text, such as a vision tower, keeps its widths, with two layers.
    """
    text = config.get_text_config()  # of a model that has only text, config itself
    heads = getattr(text, "num_attention_heads", None) or 0
    fewer = heads > (getattr(text, "num_key_value_heads", None) or heads)
    layers = "num_hidden_layers encoder_layers decoder_layers num_layers"
    inner = "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff"
    attention = "num_attention_heads encoder_attention_heads decoder_attention_heads"
    sizes = {
        "hidden_size d_model moe_intermediate_size": width,
        inner: 2 * width,
        layers: depth,
        f"{attention} num_heads": 4,
        "num_key_value_heads": 2 if fewer else 4,
        "vocab_size": vocab_size,
        "d_kv": width // 4,
        "num_experts num_local_experts n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group topk_group": 1,
        "layer_types": (getattr(text, "layer_types", None) or [])[:depth],
    }
    if not hasattr(text, "qk_rope_head_dim"):  # a DeepSeek's head_dim is this
        sizes["head_dim"] = width // 4
    set_sizes(text, sizes)
    for name in config.sub_configs:
        if (part := getattr(config, name)) is not text:
            set_sizes(part, {"num_hidden_layers depth": 2, "out_hidden_size": width})
    for each in (config, text):
        set_sizes(each, {name: 0 for name in vars(each) if name.endswith("_token_id")})
    return config


def set_sizes(config, sizes):
    """Set the entries that a configuration has, unless it computes them."""
    for names, size in sizes.items():
        for name in names.split():
            own_name = config.attribute_map.get(name, name)
            computed = isinstance(getattr(type(config), own_name, None), property)
            if getattr(config, name, None) is not None and not computed:
                setattr(config, name, size)


def make_config(kind):
    """Return the configuration of one of KINDS, or of a folder's model, made small."""
    if kind in KINDS:
        config = AutoConfig.for_model(**KINDS[kind].to_dict())
        config.architectures = [CLASSES[config.model_type]]
    else:
        config = AutoConfig.from_pretrained(kind)
    return shrink(config)


def find_differences(model, plain):
    """Yield a line for each way in which a sharded model differs from a plain one."""
    ours = {name: weight.full_tensor() for name, weight in model.named_parameters()}
    ours |= dict(model.named_buffers())
    kinds = {"weights": plain.named_parameters(), "buffers": plain.named_buffers()}
    for kind, tensors in kinds.items():
        names = [n for n, x in tensors if not ours[n].equal(x.to(ours[n].dtype))]
        if names:
            yield f"{kind} with other values: {', '.join(names[:3])}"


def check(folder, flags):
    """Yield a line for each difference between what fine_tune.py loads and does not."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    args = fine_tune.make_parser().parse_args([folder, *flags])
    device = torch.device("cpu")
    model = fine_tune.load_model(args, device, dist.init_device_mesh("cpu", (1,)))
    plain_class = type(sharded.make_plain(model, model.dtype))
    plain = plain_class.from_pretrained(folder, dtype=model.dtype)
    yield from find_differences(model, plain)
    inputs, labels = fine_tune.collate(fine_tune.make_dataset(4, seed=2))[0]
    ours, theirs = (
        fine_tune.get_loss_sum(args, each.eval(), inputs, labels, device).item()
        for each in (model, plain)
    )
    if not abs(ours - theirs) <= 1e-5 * abs(theirs):  # nan, too
        yield f"loss {ours:.4f}, with from_pretrained {theirs:.4f}"
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # errors are one line
    add = parser.add_argument
    add("kind", help=f"{', '.join(KINDS)}, or a folder")
    add("--out", help="the folder to write; by default KIND, or small")
    add("--check", action="store_true", help="compare what is loaded")
    args, flags = parser.parse_known_args()  # the others are fine_tune.py's
    if args.kind not in KINDS and not Path(args.kind, "config.json").exists():
        parser.error(f"{args.kind} is none of {', '.join(KINDS)}, nor has config.json")
    out = args.out or (args.kind if args.kind in KINDS else "small")
    try:
        config = make_config(args.kind)
        (name,) = config.architectures or ["none"]
        model_class = getattr(transformers, name)
    except (ValueError, AttributeError) as error:  # of a kind that transformers lacks
        parser.error(str(error).partition("\n")[0])
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    print(f"{out}: {model.num_parameters():,} parameters")
    if args.check:
        try:
            lines = list(check(out, flags))
        except sharded.ModelError as error:
            lines = [str(error)]
        print(*lines or ["loaded as by from_pretrained"], sep="\n")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
