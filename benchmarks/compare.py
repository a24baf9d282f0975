"""Train every stage on the same work, and show how fast each one is, and why.

In the same turns it trains with Accelerate and with Lightning Fabric, if they are
installed, what the first distributed stage trains.

python -m benchmarks.compare
python -m benchmarks.compare --image-size 224 --arch resnet50 --batch-size 256  # GPUs
python -m benchmarks.compare --show benchmarks/two_cores.json
"""

import importlib.util
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torchvision

from benchmarks import limit
from benchmarks.instrument import LAST
from benchmarks.instrument import variables
from benchmarks.report import draw
from benchmarks.report import show
from common.args import ArgumentParser
from common.args import existing_file
from common.args import fail
from common.args import positive_int
from common.args import writable_file
from tools import harness
from tools.stages import command
from tools.stages import features
from tools.stages import with_feature

# The flags that define the work; every script gets them.
WORK = (
    "data",
    "data_dir",
    "image_size",
    "images",
    "arch",
    "batch_size",
    "epochs",
    "workers",
    "lr",
    "weight_decay",
    "seed",
    "device",
    "memory_format",
    "tf32",
)
NAMES = {"off": "float32", "bf16": "bfloat16", "fp16": "float16"}
LOCAL_BATCH_SIZE = 24  # by default
STEPS = 10  # of an epoch, by default
# Programs that train with other libraries what the first distributed stage trains:
# the package, the program, and the command in front of it.
LIBRARIES = {
    "Accelerate": (
        "accelerate",
        "recipes/neighbors/accelerate_train.py",
        "torchrun --standalone --nproc-per-node={processes}",
    ),
    "Lightning Fabric": (
        "lightning_fabric",
        "recipes/neighbors/fabric_train.py",
        "fabric run --accelerator={device} --devices={processes} --main-port={port}",
    ),
}
HERE = Path(__file__).resolve().parent


def parse_args():
    """Parse and check the flags: those of every stage, and what to measure."""
    parser = ArgumentParser(__doc__)
    parser.set_defaults(
        data="fake", image_size=32, images=None, epochs=6, batch_size=None, workers=0
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="(default: all that take images)")
    add(
        "--amp",
        choices=("off", "bf16", "fp16"),
        default="off",
        help="mixed precision in the stages that have it",
    )
    add(
        "--rounds",
        type=positive_int,
        default=1,
        help="runs of each stage; the first of a run's --epochs warms up",
    )
    add("--processes", type=positive_int, help="(default: the number of GPUs, or 2)")
    add(
        "--scaling",
        type=positive_int,
        nargs="*",
        metavar="N",
        help="numbers of processes to compare (default: 1 2 4)",
    )
    add(
        "--batch-sizes",
        type=positive_int,
        nargs="*",
        metavar="N",
        help="more global batch sizes (default: half and double of --batch-size)",
    )
    add(
        "--json",
        type=writable_file,
        default=HERE / "mine.json",
        help="write the results to this file, and the picture beside it",
    )
    add("--show", type=existing_file, help="print the results in this file and exit")
    args = parser.parse_args()
    known = with_feature("images")
    args.stages = args.stages or known
    for stage in args.stages:
        if stage not in known:
            names = " ".join(known)
            parser.error(f"there is no stage {stage}; the stages are {names}")
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    args.processes = args.processes or gpus or 2
    args.batch_size = args.batch_size or LOCAL_BATCH_SIZE * args.processes
    if args.scaling is None:
        args.scaling = [n for n in (1, 2, 4) if not gpus or n <= gpus]
    if args.batch_sizes is None:
        args.batch_sizes = [args.batch_size // 2, args.batch_size * 2]
    if args.rounds * (args.epochs - 1) < 5:
        parser.error("--epochs, --rounds: --rounds * (--epochs - 1) must be at least 5")
    works = [(processes, args.batch_size) for processes in args.scaling]
    works += [(args.processes, size) for size in (args.batch_size, *args.batch_sizes)]
    for processes, size in works:
        if size % processes:
            parser.error(
                f"--batch-size {size} is the global batch: it must be divisible by the"
                f" number of processes ({processes})"
            )
        images = num_images(args, size)
        if images // size < LAST + 1:
            parser.error(
                f"--images {images}: an epoch with --batch-size {size} needs at least"
                f" {LAST + 1} steps, since some of them are counted"
            )
    return args


def num_images(args, batch_size):
    """Return the training images of an epoch: by default, of ten steps."""
    if args.data != "fake":
        return len(limit.load_train_set(args))
    return args.images or STEPS * batch_size


def run(words, **environment):
    """Run a command to its end, however long it takes; return what it ended with.

    The number of threads is left to the command, unless `environment` or the
    environment of this program sets it. If the command fails, so does this program.
    """
    environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
    done = harness.run(words, code=None, seconds=10**6, **environment)
    if done.returncode:
        sys.stderr.write(done.stderr)
        fail(f"exit code {done.returncode} of: {' '.join(map(str, words))}")
    return done


def work(args, names, **others):
    """Return the flags of the work, as arguments; `others` replace some."""
    values = {name: getattr(args, name) for name in names} | others
    words = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value).removeprefix("torch.")]
    return words


