"""What the notebooks use: run a command, show a diff, compare weights."""

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from common.checkpoint import load
from nbtools.sections import ROOT
from nbtools.sections import sections

# A temporary folder, which ends with the notebook. Its name in the commands is $WORK.
_scratch = tempfile.TemporaryDirectory()
work = Path(_scratch.name)

PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# What the tests start in their place, unless the command is to fail (tests/by_fork.py)
STARTER = shlex.split(os.environ.get("LESSON_STARTER", ""))


def run(command, fails=False, quiet=False, seconds=300):
    """Show a command as one types it, run it, and print what it prints.

    command: such as "torchrun --standalone 03_ddp_launch/train.py --out-dir $WORK/03".
    It runs in the repository's folder, without a shell; NAME=value in front sets a
    variable, and a line may end with a backslash. OMP_NUM_THREADS is 1. Standard error,
    where the progress goes, is not printed; with `quiet`, neither is standard output.
    Returns the subprocess.CompletedProcess, with both outputs as text and without the
    names of the two folders.

    Raises CalledProcessError if the child fails, or with `fails=True` if it does not.
    It is killed after `seconds`. Whatever ends this call also ends the child and the
    processes that it started.
    """
    print(f"$ {command}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = shlex.split(command.replace("\\\n", " "))
    words = [word.replace("$WORK", str(work)) for word in words]
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    program = PROGRAMS.get(words[0], words[:1])
    if words[0] in PROGRAMS and STARTER and not fails:
        program = [*STARTER, words[0]]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [*program, *words[1:]],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        alarm = threading.Timer(seconds, kill_process_tree, [child])
        alarm.start()
        lines = []
        try:
            for line in child.stdout:
                lines.append(without_folders(line))
                if not quiet:
                    print(lines[-1], end="", flush=True)
            child.wait()
        finally:
            alarm.cancel()
            kill_process_tree(child)
        errors.seek(0)
        output, progress = "".join(lines), without_folders(errors.read())
    if bool(child.returncode) != fails:
        # the cause, because that is shown where a notebook's output is not
        raise subprocess.CalledProcessError(
            child.returncode, command, output, progress
        ) from RuntimeError(progress)
    return subprocess.CompletedProcess(command, child.returncode, output, progress)


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


def kill_process_tree(child):
    """Kill a child that `launch` started, and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child.pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    child.wait()


def show(stage, section):
    """Print one section of a stage's script."""
    print("\n".join(sections(stage)[section]))


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


def max_abs_diff(one, other):
    """Return the largest absolute difference between the weights in two files."""
    one, other = load(one), load(other)
    if one.keys() != other.keys():
        raise ValueError(f"different names: {sorted(one.keys() ^ other.keys())}")
    return max(
        (one[name].double() - other[name].double()).abs().max().item() for name in one
    )


def check(exercise):
    """Run a function that asserts what an exercise asks for; print if it is solved."""
    try:
        exercise()
    except Exception as error:  # whatever a half-written answer raises
        reason = str(error).partition("\n")[0]
        if not isinstance(error, AssertionError):
            reason = f"{type(error).__name__}: {reason}"
        print(f"Not solved yet: {reason}")
    else:
        print("Solved.")
