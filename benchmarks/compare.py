"""Train every stage on the same work, and show how fast each one is, and why.

python -m benchmarks.compare
python -m benchmarks.compare --image-size 224 --arch resnet50 --batch-size 256  # GPUs
python -m benchmarks.compare --show benchmarks/two_cores.json
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torchvision

from benchmarks.report import draw
from benchmarks.report import show
from common.args import ArgumentParser
from common.args import existing_file
from common.args import fail
from common.args import positive_int
from common.args import writable_file
from tools.stages import ROOT
from tools.stages import command
from tools.stages import stages
from tools.stages import takes_processes

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
)
NAMES = {"off": "float32", "bf16": "bfloat16", "fp16": "float16"}
HERE = Path(__file__).resolve().parent


def parse_args():
    """Parse and check the flags: those of every stage, and what to measure."""
    parser = ArgumentParser(__doc__)
    parser.set_defaults(data="fake", image_size=32, images=None, epochs=3)
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="(default: all stages)")
    add(
        "--amp",
        choices=("off", "bf16", "fp16"),
        default="off",
        help="mixed precision in the stages that have it",
    )
    add(
        "--rounds",
        type=positive_int,
        default=3,
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
    args.stages = args.stages or stages()
    args.images = (
        args.images or 10 * args.batch_size
    )  # ten steps are an epoch, and a window
    for stage in args.stages:
        if stage not in stages():
            names = " ".join(stages())
            parser.error(f"there is no stage {stage}; the stages are {names}")
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    args.processes = args.processes or gpus or 2
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
    return args


def run(arguments, folder):
    """Run a command from the repository's folder.

    Return its standard output, its standard error and the peak resident memory, in
    bytes, of the largest of its processes. The number of threads is left to the
    command.
    """
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        child = subprocess.Popen(arguments, cwd=ROOT, stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    if child.returncode:
        sys.stderr.write(texts[1])
        fail(f"exit code {child.returncode} of: {' '.join(arguments)}")
    scale = 1 if sys.platform == "darwin" else 1024
    return *texts, usage.ru_maxrss * scale


def work(args, *names, **others):
    """Return the flags of the work, as arguments; `others` replace some."""
    values = {name: getattr(args, name) for name in (*WORK, *names)} | others
    pairs = [(f"--{name.replace('_', '-')}", str(v)) for name, v in values.items()]
    return [word for pair in pairs for word in pair]


def has_flag(stage, flag):
    return f'"{flag}"' in (ROOT / stage / "train.py").read_text()


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
    for row in kept:
        for name, value in row.items():
            if isinstance(value, list):
                median = statistics.median(value)
                row[name] = {"median": median, "least": min(value), "most": max(value)}
    return kept


def train(args, stage, processes, **others):
    """Train a stage by its own command; return what was measured.

    A window is an epoch, and the first warms up.
    """
    amp = ["amp"] if has_flag(stage, "--amp") else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [*command(stage, processes), *work(args, *amp, **others)]
        _, progress, memory = run(
            [*arguments, "--out-dir", str(folder / "out")], folder
        )
        text = (folder / "out/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()][1:]
    # "epoch 3 25/25  data 0.1 ms  batch 9.8 ms ...": `batch` includes `data`
    last_step = r"^epoch \d+ (\d+)/\1 +data (\S+) ms +batch (\S+) ms"
    steps = re.findall(last_step, progress, re.MULTILINE)[1:]
    return {
        "stage": stage,
        "processes": processes,
        "batch_size": others.get("batch_size", args.batch_size),
        "precision": NAMES[args.amp] if amp else NAMES["off"],
        "images_per_s": [
            row["train"]["images"] / row["train"]["seconds"] for row in rows
        ],
        "epoch_s": [row["train"]["seconds"] for row in rows],
        "evaluation_s": [row["val"]["seconds"] for row in rows],
        "loading": [float(data) / float(step) for _, data, step in steps],
        "bytes": [memory],
    }


def limits(args, processes, sizes, amp):
    """Return rows of the images/s with one batch on the device, bare and with DDP.

    Windows of the two alternate. The part of a step's time with DDP that the bare model
    does not need is communication. One process runs without DDP only.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={processes}"]
    start = [sys.executable, *(torchrun if processes > 1 else [])]
    start += ["-m", "benchmarks.limit"]
    asked = ["--amp", amp, "--batch-sizes", *map(str, sizes)]
    with tempfile.TemporaryDirectory() as folder:
        lines, _, _ = run([*start, *work(args), *asked], Path(folder))
    rows = []
    for line in map(json.loads, lines.splitlines()):
        row = {"processes": processes, "precision": NAMES[amp], **line}
        if processes > 1:
            pairs = zip(line["ddp"], line["bare"], strict=True)
            row["communication"] = [1 - ddp / bare for ddp, bare in pairs]
        rows.append(row)
    return rows


def count(args, stage, processes):
    """Return what a process sends per optimizer step, by benchmarks/counted.py."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counted.json")
        arguments = command(stage, processes)
        place = arguments.index(str(ROOT / stage / "train.py"))
        arguments[place:place] = ["-m", "benchmarks.counted", str(file)]
        amp = ["amp"] if has_flag(stage, "--amp") else []
        run([*arguments, *work(args, *amp, epochs=1)], Path(folder))
        if not file.exists():
            fail("--batch-size: an epoch has too few steps to count what they send")
        return json.loads(file.read_text())


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
    several = [stage for stage in args.stages if takes_processes(stage)]
    scaled = several[:1]
    processes_of = {s: args.processes if s in several else 1 for s in args.stages}
    works = [(n, args.batch_size) for n in args.scaling if n != args.processes]
    works += [(args.processes, n) for n in args.batch_sizes if n != args.batch_size]
    counted = {}
    for stage, processes in processes_of.items():
        report_progress(f"counting what {stage} sends")
        counted[stage] = count(args, stage, processes)
    measured = {"limits": [], "stages": [], "scaling": []}
    # One after the other in every round, since a machine's speed can drift.
    for number in range(1, args.rounds + 1):
        for processes in sorted({*processes_of.values(), *args.scaling}):
            for amp in sorted({"off", args.amp}, key=list(NAMES).index):
                what = f"the limit, {NAMES[amp]}, processes: {processes}"
                report_progress(f"round {number}: {what}")
                more = args.batch_sizes if processes == args.processes else []
                sizes = [args.batch_size, *more]
                measured["limits"] += limits(args, processes, sizes, amp)
            for stage in (s for s in args.stages if processes_of[s] == processes):
                report_progress(f"round {number}: {stage}")
                measured["stages"].append(train(args, stage, processes))
                if stage in scaled:
                    measured["scaling"].append(measured["stages"][-1])
        for stage in scaled:
            for processes, size in works:
                what = f"{stage}, processes: {processes}, global batch: {size}"
                report_progress(f"round {number}: {what}")
                row = train(args, stage, processes, batch_size=size)
                measured["scaling"].append(row)
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