def median_and_range(values):
    """Return the median, the least and the most of a list of numbers."""
    middle = statistics.median(values)
    return {"median": middle, "least": min(values), "most": max(values)}


def pooled(rows):
    """Pool the windows of equal rows; return each metric's median, least and most."""
    kept = []
    for row in rows:
        named = {k: v for k, v in row.items() if not isinstance(v, list)}
        same = next((other for other in kept if named.items() <= other.items()), None)
        if same is None:
            kept.append({k: v if k in named else [*v] for k, v in row.items()})
        else:
            for name in row.keys() - named.keys():
                same[name] += row[name]
    return [
        {k: median_and_range(v) if isinstance(v, list) else v for k, v in row.items()}
        for row in kept
    ]


def between(values):
    """Return the means of neighbors, one fewer than there are values."""
    return [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]


def precision(args, stage):
    """Return the name of the format that a stage computes its products in."""
    if args.amp != "off" and "amp" in features(stage):
        return NAMES[args.amp]
    return "TF32" if args.tf32 and args.device.type == "cuda" else NAMES["off"]


def train_instrumented(stage, processes, flags, limits, steps=None):
    """Train a stage by its own command; return what it printed, wrote and counted.

    limits, steps: as for `variables` of benchmarks/instrument.py. What it wrote are the
    metrics of all epochs, of which the first warms up.
    """
    with tempfile.TemporaryDirectory() as name:
        out, file = Path(name, "out"), Path(name, "counted.json")
        words = [*command(stage, processes), *flags, "--out-dir", str(out)]
        done = run(words, **variables(file, limits, steps))
        lines = (out / "metrics.jsonl").read_text().splitlines()
        counted = json.loads(file.read_text())
    return done.stderr, [json.loads(line) for line in lines], counted


def images_between_steps(args, batch_size, counted):
    """Return images/s from an epoch's first step to its last, of all but the first.

    So the start of an epoch, the metrics and the evaluation are left out.
    """
    images = num_images(args, batch_size) // batch_size * batch_size - batch_size
    return [images / seconds for seconds in counted.pop("between")[1:]]


