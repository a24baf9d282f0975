"""Predict each byte of a text from the one before it, by counting pairs."""

import torch


def bits_per_byte(text, rest):
    """Return the mean bits for the bytes of `rest`, after pairs counted in `text`.

    text, rest: uint8 [N].
    """
    text, rest = text.long(), rest.long()
    pairs = torch.bincount(256 * text[:-1] + text[1:], minlength=256 * 256).double()
    pairs = pairs.view(256, 256) + 0.1  # otherwise a new pair would be impossible
    chances = pairs / pairs.sum(1, keepdim=True)
    return -chances[rest[:-1], rest[1:]].log2().mean().item()
