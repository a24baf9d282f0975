"""Write a small model that stands for a pretrained one: python make_model.py llama

In the place of llama can be a folder with a config.json. The model is then of that
kind, with fewer and narrower layers. What is written has what a download has, a
config.json and weights in bfloat16, except that the weights are random and that there
is no tokenizer.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import GPT2Config
from transformers import LlamaConfig


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

    Sizes that are not named here, such as those of a vision tower, stay as they are.
    """
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()  # of a model that has only text, config itself
    few = 2 if getattr(text, "num_key_value_heads", 4) < text.num_attention_heads else 4
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "num_key_value_heads": few,
        "head_dim": width // 4,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": width,
        "num_experts": 4,
        "num_local_experts": 4,
    }
    for name, size in sizes.items():
        computed = isinstance(getattr(type(text), name, None), property)
        if getattr(text, name, None) is not None and not computed:
            setattr(text, name, size)
    if getattr(text, "layer_types", None):  # one for each layer
        text.layer_types = text.layer_types[:depth]
    for each in (config, text):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(each, name, None) is not None:
                setattr(each, name, 0)
    return config


KINDS = ("llama", "llama-tied", "gpt2")


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
    elif not Path(args.kind, "config.json").exists():
        parser.error(
            f"{args.kind} is none of {', '.join(KINDS)}, nor a folder with config.json"
        )
    elif not args.out:
        parser.error("name the folder to write: --out small")
    else:
        config = shrink(args.kind, args.vocab_size, args.width, args.depth)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.out or args.kind)
    print(f"{args.out or args.kind}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
