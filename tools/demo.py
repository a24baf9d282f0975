"""Train every stage on the default data set and compare them in one table.

python -m tools.demo [STAGE ...]

Each stage is launched once, in float64, so that its weights can be compared with those
of stage 01, and with one thread per process (OMP_NUM_THREADS=1), as torchrun sets it. A
language model is compared with the first one, which is also trained on one process.
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
from tools.stages import plain_command
from tools.stages import reference
from tools.stages import stages
from tools.stages import takes_processes
from tools.stages import trains_on_text

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
    "vs 01",
]


def train(stage, processes, out_dir):
    """Train a stage by its own command; return the last row of its metrics.jsonl."""
    flags = ["--dtype", "float64"]
    if trains_on_text(stage):
        flags += ["--epochs", "1"]  # of ten seconds; those of the images take two
    print(f"\n{stage}: {plain_command(stage, processes)} {' '.join(flags)}", flush=True)
    done = subprocess.run(
        [*command(stage, processes), *flags, "--out-dir", out_dir],
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
        # The others are compared with the first, on one process.
        runs = [(first, 1) for first in dict.fromkeys(map(reference, wanted))]
        runs += [(name, min(2, gpus or 2)) for name in wanted if takes_processes(name)]
        runs += [(name, 1) for name in wanted if not takes_processes(name)]
        for stage, processes in sorted(dict.fromkeys(runs)):
            spawns = takes_processes(stage) and launcher(stage) == "python"
            last = train(stage, processes, Path(folder, f"{stage}-{processes}"))
            names = (f"{reference(stage)}-1", f"{stage}-{processes}")
            weights = [Path(folder, name, "last.pt") for name in names]
            row = [
                stage,
                "spawn" if spawns else launcher(stage),
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
        "\nvs 01: the largest absolute difference, at the end, between the weights and"
        "\nthose of stage 01, or of the first language model, which trains for one"
        "\nepoch. images/s, or tokens/s: in training in float64, last epoch, this"
        "\nmachine; it is not a benchmark."
    )


if __name__ == "__main__":
    main()
