"""Train a small GPT: as it should be, or with one of two mistakes that look good.

python 11_gpt/demos/leak.py right|unshifted|unmasked
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import load_text
from common.model import GPT
from common.model import generate

STEPS, WINDOWS, CONTEXT_LENGTH = 300, 32, 8


def attend_to_all(q, k, v, **_):
    """Attention without the mask: a position also sees those after it."""
    return attention(q, k, v)


def byte_by_byte(model, tokens, target):
    """Return the mean loss when the model gets only the bytes before the target."""
    losses = [
        nn.functional.cross_entropy(model(tokens[:, :n])[:, :, -1], target[:, n - 1])
        for n in range(1, CONTEXT_LENGTH + 1)
    ]
    return torch.stack(losses).mean().item()


def main(way):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    args = SimpleNamespace(
        text_file=None, context_length=CONTEXT_LENGTH, batch_size=WINDOWS, seed=0
    )
    train_set, val_set = load_text(args)
    model = GPT(256, CONTEXT_LENGTH, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if way == "unmasked":
        nn.functional.scaled_dot_product_attention = attend_to_all

    def mean_loss(windows):
        tokens, target = windows
        if way == "unshifted":
            target = tokens
        return nn.functional.cross_entropy(model(tokens), target)

    for _ in range(STEPS):
        chosen = torch.randint(len(train_set), (WINDOWS,))
        loss = mean_loss(train_set.__getitems__(chosen))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    windows = val_set.__getitems__(range(1000))
    with torch.no_grad():
        print(f"val loss, all positions at once: {mean_loss(windows):.3f}")
        print(f"val loss, byte by byte: {byte_by_byte(model, *windows):.3f}")
    prompt = b"The gradients are"
    print(f"{prompt.decode()}|{generate(model, prompt, 60).decode(errors='replace')}")


attention = nn.functional.scaled_dot_product_attention

if __name__ == "__main__":
    main(sys.argv[1])
