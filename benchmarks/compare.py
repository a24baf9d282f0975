"""`make benchmark`: the stages that train on images, against the limit.

python -m benchmarks.compare
python -m benchmarks.compare --image-size 224 --arch resnet50 --batch-size 256  # GPUs
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.limit import AMP
from benchmarks.report import show
from common.args import ArgumentParser
from common.args import check_batch_size
from common.args import fail
from common.args import positive_int
from harness import commands
from harness.stages import command
from harness.stages import features
from harness.stages import with_feature

# The flags that define the work, which every script gets.
WORK = ("data", "data_dir", "image_size", "images", "arch", "lr")
WORK += ("batch_size", "epochs", "workers", "seed", "device", "tf32")
STEPS = 10  # of an epoch, by default
HERE = Path(__file__).resolve().parent


def parse_args():
    """Parse and check the flags: those of every stage, and what to measure."""

    def stage(text):
        if text in with_feature("images"):
            return text
        known = " ".join(with_feature("images"))
        raise argparse.ArgumentTypeError(
            f"there is no stage {text}; the stages are {known}"
        )

    parser = ArgumentParser(__doc__)
    parser.set_defaults(data="fake", image_size=32, images=None, epochs=6)
    add = parser.add_argument
    stages = with_feature("images")
    add("stages", nargs="*", type=stage, default=stages, metavar="STAGE")
    add("--amp", choices=AMP, default="off", help="mixed precision, if a stage has it")
    add(
        "--processes",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="(default: the number of GPUs, or 2)",
    )
    file = HERE / "mine.json"
    add("--json", type=Path, default=file, help="for the results")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    args.processes = sorted(args.processes or [gpus or 2])
    if args.epochs < 2:
        parser.error("--epochs must be at least 2, since the first warms up")
    for processes in args.processes:
        check_batch_size(args.batch_size, processes, samples=args.batch_size)
    args.images = args.images or STEPS * args.batch_size
    return args


def run(words, **environment):
    """Run a command to its end, however long it takes; return what it ended with.

    The number of threads is left to the command, unless `environment` or the
    environment of this program sets it. If the command fails, so does this program.
    """
    text = " ".join(map(str, words))
    print(f"measuring {text}", file=sys.stderr, flush=True)
    environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
    done = commands.run(words, code=None, seconds=math.inf, **environment)
    if done.returncode:
        sys.stderr.write(done.stderr)
        fail(f"exit code {done.returncode} of: {text}")
    return done


def median_and_range(values):
    """Return the median, the least and the most of a list of numbers."""
    middle = statistics.median(values)
    return {"median": middle, "least": min(values), "most": max(values)}


def flags_of_work(args):
    """Return the flags that define the work, as arguments."""
    words = []
    for name in WORK:
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name, False)
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value).removeprefix("torch.")]
    return words


def measure_limit(flags, processes):
    """Return the seconds of the model's bare steps on as many processes."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return json.loads(run([*words, "-m", "benchmarks.limit", *flags]).stdout)


def train(args, stage, processes):
    """Train a stage; return its row.

    The limit is measured just before, since a machine's speed can drift.
    """
    has = features(stage)
    flags = [*flags_of_work(args), *(["--amp", args.amp] if "amp" in has else [])]
    row = {"stage": stage, "processes": processes}
    tf32 = args.tf32 and args.device.type == "cuda"
    row["precision"] = "TF32" if tf32 else "float32"
    if args.amp != "off" and "amp" in has:
        row["precision"] = str(AMP[args.amp]).removeprefix("torch.")
    limit = [args.batch_size / each for each in measure_limit(flags, processes)]
    row["limit_images_per_s"] = median_and_range(limit)
    with tempfile.TemporaryDirectory() as name:
        words = [*command(stage, processes), *flags, "--out-dir", f"{name}/out"]
        done = run(words)
        lines = Path(name, "out/metrics.jsonl").read_text().splitlines()
    _, *epochs = map(json.loads, lines)  # the first warms up
    # "epoch 3 25/25  data 0.1 ms  batch 9.8 ms ...": averages; `batch` includes `data`
    last_step = r"^epoch \d+ (\d+)/\1 +data (\S+) ms +batch (\S+) ms"
    _, *waited = re.findall(last_step, done.stderr, re.MULTILINE)
    trained = [each["train"] for each in epochs]
    per_epoch = {
        "images_per_s": [each["count"] / each["seconds"] for each in trained],
        "loading": [float(data) / float(batch) for _, data, batch in waited],
        "evaluation_s": [each["val"]["seconds"] for each in epochs],
    }
    row |= {key: median_and_range(values) for key, values in per_epoch.items()}
    return row


def measure(args, title):
    """Measure everything; return what the JSON file is to hold, under a title."""
    single = [stage for stage in args.stages if "distributed" not in features(stage)]
    several = [stage for stage in args.stages if stage not in single]
    runs = [(stage, 1) for stage in single]
    runs += [(stage, n) for n in args.processes for stage in several]
    rows = [train(args, *one) for one in runs]
    gpus = range(torch.cuda.device_count() if args.device.type == "cuda" else 0)
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = named[1] if named else cpu  # not on ARM
    return {
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
            "torch": torch.__version__,
        },
        "title": title,
        "work": {k: str(v) for k, v in vars(args).items() if k in (*WORK, "amp")},
        "stages": rows,
    }


def main():
    args = parse_args()
    shown = f"{args.arch}, images of {args.image_size} px"
    result = measure(args, f"{shown}, global batch {args.batch_size}")
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(show(result))


if __name__ == "__main__":
    main()
