"""What the notebooks use: launch a stage, show a diff, compare weights, draw curves."""

import difflib
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

import matplotlib.pyplot as plt
import psutil

from common.checkpoint import load
from common.checkpoint import read_metrics
from nbtools.sections import ROOT
from nbtools.sections import sections


def launch(arguments, fails=False, quiet=False, seconds=300, **variables):
    """Run `python ARGUMENTS` from the repository's folder and print what it prints.

    arguments: a list of strings; variables: environment variables to set (None removes
    one), in addition to OMP_NUM_THREADS=1. Standard error, where the progress goes, is
    not printed; with `quiet`, neither is standard output. Returns the
    subprocess.CompletedProcess, with both outputs as text.

    Raises CalledProcessError if the child fails, or with `fails=True` if it does not.
    It is killed after `seconds`. Whatever ends this call also ends the child and the
    processes that it started.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment = {k: v for k, v in environment.items() if v is not None}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
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
                if not quiet:
                    print(line, end="", flush=True)
                lines.append(line)
            child.wait()
        finally:
            alarm.cancel()
            kill_process_tree(child)
        errors.seek(0)
        output, progress = "".join(lines), errors.read()
    done = subprocess.CompletedProcess(arguments, child.returncode, output, progress)
    if bool(done.returncode) != fails:
        print(progress)
        raise subprocess.CalledProcessError(
            child.returncode, arguments, output, progress
        )
    return done


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


def show_diff(before, after, section):
    """Print the diff of one section of two stages' scripts, in the 16 ANSI colors."""
    colors = {"+": "32", "-": "31", "@": "36"}
    for line in diff(before, after, section):
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
        print(f"Not solved yet: {type(error).__name__}. {reason}".strip())
    else:
        print("Solved.")


def draw_curves(runs):
    """Plot the training loss and validation accuracy of {label: its --out-dir}."""
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    for (label, folder), marker in zip(runs.items(), "o+x^sv*", strict=False):
        rows = read_metrics(folder)
        epochs = [row["epoch"] for row in rows]
        style = {"marker": marker, "markersize": 9, "fillstyle": "none", "label": label}
        left.plot(epochs, [row["train"]["loss"] for row in rows], **style)
        right.plot(epochs, [row["val"]["acc1"] for row in rows], **style)
    left.set(xlabel="epoch", title="training loss")
    right.set(xlabel="epoch", title="validation accuracy, %")
    left.legend()
    plt.show()
