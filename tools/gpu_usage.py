"""What did the GPUs of this machine do? nvidia-smi into a file, and the file as a plot.

python -m tools.gpu_usage record usage.csv    until Ctrl-C
python -m tools.gpu_usage plot usage.csv usage.png

`record` runs on one machine and beside the training: start one per node. nvidia-smi
writes a line per GPU and second, with the columns FIELDS, which `nvidia-smi
--help-query-gpu` explains. A value that a GPU does not have is `[N/A]` or `[Not
Supported]` there, and a gap in the plot.
"""

import argparse
import contextlib
import math
import re
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from tools.stages import fail

FIELDS = ("timestamp", "index")
FIELDS += ("utilization.gpu", "clocks.sm", "power.draw", "memory.used")
LABELS = ("utilization (%)", "clock (MHz)", "power (W)", "memory (GiB)")
MIB_PER_GIB = 1024
PICTURES = (".png", ".svg", ".pdf")


def record(path):
    """Have nvidia-smi write to a new file until Ctrl-C or SIGTERM.

    Fails, and leaves no file, if there is no nvidia-smi or if it ends by itself.
    """
    if shutil.which("nvidia-smi") is None:
        fail("no nvidia-smi here: there is no NVIDIA driver, or it is not in PATH")
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}"]
    query += ["--format=csv,noheader,nounits", "--loop-ms=1000"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as from a job file
    try:
        with path.open("x") as file, subprocess.Popen(query, stdout=file) as smi:
            try:
                smi.wait()
            except KeyboardInterrupt:
                smi.terminate()
                print(f"{path}: written until now", file=sys.stderr)
                return
    except FileExistsError:
        fail(f"{path} exists already: choose another name")
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    said = path.read_text().strip().splitlines()  # nvidia-smi's errors go there, too
    path.unlink()
    fail(f"nvidia-smi ended by itself: {said[-1] if said else 'it printed nothing'}")


def read(path):
    """Return the lines of a recorded file.

    Each is a list: the GPU's index, seconds since the first line, utilization (%),
    clock (MHz), power (W) and memory (GiB); nan stands for what the GPU does not
    report. A last line that was cut off is left out. Fails if there is no valid line,
    or an invalid one.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: {getattr(error, 'strerror', 'not a text file')}")
    lines = text.splitlines()
    if not text.endswith("\n"):
        lines = lines[:-1]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            when, gpu, *values = line.split(", ")
            when = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f")
            usage, clock, power, memory = map(number_or_nan, values)
            rows.append([int(gpu), when, usage, clock, power, memory / MIB_PER_GIB])
        except ValueError:
            fail(f"{path}, line {number}: not a line of `record`: {line[:60]!r}")
    if not rows:
        fail(f"{path}: no line is in it")
    first = rows[0][1]
    return [[gpu, (when - first).total_seconds(), *rest] for gpu, when, *rest in rows]


def number_or_nan(text):
    """Return a number, or nan for nvidia-smi's `[N/A]`, `N/A` or `[Not Supported]`."""
    return math.nan if re.fullmatch(r"\[.*\]|N/A", text) else float(text)


def draw(rows):
    """Return a figure of what `read` returns: four plots, with a line per GPU."""
    import matplotlib

    matplotlib.use("Agg")  # a file, on a machine without a screen
    import matplotlib.pyplot as plt

    figure, plots = plt.subplots(4, sharex=True, figsize=(10, 9), layout="constrained")
    for gpu in sorted({row[0] for row in rows}):
        _, seconds, *columns = zip(*(row for row in rows if row[0] == gpu), strict=True)
        for plot, values in zip(plots, columns, strict=True):
            plot.plot(seconds, values, label=f"GPU {gpu}", linewidth=1)
    for plot, label in zip(plots, LABELS, strict=True):
        plot.set_ylabel(label)
        plot.set_ylim(bottom=0)
    plots[0].set_ylim(0, 105)
    plots[0].legend(loc="upper left", bbox_to_anchor=(1, 1))
    plots[-1].set_xlabel("seconds")
    return figure


def plot(path, picture):
    """Draw a recorded file into a picture; fails if the picture cannot be written."""
    if picture.suffix not in PICTURES:
        fail(f"{picture}: the name must end in {', '.join(PICTURES)}")
    figure = draw(read(path))
    new = picture.with_name(f"new-{picture.name}")
    try:
        figure.savefig(new)
        new.replace(picture)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        fail(f"{picture}: {error.strerror}")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_usage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    help_text = "record what nvidia-smi prints until Ctrl-C"
    recording = commands.add_parser("record", help=help_text)
    recording.add_argument("file", type=Path, metavar="FILE.csv", help="a new file")
    plotting = commands.add_parser("plot", help="draw a recorded file")
    plotting.add_argument("file", type=Path, metavar="FILE.csv", help="a recorded file")
    plotting.add_argument("picture", type=Path, metavar="OUT.png", help="to write")
    args = parser.parse_args()
    if args.command == "record":
        record(args.file)
    else:
        plot(args.file, args.picture)


if __name__ == "__main__":
    main()
