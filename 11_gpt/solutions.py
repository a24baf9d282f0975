"""Solutions of the exercises in 11_gpt.ipynb."""

import torch
from torch import nn


# ---- exercise 1 ----------------------------------------------------------------------
# Logits up to a position must not change when the tokens after it do. Every position is
# tried, because a leak can be at one of them, and rounding is allowed.
def looks_ahead(model, tokens):
    logits = model(tokens)
    for n in range(1, tokens.size(1)):
        changed = tokens.clone()
        changed[:, n:] = (changed[:, n:] + 1) % 256
        if not torch.allclose(model(changed)[:, :n], logits[:, :n], atol=1e-9):
            return True
    return False


# ---- exercise 2 ----------------------------------------------------------------------
# The sum over this micro-batch, divided by all tokens that count. DDP divides by the
# processes, so it is multiplied by them first.
def token_loss(logits, targets, all_tokens, processes):
    logits, targets = logits.flatten(0, 1), targets.flatten()
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss * processes / all_tokens
