"""Write a small model that stands for a pretrained one: python make_model.py llama

The folder has what a download has, a config.json and weights in bfloat16, except that
the weights are random and that there is no tokenizer.
"""

import argparse

import torch
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


KINDS = ("llama", "llama-tied", "gpt2")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", help="the folder, by default the kind's name")
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = make_config(args.kind, args.vocab_size, args.width, args.depth)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.out or args.kind)
    print(f"{args.out or args.kind}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
