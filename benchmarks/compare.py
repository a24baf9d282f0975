"""`make benchmark`: the stages on one work, against the limit and other libraries.

python -m benchmarks.compare
python -m benchmarks.compare --image-size 224 --arch resnet50 --batch-size 256  # GPUs
"""

import argparse
import importlib.util
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

from benchmarks.count_steps import LAST
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

# The flags that define the work: every script gets those that are for its data.
WORK = ("data", "data_dir", "image_size", "images", "arch", "memory_format", "lr")
WORK += ("text_file", "context_length", "width", "depth", "heads")
WORK += ("batch_size", "epochs", "workers", "seed", "device", "tf32")
STEPS = 10  # of an epoch, by default
# Programs that train with other libraries what the first stage of torchrun trains: the
# package, the program, and the command in front of it.
LIBRARIES = {
    "Accelerate": (
        "accelerate",
        "other_libraries/accelerate_train.py",
        "torchrun --standalone --nproc-per-node={processes}",
    ),
    "Lightning Fabric": (
        "lightning_fabric",
        "other_libraries/fabric_train.py",
        "{bin}/fabric run --accelerator=cpu --devices={processes} --main-port={port}",
    ),
}
HERE = Path(__file__).resolve().parent


def parse_flags(parser, feature, file):
    """Add the flags of a measurement, then parse and check all of them.

    feature: what the stages to measure must have; file: the default of --json.
    """

    def stage(text):
        if text in with_feature(feature):
            return text
        known = " ".join(with_feature(feature))
        raise argparse.ArgumentTypeError(
            f"there is no stage {text}; the stages are {known}"
        )

    add = parser.add_argument
    add("stages", nargs="*", type=stage, default=with_feature(feature), metavar="STAGE")
    add("--amp", choices=AMP, default="off", help="mixed precision, if a stage has it")
    add(
        "--processes",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="(default: the number of GPUs, or 2)",
    )
    add("--json", type=Path, default=HERE / file, help="for the results")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    args.processes = sorted(args.processes or [gpus or 2])
    if args.epochs < 2:
        parser.error("--epochs must be at least 2, since the first warms up")
    for processes in args.processes:
        check_batch_size(args.batch_size, processes, samples=args.batch_size)
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


def run_counted(args, words, folder, **environment):
    """Run a command of a script under count_steps.py.

    Returns what it ended with, when each step ended, and the counts, which are None if
    the script spawns its processes.
    """
    file = Path(folder, "counted.json")
    place = [str(word).endswith(".py") for word in words].index(True)
    counting = [str(HERE / "count_steps.py"), str(file)]
    done = run([*words[:place], *counting, *words[place:]], **environment)
    counted = json.loads(file.read_text())
    ends = counted.pop("ends")
    if ends and len(ends) < LAST * args.epochs:
        fail(f"an epoch has too few steps: {LAST} or more are needed to count them")
    return done, ends, counted or None


def median_and_range(values):
    """Return the median, the least and the most of a list of numbers."""
    middle = statistics.median(values)
    return {"median": middle, "least": min(values), "most": max(values)}


def between_steps(args, ends):
    """Return images/s from an epoch's first step to its last, of all but the first.

    So the start of an epoch, the metrics and the evaluation are left out.
    """
    steps = len(ends) // args.epochs
    pairs = zip(ends[::steps], ends[steps - 1 :: steps], strict=True)
    rates = [args.batch_size * (steps - 1) / (last - first) for first, last in pairs]
    return median_and_range(rates[1:])


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


