"""Train every stage on the default data set and compare them in one table.

python -m tools.demo [STAGE ...]
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nbtools.lesson import max_abs_diff
from tools.stages import ROOT
from tools.stages import command
from tools.stages import launcher
from tools.stages import shown_commands
from tools.stages import stages
from tools.stages import takes_processes

import torch

COLUMNS = "{:<20} {:<9} {:>9} {:>6} {:>10} {:>8} {:>6} {:>8} {:>10}"
TITLES = (
    "stage", "launch", "processes", "device", "train loss", "val loss", "acc@1", "images/s", "vs 01"
)  # fmt: skip


def train(stage, processes, out, *flags, **options):
    """Run a stage by its own command and return the rows of its metrics.jsonl."""
    arguments = [*command(stage, processes), *flags, "--out-dir", str(out)]
    subprocess.run(arguments, cwd=ROOT, check=True, **options)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_exactly(stage, processes, out):
    """Train a stage for an epoch in float64, without showing it."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    train(stage, processes, out, "--dtype", "float64", "--epochs", "1", **quiet)


def main():
    names = [stage for stage in stages() if not sys.argv[1:] or stage in sys.argv[1:]]
    if set(sys.argv[1:]) - set(names):
        sys.stderr.write(f"demo.py: error: the stages are {' '.join(stages())}\n")
        return 2
    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in ["01_single_gpu", *(name for name in names if name != "01_single_gpu")]:
            spawns = takes_processes(stage) and launcher(stage) == "python"
            launch = "spawn" if spawns else launcher(stage)
            processes = min(2, gpus or 2) if takes_processes(stage) else 1
            print(f"\n{stage}: {shown_commands(stage)[-1]}", flush=True)
            last = train(stage, processes, Path(folder, stage))[-1]
            speed = last["train"]["images"] / last["train"]["seconds"]
            figures = [f"{last['train']['loss']:.3f}", f"{last['val']['loss']:.3f}"]
            figures += [f"{last['val']['acc1']:.2f}", f"{speed:.0f}"]
            table.append([stage, launch, processes, device, *figures])
        print("\nonce more, for an epoch in float64, to compare the weights ...", flush=True)
        exact = {row[0]: Path(folder, f"{row[0]}-float64") for row in table}
        with ThreadPoolExecutor(2) as pool:  # starting a stage takes longer than the epoch
            runs = [pool.submit(train_exactly, row[0], row[2], exact[row[0]]) for row in table]
        for row, run in zip(table, runs, strict=True):
            run.result()
            distance = max_abs_diff(exact["01_single_gpu"] / "last.pt", exact[row[0]] / "last.pt")
            row.append(f"{distance:.1e}")
    print("\n" + COLUMNS.format(*TITLES))
    for row in table:
        print(COLUMNS.format(*row))
    print(
        "\nvs 01: the largest absolute difference between the stage's weights and those of stage 01"
        "\nafter an epoch in float64. images/s: training, last epoch, this machine; no benchmark."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
