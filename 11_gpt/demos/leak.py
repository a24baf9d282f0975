"""Train a small GPT: as it should be, and with each of two mistakes that look good.

python 11_gpt/demos/leak.py
"""

import sys
from pathlib import Path
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import text
from common.gpt import GPT

STEPS, WINDOWS, CONTEXT_LENGTH = 300, 32, 8

attention = nn.functional.scaled_dot_product_attention


def attend_to_all(q, k, v, **_):
    """Attention without the mask: a position also sees those after it."""
    return attention(q, k, v)


def all_at_once(model, tokens, target, way="right"):
    """Return the mean loss over all positions, as training has it."""
    if way == "unshifted":
        target = tokens
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def byte_by_byte(model, tokens, target):
    """Return the mean loss when the model gets only the bytes before the target."""
    losses = [
        nn.functional.cross_entropy(model(tokens[:, :n])[:, -1], target[:, n - 1])
        for n in range(1, CONTEXT_LENGTH + 1)
    ]
    return torch.stack(losses).mean()


def train(way):
    """Train, and print two losses."""
    wrong = attend_to_all if way == "unmasked" else attention
    with mock.patch.object(nn.functional, "scaled_dot_product_attention", wrong):
        torch.manual_seed(0)
        train_set, val_set = text.load(None, CONTEXT_LENGTH)
        model = GPT(256, CONTEXT_LENGTH, width=32).double()
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        for _ in range(STEPS):
            chosen = torch.randint(len(train_set), (WINDOWS,))
            windows = train_set.__getitems__(chosen)
            optimizer.zero_grad()
            all_at_once(model, *windows, way).backward()
            optimizer.step()
        windows = val_set.__getitems__(range(1000))
        with torch.no_grad():
            losses = all_at_once(model, *windows, way), byte_by_byte(model, *windows)
        print(f"{way}: val loss, all positions at once: {losses[0]:.3f}")
        print(f"{way}: val loss, byte by byte: {losses[1]:.3f}", flush=True)


if __name__ == "__main__":
    for way in ("right", "unshifted", "unmasked"):
        train(way)
