"""Write a small model that stands for a pretrained one: python make_model.py llama

In the place of llama can be a folder with a config.json. The model is then of that
kind, with fewer and narrower layers. What is written has what a download has, a
config.json and weights in bfloat16, except that the weights are random and that there
is no tokenizer.
"""

import argparse
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig
from transformers import GPT2Config
from transformers import GPT2LMHeadModel
from transformers import LlamaConfig
from transformers import LlamaForCausalLM


def make_config(kind, vocab_size=256, width=64, depth=4):
    """Return the configuration of a model of a kind in KINDS, without dropout."""
    tokens = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(
            n_embd=width, n_layer=depth, n_head=4, n_positions=128, **tokens, **dropout
        )
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=kind == "llama-tied",
        **tokens,
    )


def shrink(folder, vocab_size=256, width=64, depth=4):
    """Return the configuration of a folder's model, with small sizes.

    A part beside the text, such as a vision tower, keeps its widths, with two layers.
    """
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()  # of a model that has only text, config itself
    names = "hidden_size d_model moe_intermediate_size"
    sizes = dict.fromkeys(names.split(), width)
    names = "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff"
    sizes |= dict.fromkeys(names.split(), 2 * width)
    names = "num_hidden_layers encoder_layers decoder_layers num_layers"
    sizes |= dict.fromkeys(names.split(), depth)
    names = "num_attention_heads encoder_attention_heads decoder_attention_heads"
    sizes |= dict.fromkeys(f"{names} num_key_value_heads num_heads".split(), 4)
    heads = getattr(text, "num_attention_heads", None)
    if heads and (getattr(text, "num_key_value_heads", None) or heads) < heads:
        sizes["num_key_value_heads"] = 2
    sizes |= {"vocab_size": vocab_size, "head_dim": width // 4, "d_kv": width // 4}
    if hasattr(text, "qk_rope_head_dim"):  # DeepSeek's head_dim is this
        del sizes["head_dim"]
    if hasattr(text, "expand"):  # of a Mamba2: heads * head_dim is this * hidden_size
        sizes["num_heads"] = 4 * text.expand
    names = "num_experts num_local_experts n_routed_experts"
    sizes |= dict.fromkeys(names.split(), 4)
    sizes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    # of a Jamba: otherwise none of so few layers has attention
    sizes |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    set_sizes(text, sizes)
    for name in config.sub_configs:
        part = getattr(config, name)
        if part is not text:
            sizes = {"num_hidden_layers": 2, "depth": 2, "out_hidden_size": width}
            set_sizes(part, sizes)
    if getattr(text, "layer_types", None):  # one for each layer
        set_sizes(text, {"layer_types": text.layer_types[:depth]})
    for each in (config, text):
        names = [name for name in vars(each) if name.endswith("_token_id")]
        set_sizes(each, dict.fromkeys(names, 0))
    return config


def set_sizes(config, sizes):
    """Set the entries that a configuration has, unless it computes them."""
    for name, size in sizes.items():
        own_name = config.attribute_map.get(name, name)
        computed = isinstance(getattr(type(config), own_name, None), property)
        if getattr(config, name, None) is not None and not computed:
            setattr(config, name, size)


KINDS = ("llama", "llama-tied", "gpt2")


def find_class(config):
    """Return the class that config.json names; ValueError if transformers lacks it."""
    (name,) = config.architectures or ["none"]
    if not hasattr(transformers, name):
        raise ValueError(f"config.json names {name} as the model's class: not known")
    return getattr(transformers, name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help=f"{', '.join(KINDS)}, or a folder")
    parser.add_argument("--out", help="the folder to write, by default the kind's name")
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    if args.kind in KINDS:
        config = make_config(args.kind, args.vocab_size, args.width, args.depth)
        gpt2 = args.kind == "gpt2"
        model_class = GPT2LMHeadModel if gpt2 else LlamaForCausalLM
    elif not Path(args.kind, "config.json").exists():
        parser.error(
            f"{args.kind} is none of {', '.join(KINDS)}, nor a folder with config.json"
        )
    elif not args.out:
        parser.error("name the folder to write: --out small")
    else:
        try:
            config = shrink(args.kind, args.vocab_size, args.width, args.depth)
            model_class = find_class(config)
        except ValueError as error:  # for instance a kind that transformers lacks
            parser.error(str(error).partition("\n")[0])
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.out or args.kind)
    print(f"{args.out or args.kind}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
