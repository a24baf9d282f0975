"""Measure tokens per second and the MFU of one process, at two widths of the GPT.

OMP_NUM_THREADS=1 python 11_gpt/demos/mfu.py
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

WINDOWS, CONTEXT_LENGTH, DEPTH = 48, 32, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seconds(function, tries):
    """Return the shortest time that a function took."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # otherwise only the launch is timed
        times.append(time.perf_counter() - start)
    return min(times)


def peak():
    """Return the FLOP/s of a large matrix product in float32, as the training has."""
    n = 2048 if DEVICE == "cpu" else 8192
    matrix = torch.randn(n, n, device=DEVICE)
    return 2 * n**3 / seconds(lambda: matrix @ matrix, tries=5)


def tokens_per_second(width):
    """Return how many tokens a training step takes per second, and FLOPs per token."""
    model = GPT(256, CONTEXT_LENGTH, width, DEPTH).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (WINDOWS, CONTEXT_LENGTH), device=DEVICE)

    def step():
        optimizer.zero_grad()
        logits = model(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()

    step()
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers)
    flops = 6 * weights + 12 * DEPTH * CONTEXT_LENGTH * width
    return tokens.numel() / seconds(step, tries=5), flops


def main():
    best = peak()
    print(
        f"peak {best / 1e9:.0f} GFLOP/s on {DEVICE}, {torch.get_num_threads()} threads"
    )
    for width in (64, 256):
        rate, flops = tokens_per_second(width)
        print(f"width {width}: {rate:.0f} tokens/s, MFU {rate * flops / best:.3f}")


if __name__ == "__main__":
    main()
