"""Train every stage on the same work, and show how fast each is and what holds it up.

python -m benchmarks.compare
python -m benchmarks.compare --image-size 224 --arch resnet50 --batch-size 256 --amp bf16  # GPUs
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

from benchmarks.report import draw
from benchmarks.report import show
from common import flags
from tools.stages import ROOT
from tools.stages import command
from tools.stages import stages
from tools.stages import takes_processes

import torch
import torchvision

# The flags that say what the work is, and are handed on to every script.
WORK = ("data", "data_dir", "image_size", "images", "arch", "batch_size", "epochs", "workers",
        "lr", "weight_decay", "seed", "device")  # fmt: skip
NAMES = {"off": "float32", "bf16": "bfloat16", "fp16": "float16"}
HERE = Path(__file__).resolve().parent


def parse_args():
    """Return the flags, checked: those of every stage, and what to measure."""
    parser = flags.Flags(__doc__)
    parser.set_defaults(data="fake", image_size=32, images=None, epochs=3)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="(default: all of them)")
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off",
                        help="mixed precision in the stages that have it")  # fmt: skip
    whole = flags.number(int, 1)
    parser.add_argument("--rounds", type=whole, default=3,
                        help="of --epochs each, the first warms up (default: 3)")  # fmt: skip
    parser.add_argument("--processes", type=whole, help="(default: the GPUs, or 2)")
    parser.add_argument("--scaling", type=whole, nargs="*", help="processes (default: 1 2 4)")
    parser.add_argument("--batch-sizes", type=whole, nargs="*",
                        help="more global batches (default: half and double)")  # fmt: skip
    parser.add_argument("--json", type=flags.new_file, default=HERE / "mine.json",
                        help="write the figures here, and the picture beside it")  # fmt: skip
    parser.add_argument("--show", type=flags.existing_file, help="print such a file, no more")
    args = parser.parse_args()
    args.stages = args.stages or stages()
    args.images = args.images or 10 * args.batch_size  # ten steps are an epoch, and a window
    for stage in args.stages:
        if stage not in stages():
            parser.error(f"{stage}: the stages are {' '.join(stages())}")
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    args.processes = args.processes or gpus or 2
    if args.scaling is None:
        args.scaling = [n for n in (1, 2, 4) if not gpus or n <= gpus]
    if args.batch_sizes is None:
        args.batch_sizes = [args.batch_size // 2, args.batch_size * 2]
    if args.rounds * (args.epochs - 1) < 5:
        parser.error("--epochs, --rounds: that makes less than five windows")
    works = [(processes, args.batch_size) for processes in (args.processes, *args.scaling)]
    for processes, size in [*works, *((args.processes, size) for size in args.batch_sizes)]:
        if size % processes:
            parser.error(f"--batch-size {size}: {processes} processes cannot share it equally")
    return args


def run(arguments, folder):
    """Run a command from the repository's folder; return its two outputs and the largest memory.

    The latter is the peak resident memory, in bytes, of the largest of its processes. The threads
    of a process are as the command itself sets them.
    """
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        child = subprocess.Popen(arguments, cwd=ROOT, stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    if child.returncode:
        sys.stderr.write(texts[1])
        flags.stop(f"this ended with exit code {child.returncode}: {' '.join(arguments)}")
    scale = 1 if sys.platform == "darwin" else 1024
    return *texts, usage.ru_maxrss * scale


def work(args, *names, **others):
    """Return the flags of the work, as arguments; `others` replace some."""
    values = {name: getattr(args, name) for name in (*WORK, *names)} | others
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items()]
    return [word for pair in pairs for word in pair]


def has_flag(stage, flag):
    return f'"{flag}"' in (ROOT / stage / "train.py").read_text()


def pooled(rows):
    """Put the windows of equal rows together; return the median, least and most of each figure."""
    kept = []
    for row in rows:
        named = {name: value for name, value in row.items() if not isinstance(value, list)}
        same = next((other for other in kept if named.items() <= other.items()), None)
        if same is None:
            kept.append({k: [*v] if isinstance(v, list) else v for k, v in row.items()})
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
        _, progress, memory = run([*arguments, "--out-dir", str(folder / "out")], folder)
        text = (folder / "out/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()][1:]
    # "epoch 3 25/25  data 0.1 ms  batch 9.8 ms ...": a step's milliseconds, with those of its data
    steps = re.findall(r"^epoch \d+ (\d+)/\1 +data (\S+) ms +batch (\S+) ms", progress, re.M)[1:]
    return {
        "stage": stage,
        "processes": processes,
        "batch_size": others.get("batch_size", args.batch_size),
        "precision": NAMES[args.amp] if amp else NAMES["off"],
        "images_per_s": [row["train"]["images"] / row["train"]["seconds"] for row in rows],
        "epoch_s": [row["train"]["seconds"] for row in rows],
        "evaluation_s": [row["val"]["seconds"] for row in rows],
        "loading": [float(data) / float(step) for _, data, step in steps],
        "bytes": [memory],
    }


def limits(args, processes, sizes, amp):
    """Return rows of what so many processes reach with one batch on the device, bare and with DDP.

    The latter's steps alternate with the former's, a window each; the share of its time that the
    former do not need is communication. One process takes its steps without DDP only.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = [sys.executable, *(torchrun if processes > 1 else []), str(HERE / "limit.py")]
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
    """Return what a process of a stage sends per optimizer step, by benchmarks/counted.py."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counted.json")
        arguments = command(stage, processes)
        place = arguments.index(str(ROOT / stage / "train.py"))
        arguments[place:place] = [str(HERE / "counted.py"), str(file)]
        amp = ["amp"] if has_flag(stage, "--amp") else []
        run([*arguments, *work(args, *amp, epochs=1)], Path(folder))
        if not file.exists():
            flags.stop("--batch-size: too few steps make an epoch to count what they send")
        return json.loads(file.read_text())


def machine(args):
    """Describe the machine and the software."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = named[1] if named else cpu  # ARM has no such line
    gpus = range(torch.cuda.device_count() if args.device.type == "cuda" else 0)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def tell(text):
    """Say what is being done; the tables alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def measure(args):
    """Measure everything; return it as the JSON file holds it."""
    several = [stage for stage in args.stages if takes_processes(stage)]  # the first is scaled
    processes_of = {stage: args.processes if stage in several else 1 for stage in args.stages}
    works = [(n, args.batch_size) for n in args.scaling if n != args.processes]
    works += [(args.processes, size) for size in args.batch_sizes if size != args.batch_size]
    counted = {}
    for stage, processes in processes_of.items():
        tell(f"counting what {stage} sends")
        counted[stage] = count(args, stage, processes)
    measured = {"limits": [], "stages": [], "scaling": []}
    for number in range(1, args.rounds + 1):  # all of them in turn: a machine's speed may drift
        for processes in sorted({*processes_of.values(), *args.scaling}):
            for amp in sorted({"off", args.amp}, key=list(NAMES).index):
                tell(f"round {number}: the limit, {NAMES[amp]}, processes: {processes}")
                more = args.batch_sizes if processes == args.processes else []
                measured["limits"] += limits(args, processes, [args.batch_size, *more], amp)
            for stage in (name for name in args.stages if processes_of[name] == processes):
                tell(f"round {number}: {stage}")
                measured["stages"].append(train(args, stage, processes))
                if stage in several[:1]:
                    measured["scaling"].append(measured["stages"][-1])
        for stage in several[:1]:
            for processes, size in works:  # but for the one that the table of the stages has
                tell(f"round {number}: {stage}, processes: {processes}, global batch: {size}")
                measured["scaling"].append(train(args, stage, processes, batch_size=size))
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
        tell(f"wrote {args.json} and {args.json.with_suffix('.png')}")
    print(show(result))


if __name__ == "__main__":
    main()