def train(args, stage, own, processes):
    """Train a stage with flags of its own; return its row, and what was counted.

    For images, the limit is measured just before, since a machine's speed can drift.
    """
    has = features(stage)
    flags = [*flags_of_work(args), *own]
    flags += ["--amp", args.amp] if "amp" in has else []
    flags += ["--sample", "0"] if "text" in has else []
    row = {"stage": " ".join([stage, *own]), "processes": processes}
    tf32 = args.tf32 and args.device.type == "cuda"
    row["precision"] = "TF32" if tf32 else "float32"
    if args.amp != "off" and "amp" in has:
        row["precision"] = str(AMP[args.amp]).removeprefix("torch.")
    if "images" in has:
        limit = [args.batch_size / each for each in measure_limit(flags, processes)]
        row["limit_images_per_s"] = median_and_range(limit)
    with tempfile.TemporaryDirectory() as name:
        words = [*command(stage, processes), *flags, "--out-dir", f"{name}/out"]
        done, ends, counted = run_counted(args, words, name)
        lines = Path(name, "out/metrics.jsonl").read_text().splitlines()
    _, *epochs = map(json.loads, lines)  # the first warms up
    # "epoch 3 25/25  data 0.1 ms  batch 9.8 ms ...": averages; `batch` includes `data`
    last_step = r"^epoch \d+ (\d+)/\1 +data (\S+) ms +batch (\S+) ms"
    _, *waited = re.findall(last_step, done.stderr, re.MULTILINE)
    unit = "images_per_s" if "images" in has else "tokens_per_s"
    per_epoch = {
        unit: [each["train"]["count"] / each["train"]["seconds"] for each in epochs],
        "loading": [float(data) / float(batch) for _, data, batch in waited],
        "evaluation_s": [each["val"]["seconds"] for each in epochs],
    }
    row |= {key: median_and_range(values) for key, values in per_epoch.items()}
    if counted and counted["gpu_bytes"]:
        row["gpu_bytes"] = counted["gpu_bytes"]
    elif counted and "images" in has and row["precision"] == "float32":
        row["between_steps"] = between_steps(args, ends)
    return row, counted


def train_by_library(args, name, processes):
    """Train with another library, on the CPU; return the row of its rate."""
    _, program, launcher = LIBRARIES[name]
    places = {"bin": Path(sys.executable).parent, "port": commands.free_port()}
    words = launcher.format(processes=processes, **places).split()
    words += [program, *flags_of_work(args), "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"HF_HOME": folder}
        if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
            # as torchrun does; Fabric's launcher: all cores' threads in each process
            environment["OMP_NUM_THREADS"] = "1"
        _, ends, _ = run_counted(args, words, folder, **environment)
    rates = between_steps(args, ends)
    return {"program": name, "processes": processes, "between_steps": rates}


def variants(args):
    """Return what to train: stages, flags of their own, and numbers of processes."""
    single = [stage for stage in args.stages if "distributed" not in features(stage)]
    found = [(stage, [], 1) for stage in single]
    for processes in args.processes:
        several = [stage for stage in args.stages if stage not in single]
        found += [(stage, [], processes) for stage in several]
        row = [f"--tensor-parallel={processes}"]  # one row, instead of one column
        if processes > 1 and getattr(args, "heads", 1) % processes == 0:
            split = [stage for stage in several if "tensor_parallel" in features(stage)]
            found += [(stage, row, processes) for stage in split]
    return found


def measure(args, title):
    """Measure everything; return what the JSON file is to hold, under a title."""
    rows, counted, libraries = [], {}, []
    launched = [stage for stage in args.stages if "torchrun" in features(stage)]
    for stage, own, processes in variants(args):
        row, counts = train(args, stage, own, processes)
        rows.append(row)
        if counts:
            counted[row["stage"]] = counts
        # Right after the stage that they repeat. They have not been tried on GPUs.
        if stage in launched[:1] and "between_steps" in row:
            for name, (package, *_) in LIBRARIES.items():
                if importlib.util.find_spec(package):
                    libraries.append(train_by_library(args, name, processes))
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
        "libraries": libraries,
        "counted": counted,
    }


def report(args, title):
    """Measure; write the results to --json, and print the tables."""
    result = measure(args, title)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(show(result))


def main():
    parser = ArgumentParser(__doc__)
    parser.set_defaults(data="fake", image_size=32, images=None, epochs=6, workers=0)
    args = parse_flags(parser, "images", "mine.json")
    args.images = args.images or STEPS * args.batch_size
    shown = f"{args.arch}, images of {args.image_size} px"
    report(args, f"{shown}, global batch {args.batch_size}")


if __name__ == "__main__":
    main()
