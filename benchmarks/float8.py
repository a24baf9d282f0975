"""05's *Is it faster*: how wide has a layer to be for float8 to pay?

python -m benchmarks.float8 [--widths 1024 2048 4096] [--tokens 16384]

A block of two linear layers, in bfloat16 or in float8, multiplies [tokens, width] by
width x 4 width and by 4 width x width. A step is a forward and a backward pass of four
blocks, compiled, without an optimizer: the median of five windows of ten steps. Two
medians are "not distinguishable" if the ranges of their windows overlap. Without a GPU,
one window of one step, not compiled, with float8 emulated, which only shows that it
runs.
"""

import argparse
import importlib.util
import statistics
import time

import torch
from torch import nn

from benchmarks.report import compared
from benchmarks.report import table
from common.args import fail


class Block(nn.Module):
    """Maps [tokens, width] to the same shape."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def milliseconds(width, tokens, in_float8, device):
    """Return how long a step takes: the median, the least and the most."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8 import convert_to_float8_training

    on_gpu = device.type == "cuda"
    torch._dynamo.reset()  # otherwise the earlier widths count as recompilations
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(4))).to(device, torch.bfloat16)
    if in_float8:
        config = Float8LinearConfig(emulate=not on_gpu)
        convert_to_float8_training(model, config=config)
    if on_gpu:
        for block in model:
            block.compile(fullgraph=True)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)

    def steps(number):
        for _ in range(number):
            model(x).float().square().mean().backward()
            model.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()

    steps(4 if on_gpu else 1)  # compiles
    number, windows = (10, 5) if on_gpu else (1, 1)
    times = []
    for _ in range(windows):
        begin = time.perf_counter()
        steps(number)
        times.append(1e3 * (time.perf_counter() - begin) / number)
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    if importlib.util.find_spec("torchao") is None:
        fail("this needs a package: pip install torchao")
    if any(size < 1 or size % 16 for size in (args.tokens, *args.widths)):
        fail("float8 needs widths and tokens that are multiples of 16")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        fail(f"{torch.cuda.get_device_name()} has no units for float8")
    rows = []
    for width in args.widths:
        both = [milliseconds(width, args.tokens, each, device) for each in (0, 1)]
        medians = [f"{times['median']:.1f}" for times in both]
        rows.append([f"{width}", *medians, compared(*both)])
    titles = ["width", "bf16 ms", "float8 ms", "times as fast"]
    print(*table(titles, rows), sep="\n")


if __name__ == "__main__":
    main()
