"""Train every stage on the default data set and compare them in one table.

python -m tools.demo [STAGE ...]

Each stage is launched once, in float64, so that its weights can be compared with those
of stage 01, and with one thread per process (OMP_NUM_THREADS=1), as torchrun sets it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from nbtools.lesson import max_abs_diff
from tools.stages import ROOT
from tools.stages import command
from tools.stages import fail
from tools.stages import launcher
from tools.stages import shown_commands
from tools.stages import stages
from tools.stages import takes_processes

COLUMNS = "{:<20} {:<9} {:>9} {:>6} {:>10} {:>8} {:>6} {:>8} {:>10}"
TITLES = [
    "stage",
    "launch",
    "processes",
    "device",
    "train loss",
    "val loss",
    "acc@1",
    "images/s",
    "vs 01",
]
FIRST = stages()[0]


def train(stage, processes, out_dir):
    """Train a stage by its own command; return the last row of its metrics.jsonl."""
    arguments = [*command(stage, processes), "--dtype", "float64"]
    print(f"\n{stage}: {shown_commands(stage)[-1]} --dtype float64", flush=True)
    done = subprocess.run(
        [*arguments, "--out-dir", out_dir],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        check=False,
    )
    if done.returncode:
        fail(f"{stage} ended with exit code {done.returncode}")
    return json.loads((out_dir / "metrics.jsonl").read_text().splitlines()[-1])


def main():
    wanted = sys.argv[1:] or stages()
    for name in wanted:
        if name not in stages():
            fail(f"there is no stage {name}; the stages are {' '.join(stages())}")
    gpus = torch.cuda.device_count()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        # the others are compared with the first
        for stage in [FIRST, *(name for name in wanted if name != FIRST)]:
            several = takes_processes(stage)
            spawns = several and launcher(stage) == "python"
            processes = min(2, gpus or 2) if several else 1
            last = train(stage, processes, Path(folder, stage))
            weights = [Path(folder, name, "last.pt") for name in (FIRST, stage)]
            row = [
                stage,
                "spawn" if spawns else launcher(stage),
                processes,
                "cuda" if gpus else "cpu",
                f"{last['train']['loss']:.3f}",
                f"{last['val']['loss']:.3f}",
                f"{last['val']['acc1']:.2f}",
                f"{last['train']['images'] / last['train']['seconds']:.0f}",
                f"{max_abs_diff(*weights):.1e}",
            ]
            table.append(row)
    print()
    for row in [TITLES, *table]:
        print(COLUMNS.format(*row))
    print(
        "\nvs 01: the largest absolute difference between the stage's weights and those"
        "\nof stage 01 at the end. images/s: training in float64, last epoch, this"
        "\nmachine; it is not a benchmark."
    )


if __name__ == "__main__":
    main()
