"""What the notebooks use: run a command, show a diff, compare weights."""

import difflib
import importlib.util
import os
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

from harness import commands
from harness.sections import ROOT
from harness.sections import sections
from harness.weights import max_abs_diff as max_abs_diff  # for the notebooks

# Seconds for which a command may do nothing. The longest of these waits for a timeout.
IDLE = 60

# A temporary folder, which ends with the notebook. Its name in the commands is $WORK.
_scratch = tempfile.TemporaryDirectory()
work = Path(_scratch.name)

# Set where notebooks are tested: then a command is run without its launcher if it can
# be (see harness/commands.py), which takes a fraction of the time. With "working", not
# one that fails: what the launcher says of it is shown.
FORKS = os.environ.get("LESSON_FORKS")


def run(command, fails=False, quiet=False, in_order=False, seconds=IDLE):
    """Show a command as one types it, run it, and print what it prints.

    command: such as "torchrun --standalone 03_ddp_launch/train.py --out-dir $WORK/03".
    It runs in the repository's folder, without a shell; NAME=value in front sets a
    variable, and a line may end with a backslash. OMP_NUM_THREADS is 1. Standard error,
    where the progress goes, is not printed; with `quiet`, neither is standard output.
    in_order: print the lines at the end, sorted, because ranks print in any order.
    Returns a commands.Done: the exit code, and both outputs as text without the names
    of the two folders.

    Raises commands.CommandError, with what it printed to standard error, if the child
    fails, or with `fails=True` if it does not. It also raises if the child does nothing
    for so many `seconds`: it neither prints nor computes, because its ranks wait for
    each other. Whatever ends this call also ends the child and the processes that it
    started.
    """
    print(f"$ {command}", flush=True)
    words = shlex.split(command.replace("\\\n", " "))
    words = [word.replace("$WORK", str(work)) for word in words]
    forks, lines = FORKS and not (fails and FORKS == "working"), []
    with (
        tempfile.TemporaryDirectory() as folder,
        commands.start(words, folder, forks=forks, together=True) as job,
    ):
        for line in lines_of(job, seconds):
            lines.append(without_folders(line))
            if not quiet and not in_order:
                print(lines[-1], end="", flush=True)
        done = job.wait(0)
    if in_order:
        print("".join(sorted(lines)), end="", flush=True)
    done.stdout, done.stderr = "".join(lines), without_folders(done.stderr)
    hung = done.returncode == "hung"
    if hung or bool(done.returncode) != fails:
        nothing = f"it hangs: it did nothing for {seconds} s"
        ended = nothing if hung else f"exit code {done.returncode}"
        raise commands.CommandError(f"{ended}: {command}\n{done.stderr}")
    return done


class MissingPackageError(ImportError):
    """A package that a notebook needs; Jupyter shows the message and no traceback."""

    def _render_traceback_(self):
        return [str(self)]


def require(*packages):
    """Stop a notebook, with one line, if it needs packages that are not installed."""
    if missing := [name for name in packages if not importlib.util.find_spec(name)]:
        raise MissingPackageError(
            f"This notebook needs: pip install {' '.join(missing)}"
        )


def run_at_end(command):
    """Have a shell run a command when this process has ended, in whatever way.

    That is not atexit, because Jupyter kills its kernels: `tail` waits for the end.
    """
    wait = f"tail --pid={os.getpid()} --sleep-interval=0.2 --follow /dev/null"
    subprocess.Popen(
        ["bash", "-c", f"{wait}; {command}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def lines_of(job, seconds):
    """Yield the lines that a job prints to standard output, each as it comes.

    This ends when the job does, or when it has done nothing for so many seconds.
    """
    rest, running = "", True
    with (job.folder / "stdout").open() as file:
        while running:
            # before the last look
            running = job.running() and job.idle() <= seconds
            *lines, rest = (rest + file.read()).split("\n")
            yield from (f"{line}\n" for line in lines)
            time.sleep(0.02)
    if rest:
        yield rest


def without_folders(text):
    """Return a text with $WORK for the temporary folder, and paths from the root."""
    return text.replace(str(work), "$WORK").replace(f"{ROOT}/", "")


def grep(pattern, text):
    """Print the lines of a text in which a regular expression is found.

    Where torch names a line of its own C++ code, such as [/.../x.cc:12], that is left
    out. gloo has two messages for one timeout, and which it is differs from run to run:
    both are shown as <Timed out waiting ...>. Raises ValueError if no line matches.
    """
    text = re.sub(r"\[/\S+?:\d+\] ", "", text)
    timed_out = r"(Timed out waiting \d+ms for|Application timeout caused).*"
    text = re.sub(timed_out, "<Timed out waiting ...>", text)
    found = [line for line in text.splitlines() if re.search(pattern, line)]
    if not found:
        raise ValueError(f"no line matches {pattern!r}")
    print(*found, sep="\n")


def show_file(name):
    """Print a file, named by its path from the repository's folder."""
    print((ROOT / name).read_text(), end="")


def show(name, section):
    """Print one section of a stage's script, or of a file named by its path."""
    print("\n".join(sections(name)[section]))


def diff(before, after, section):
    """Return the lines of a unified diff of one section of two stages' scripts.

    It has two lines of context and no line numbers, which would count from the start of
    the section.
    """
    old, new = sections(before)[section], sections(after)[section]
    lines = list(difflib.unified_diff(old, new, n=2, lineterm=""))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


def show_diff(before, after, section, hunk=None):
    """Print the diff of one section of two stages' scripts, in the 16 ANSI colors.

    With `hunk`, print only that one of its hunks, counted from 1.
    """
    lines = diff(before, after, section)
    if hunk is not None:
        starts = [n for n, line in enumerate(lines) if line == "@@"] + [len(lines)]
        lines = lines[starts[hunk - 1] : starts[hunk]]
    colors = {"+": "32", "-": "31", "@": "36"}
    for line in lines:
        color = colors.get(line[0])
        print(f"\x1b[{color}m{line}\x1b[0m" if color else line)
