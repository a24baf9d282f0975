"""README's table of language models: what do FSDP2 and tensor parallelism cost?

python -m benchmarks.compare_text
python -m benchmarks.compare_text --width 2048 --depth 24 --heads 16 \
--context-length 1024 --batch-size 32 --amp bf16  # GPUs
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.compare import STEPS
from benchmarks.compare import parse_flags
from benchmarks.compare import report
from common.args import TextArgumentParser
from common.gpt import GPT


def text_of_ten_steps(args):
    """Return bytes of which the training part is an epoch of ten steps."""
    windows = STEPS * args.batch_size + 1
    size = (windows * args.context_length + 1) * 10 // 9 + 1
    return bytes(i % 256 for i in range(size))


def parse_args():
    """Parse and check the flags: those of every stage, and what to measure."""
    parser = TextArgumentParser(__doc__)
    # So large that the weights take most of the memory, and so little of a batch that
    # a step on a CPU takes less than a second.
    parser.set_defaults(width=512, depth=4, heads=8, context_length=16)
    parser.set_defaults(batch_size=8, epochs=4, workers=0)
    return parse_flags(parser, "text", "mine.text.json")


def main():
    args = parse_args()
    with torch.device("meta"):
        model = GPT(256, args.context_length, args.width, args.depth, args.heads)
    weights = sum(weight.numel() for weight in model.parameters())
    title = (
        f"GPT of width {args.width} and depth {args.depth}: {weights:,} weights;"
        f" global batch {args.batch_size} x {args.context_length} tokens"
    )
    with tempfile.TemporaryDirectory() as folder:
        if not args.text_file:
            args.text_file = Path(folder, "text")
            args.text_file.write_bytes(text_of_ten_steps(args))
        report(args, title)


if __name__ == "__main__":
    main()
