"""`make demo`: train every stage on the default data, compare them in one table.

python -m tools.demo [STAGE ...]

Each stage runs once, in float64, so that its weights can be compared with those of
stage 01, and with one thread per process, as torchrun sets it. So no stage is run in
mixed precision. A language model is compared with the first one, which is also trained
on one process.

The first stage for torchrun is started by it. To import torch takes each process
seconds, so the other commands run in forks of a process that has it (see harness).
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import torch

from harness import commands
from harness.stages import fail
from harness.stages import features
from harness.stages import first_with
from harness.stages import launcher
from harness.stages import plain_command
from harness.stages import reference
from harness.stages import stages
from harness.weights import max_abs_diff

COLUMNS = "{:<22} {:<9} {:>9} {:>6} {:>10} {:>8} {:>6} {:>8} {:>10}"
TITLES = [
    "stage",
    "launch",
    "processes",
    "device",
    "train loss",
    "val loss",
    "acc@1",
    "images/s",
    "difference",
]


def train(stage, processes, out_dir):
    """Train a stage by its own command; return the last row of its metrics.jsonl."""
    command = f"{plain_command(stage, processes)} --dtype float64"
    if "--amp" in command:
        command += " --amp off"  # autocast leaves float64 as it is
    if "text" in features(stage):
        command += " --epochs 1"  # of ten seconds; those of the images take two
    print(f"\n{stage}: {command}", flush=True)
    try:
        forks = stage != first_with("torchrun")
        done = commands.run(
            f"{command} --out-dir {out_dir}", seconds=math.inf, forks=forks
        )
    except commands.CommandError as error:
        fail(str(error))
    print(done.stdout, end="", flush=True)
    return json.loads((out_dir / "metrics.jsonl").read_text().splitlines()[-1])


def main():
    wanted = sys.argv[1:] or stages()
    for name in wanted:
        if name not in stages():
            fail(f"there is no stage {name}; the stages are {' '.join(stages())}")
    gpus = torch.cuda.device_count()
    # The others are compared with the first, on one process.
    runs = [(first, 1) for first in dict.fromkeys(map(reference, wanted))]
    for name in wanted:
        distributed = "distributed" in features(name)
        runs.append((name, min(2, gpus or 2) if distributed else 1))
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for stage, processes in sorted(set(runs)):
            last = train(stage, processes, Path(folder, f"{stage}-{processes}"))
            names = (f"{reference(stage)}-1", f"{stage}-{processes}")
            weights = [Path(folder, name, "last.pt") for name in names]
            row = [
                stage,
                "spawn" if "spawn" in features(stage) else launcher(stage),
                processes,
                "cuda" if gpus else "cpu",
                f"{last['train']['loss']:.3f}",
                f"{last['val']['loss']:.3f}",
                f"{last['val']['acc1']:.2f}",
                f"{last['train']['count'] / last['train']['seconds']:.0f}",
                f"{max_abs_diff(*weights):.1e}",
            ]
            table.append(row)
    print()
    for row in [TITLES, *table]:
        print(COLUMNS.format(*row))
    print(
        "\ndifference: the largest, at the end, between a weight and that of stage 01,"
        "\nor of the first language model on one process, which trains for one epoch."
        "\nimages/s, or tokens/s: in training in float64, last epoch, this"
        "\nmachine; it is not a benchmark."
    )


if __name__ == "__main__":
    main()
