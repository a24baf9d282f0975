"""Train the language models' stages on the same work; show their speed and memory.

python -m benchmarks.compare_text
python -m benchmarks.compare_text --width 2048 --depth 24 --heads 16 \
--context-length 1024 --batch-size 32 --amp bf16  # GPUs
python -m benchmarks.compare_text --show benchmarks/two_cores_text.json
"""

import json
import os
import tempfile
from pathlib import Path

import torch

from benchmarks.compare import HERE
from benchmarks.compare import NAMES
from benchmarks.compare import STEPS
from benchmarks.compare import machine
from benchmarks.compare import pooled
from benchmarks.compare import report_progress
from benchmarks.compare import train_instrumented
from benchmarks.compare import work
from benchmarks.instrument import LAST
from benchmarks.report import compared
from benchmarks.report import counted_table
from benchmarks.report import rate
from benchmarks.report import table
from benchmarks.report import versus
from common import text
from common.args import TextArgumentParser
from common.args import check_batch_size
from common.args import existing_file
from common.args import positive_int
from common.args import writable_file
from common.gpt import GPT
from tools.stages import features
from tools.stages import with_feature

# The flags that define the work; every script gets them.
WORK = (
    "text_file",
    "context_length",
    "width",
    "depth",
    "heads",
    "batch_size",
    "epochs",
    "workers",
    "seed",
    "device",
    "tf32",
    "amp",
)


def parse_args():
    """Parse and check the flags: those of every stage, and what to measure."""
    parser = TextArgumentParser(__doc__)
    # So large that the weights take most of the memory, and so little of a batch that
    # a step on a CPU takes less than a second.
    parser.set_defaults(width=512, depth=4, heads=8, context_length=16)
    parser.set_defaults(batch_size=8, epochs=4, workers=0)
    add = parser.add_argument
    known = with_feature("text")
    add("stages", nargs="*", metavar="STAGE", help="(default: all that take text)")
    add("--amp", choices=tuple(NAMES), default="off", help="mixed precision")
    add(
        "--rounds",
        type=positive_int,
        default=2,
        help="runs of each stage; the first of a run's --epochs warms up",
    )
    add(
        "--processes",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="(default: 1 2 4 8, as far as there are GPUs, or cores)",
    )
    add(
        "--json",
        type=writable_file,
        default=HERE / "mine.text.json",
        help="write the results to this file",
    )
    add("--show", type=existing_file, help="print the results in this file and exit")
    args = parser.parse_args()
    for stage in args.stages:
        if stage not in known:
            names = " ".join(known)
            parser.error(f"there is no stage {stage}; the stages are {names}")
    args.stages = args.stages or known
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    devices = gpus or os.cpu_count()
    args.processes = args.processes or [n for n in (1, 2, 4, 8) if n <= devices]
    for processes in args.processes:
        check_batch_size(args.batch_size, processes, samples=args.batch_size)
    if args.epochs < 2:
        parser.error("--epochs must be at least 2, since the first warms up")
    if args.text_file:
        train_set, _ = text.load(args.text_file, args.context_length, args.seed)
        if len(train_set) // args.batch_size < LAST + 1:
            parser.error(
                f"--text-file {args.text_file}: an epoch needs at least {LAST + 1}"
                " steps, since some of them are counted"
            )
    return args


def text_of_ten_steps(args):
    """Return bytes of which the training part is an epoch of ten steps."""
    windows = STEPS * args.batch_size + 1
    size = (windows * args.context_length + 1) * 10 // 9 + 1
    return bytes(i % 256 for i in range(size))


def train(args, stage, own, processes):
    """Train a stage with flags of its own; return what was measured and was counted."""
    flags = [*work(args, WORK), "--sample", "0", *own]
    _, epochs, counted = train_instrumented(stage, processes, flags, "memory")
    measured = [row["train"] for row in epochs[1:]]  # the first warms up
    row = {
        "stage": " ".join([stage, *own]),
        "processes": processes,
        "tokens_per_s": [one["count"] / one["seconds"] for one in measured],
        "bytes": [counted["gpu_bytes"] or counted["bytes_of_steps"]],
    }
    return row, counted


def variants(args, processes):
    """Return the stages to train, each with flags of its own, or without."""
    found = [(stage, []) for stage in args.stages]
    if processes > 1 and args.heads % processes == 0:  # one row, instead of one column
        row = [f"--tensor-parallel={processes}"]
        found += [(s, row) for s in args.stages if "tensor_parallel" in features(s)]
    return sorted(found)


def measure(args):
    """Measure everything; return what the JSON file is to hold."""
    runs = [(n, *variant) for n in args.processes for variant in variants(args, n)]
    rows, counted = [], {}
    # One after the other in every round, since a machine's speed can drift.
    for number in range(1, args.rounds + 1):
        for processes, stage, own in runs:
            what = " ".join([stage, *own])
            report_progress(f"round {number}: {what}, processes: {processes}")
            row, counts = train(args, stage, own, processes)
            rows.append(row)
            if processes == max(args.processes):
                counted[what] = counts
    with torch.device("meta"):
        model = GPT(256, args.context_length, args.width, args.depth, args.heads)
    return {
        "machine": machine(args),
        "work": {name: str(getattr(args, name)) for name in (*WORK, "rounds")},
        "weights": sum(weight.numel() for weight in model.parameters()),
        "stages": pooled(rows),
        "counted": counted,
    }


def stages_table(result):
    """Return the lines of the table of speed and memory."""
    first = {}  # of each number of processes
    titles = ["stage", "processes", "tokens/s", "least-most"]
    titles += [versus(result["stages"][0]), "MiB", "least-most"]
    rows = []
    for row in result["stages"]:
        base = first.setdefault(row["processes"], row)
        speeds = row["tokens_per_s"], base["tokens_per_s"]
        memory = {name: size / 2**20 for name, size in row["bytes"].items()}
        cells = [row["stage"], str(row["processes"]), *rate(speeds[0])]
        cells += ["" if row is base else compared(*speeds), *rate(memory)]
        rows.append(cells)
    return table(titles, rows)


def show(result):
    """Return the tables of a result, as the text that the command prints."""
    named, work = result["machine"], result["work"]
    device = " and ".join(named["gpus"]) or f"{named['cores']} cores"
    windows = int(work["rounds"]) * (int(work["epochs"]) - 1)
    most = max(row["processes"] for row in result["stages"])
    lines = [
        f"{named['cpu']}, {device}; torch {named['torch']}",
        f"GPT of width {work['width']} and depth {work['depth']}:"
        f" {result['weights']:,} weights, {result['weights'] * 4 / 2**20:.0f} MiB in"
        " float32",
        f"{NAMES[work['amp']]}, global batch {work['batch_size']} x"
        f" {work['context_length']} tokens; medians of {windows} epochs (least-most)",
        "",
        *stages_table(result),
        "",
        f"What a process waits for and sends, per optimizer step, of {most}:",
        *counted_table(result),
    ]
    return "\n".join(lines)


def main():
    args = parse_args()
    if args.show:
        result = json.loads(args.show.read_text())
    else:
        with tempfile.TemporaryDirectory() as name:
            if not args.text_file:
                args.text_file = Path(name, "text")
                args.text_file.write_bytes(text_of_ten_steps(args))
            result = measure(args)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        report_progress(f"wrote {args.json}")
    print(show(result))


if __name__ == "__main__":
    main()