def train_by_library(args, name, processes, batch_size):
    """Train with another library; return the row of its rate, as a stage has it."""
    _, program, launcher = LIBRARIES[name]
    device = "cuda" if args.device.type == "cuda" else "cpu"
    launcher = launcher.format(
        processes=processes, device=device, port=harness.free_port()
    ).split()
    if launcher[0] == "fabric":
        launcher[0] = Path(sys.executable).with_name("fabric")
    images = num_images(args, batch_size)
    flags = work(args, WORK, batch_size=batch_size, images=images, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counted.json")
        measured = variables(file, [], images // batch_size)
        if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
            # as torchrun does; Fabric's launcher: all cores' threads in each process
            measured["OMP_NUM_THREADS"] = "1"
        run([*launcher, program, *flags], HF_HOME=folder, **measured)
        counted = json.loads(file.read_text())
    rates = images_between_steps(args, batch_size, counted)
    return {"program": name, "processes": processes, "images_per_s": rates}


def train(args, stage, processes, batch_size, limits=("bare",)):
    """Train a stage; return what was measured and what was counted.

    A window is an epoch. The ratios compare each with the mean of the windows of the
    limit just before and just after it.
    """
    names = [*WORK, "amp"] if "amp" in features(stage) else WORK
    images = num_images(args, batch_size)
    flags = work(args, names, batch_size=batch_size, images=images)
    steps = images // batch_size
    progress, rows, counted = train_instrumented(stage, processes, flags, limits, steps)
    # "epoch 3 25/25  data 0.1 ms  batch 9.8 ms ...": averages; `batch` includes `data`
    last_step = rf"^epoch \d+ {steps}/{steps} +data (\S+) ms +batch (\S+) ms"
    waited = re.findall(last_step, progress, re.MULTILINE)
    # The windows of the limit were taken in an epoch's last step; the first warmed up.
    epochs = list(zip(rows, waited, counted.pop("spent"), strict=True))[1:]
    seconds = [row["train"]["seconds"] - spent for row, _, spent in epochs]
    trained = rows[0]["train"]["count"]
    limit = {kind: between(taken) for kind, taken in counted.pop("limit").items()}
    row = {
        "stage": stage,
        "processes": processes,
        "batch_size": batch_size,
        "precision": precision(args, stage),
        "images_per_s": [trained / s for s in seconds],
        "limit_images_per_s": [trained / s for s in limit["bare"]],
        "of_limit": [b / s for b, s in zip(limit["bare"], seconds, strict=True)],
        "epoch_s": seconds,
        "evaluation_s": [row["val"]["seconds"] for row, *_ in epochs],
        "loading": [
            float(data) / (float(batch) - 1000 * spent / steps)
            for _, (data, batch), spent in epochs
        ],
        "bytes": [counted.pop("bytes")],
        "between_steps": images_between_steps(args, batch_size, counted),
    }
    if "in_step" in limit:
        pairs = zip(limit["in_step"], seconds, strict=True)
        row["of_limit_in_step"] = [in_step / s for in_step, s in pairs]
    if "ddp" in limit:
        pairs = zip(limit["bare"], limit["ddp"], strict=True)
        row["communication"] = [1 - bare / ddp for bare, ddp in pairs]
    return row, counted


def machine(args):
    """Describe the machine and the software."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = named[1] if named else cpu  # not on ARM
    gpus = range(torch.cuda.device_count() if args.device.type == "cuda" else 0)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def report_progress(text):
    """Print to standard error; only the tables go to standard output."""
    print(text, file=sys.stderr, flush=True)


def measure(args):
    """Measure everything; return what the JSON file is to hold."""
    several = [stage for stage in args.stages if "distributed" in features(stage)]
    base = [
        (stage, args.processes if stage in several else 1, args.batch_size)
        for stage in args.stages
    ]
    scaled = [
        (stage, *work)
        for stage in several[:1]
        for work in [
            *((n, args.batch_size) for n in args.scaling if n != args.processes),
            *((args.processes, n) for n in args.batch_sizes if n != args.batch_size),
        ]
    ]
    # With other libraries, what the first stage of several processes trains. They
    # train without mixed precision.
    compared = [
        (stage, args.processes, args.batch_size)
        for stage in several[:1]
        if args.amp == "off" or "amp" not in features(stage)
    ]
    libraries = [k for k, v in LIBRARIES.items() if importlib.util.find_spec(v[0])]
    measured, counted = {"stages": [], "scaling": [], "libraries": []}, {}
    # One after the other in every round, since a machine's speed can drift.
    for number in range(1, args.rounds + 1):
        for stage, processes, size in [*base, *scaled]:
            what = f"{stage}, processes: {processes}, global batch: {size}"
            report_progress(f"round {number}: {what}")
            in_scaling = stage in several[:1]
            limits = ["bare"] + ["in_step"] * (processes > 1)
            limits += ["ddp"] * (in_scaling and processes > 1)
            row, counts = train(args, stage, processes, size, limits)
            if (stage, processes, size) in base:
                measured["stages"].append(row)
                counted[stage] = counts
            if in_scaling:
                measured["scaling"].append(row)
            if (stage, processes, size) in compared:
                for name in libraries:
                    report_progress(f"round {number}: {name}, processes: {processes}")
                    row = train_by_library(args, name, processes, size)
                    measured["libraries"].append(row)
    return {
        "machine": machine(args),
        "work": {name: str(getattr(args, name)) for name in (*WORK, "rounds", "amp")},
        **{name: pooled(rows) for name, rows in measured.items()},
        "counted": counted,
    }


def main():
    args = parse_args()
    if args.show:
        result = json.loads(args.show.read_text())
    else:
        result = measure(args)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        draw(result, args.json.with_suffix(".png"))
        report_progress(f"wrote {args.json} and {args.json.with_suffix('.png')}")
    print(show(result))


if __name__ == "__main__":
    main()
