"""Write the models that pretrained_mistakes.py loads, as bfloat16 safetensors.

python 13_sharded_checkpoints/demos/pretrained_mistakes_models.py FOLDER
"""

import sys
import types
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "your_own_script/hugging_face"))

import before
from make_model import make_config

CPU = torch.device("cpu")
ARGS = types.SimpleNamespace(bf16=False)


def get_loader(size, seed):
    """Return batches of 24 sequences, each batch in one micro-batch."""
    data = before.make_dataset(size, seed)
    return DataLoader(data, batch_size=24, shuffle=True, collate_fn=before.collate)


def main(folder):
    torch.manual_seed(0)
    config = make_config("llama")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = get_loader(505, seed=1)
    for _ in range(4):
        before.train_one_epoch(ARGS, model, loader, optimizer, CPU)
    loss = before.evaluate(ARGS, model, get_loader(101, seed=2), CPU)
    model.to(torch.bfloat16).save_pretrained(folder / "llama")
    print(f"llama: {model.num_parameters():,} parameters, loss {loss:.4f}")

    # Its head and its embedding share one weight, which the file has once.
    config = make_config("llama-tied")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "tied")
    # The file of a base model, whose names begin at its layers.
    model.base_model.save_pretrained(folder / "tied-base")
    print(f"tied and tied-base: {model.num_parameters():,} parameters, random")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
