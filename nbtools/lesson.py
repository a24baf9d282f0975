"""What the notebooks use: run a command, show a diff, compare weights."""

import difflib
import importlib.util
import itertools
import linecache
import os
import re
import runpy
import shlex
import subprocess
import tempfile
import time
import traceback
from pathlib import Path

import torch

from harness import commands
from harness.sections import ROOT
from harness.sections import sections
from harness.weights import max_abs_diff as max_abs_diff  # for the notebooks

# Seconds for which a command may do nothing. The longest of these waits for a timeout.
IDLE = 60
PATIENCE = 10  # the same for programs of an exercise, which do not wait for one

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
    fails, or with `fails=True` if it does not; with `fails=None` it may do either. It
    also raises if the child does nothing for so many `seconds`: it neither prints nor
    computes, because its ranks wait for each other. Whatever ends this call also ends
    the child and the processes that it started.
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
    if hung or fails is not None and bool(done.returncode) != fails:
        nothing = f"it hangs: it did nothing for {seconds} s"
        ended = nothing if hung else f"exit code {done.returncode}"
        error = commands.CommandError(f"{ended}: {command}\n{done.stderr}")
        error.reason = ended if hung else own_error(done.stderr) or ended
        raise error
    return done


def own_error(text):
    """Return the error of the rank that failed first, and the line that raised it.

    text: what a command printed to standard error. A rank that has lost its connection
    is there because of another one. Without a traceback it is the last line that is not
    torchrun's, or nothing.
    """
    found, where = [], {}
    for line in text.splitlines():
        rank, line = re.fullmatch(r"(?:\[rank(\d+)\]: ?)?(.*)", line).groups()
        place = re.match(r'  File "(.*)", line (\d+)', line)
        if place and not re.search("site-packages|/lib/python|^<", place[1]):
            where[rank] = f"{Path(place[1]).name}, line {place[2]}: "
        elif where.get(rank, "").endswith(": ") and line.startswith("    "):
            where[rank] += line.strip()
        elif re.match(r"(\w+\.)*\w+(Error|Exception)\b", line) and where.get(rank):
            prefix = f"rank {rank}: " if rank else ""
            found.append(f"{prefix}{line} ({where[rank].removesuffix(': ')})")
    lost = re.compile("connection|timed out|timeout|peer|socket", re.IGNORECASE)
    found.sort(key=lambda each: bool(lost.search(each)))
    before, *_ = re.split(r"^(?:[EW]\d{4} |Traceback)", text, flags=re.MULTILINE)
    return (found or before.strip().splitlines()[-1:] or [""])[0]


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


def solution(stage, name):
    """Return what solutions.py of a stage gives to a name, for a check to compare."""
    return runpy.run_path(str(ROOT / stage / "solutions.py"))[name]


def check(exercise):
    """Run a function that asserts what an exercise asks for, and print if it is solved.

    If it is not, this prints what the assertion says. Of another error it also prints
    the line of the answer that raised it, and of a command that failed the rank's own
    error. If it is solved, the comment on top of the solution says why.
    """
    try:
        exercise()
    except commands.CommandError as error:
        print(f"Not solved yet: {error.reason}")
    except AssertionError as error:
        print(f"Not solved yet: {first_line(error)}")
    except Exception as error:  # whatever a half-written answer raises
        kind, line = type(error).__name__, line_of_answer(error, exercise)
        print(f"Not solved yet: {kind}: {first_line(error)}{line}")
    else:
        print(f"Solved. {reason(exercise.__name__)}".rstrip())


def assert_repaired(program, original, flags=("", ""), tolerance=1e-5, check=True):
    """Assert that a repaired program trains on two ranks as the original does on one.

    Both save their weights to the file that is their first argument. flags: what
    follows it, of the original and of the other; tolerance: the largest difference of a
    weight; check: whether check_yours.py must find nothing, too. The message is the
    symptom, and not what cures it.
    """
    assert program, f"repair a copy of {original}, and give its name here"
    two = weights_of(program, 2, flags[1])
    if check:
        assert_check_yours(program, quiet=True)
    one = weights_of(original, 1, flags[0])
    names = f"it saves {', '.join(two)}, and not {', '.join(one)}"
    assert one.keys() == two.keys(), names
    for name in one:
        off = (one[name] - two[name]).abs().max().item()
        assert off < tolerance, f"on two ranks, {name} is off by {off:.0e}"


def weights_of(program, processes, flags=""):
    """Run a program that saves its weights to the file that it is given; return them.

    Raises AssertionError if there is no such program, or if it saves nothing.
    """
    assert (ROOT / program).is_file(), f"there is no file {program}"
    file = work / "weights.pt"
    file.unlink(missing_ok=True)
    run(
        f"torchrun --standalone --nproc-per-node={processes} \\\n"
        f"  {program} $WORK/weights.pt {flags}".rstrip(),
        quiet=True,
        seconds=PATIENCE,
    )
    assert file.exists(), f"{program} has not saved its weights to that file"
    return torch.load(file, weights_only=True)


def assert_check_yours(program, quiet=False):
    """Assert that check_yours.py finds nothing in a program, on one and two processes.

    The program saves its weights to the file that is its first argument. The message is
    the first thing that differs; with `quiet`, nothing else is printed.
    """
    assert (ROOT / program).is_file(), f"there is no file {program}"
    done = run(
        "python your_own_script/check_yours.py --processes=1,2 \\\n"
        f"  --patience={PATIENCE} --weights=$WORK/weights.pt \\\n"
        f"  {program} $WORK/weights.pt",
        fails=None,
        quiet=quiet,
    )
    first = re.search(r"^  first: (.*)", done.stdout, re.MULTILINE)
    failed = re.search(r"failed: .*|no model was trained.*", done.stdout)
    found = first[1] if first else failed[0] if failed else done.stdout.strip()
    assert not done.returncode, found


def first_line(error):
    return str(error).partition("\n")[0]


def line_of_answer(error, exercise):
    """Return the last line of an answer on the way to an error, or nothing.

    The answer is in the same notebook as the function that checks it, in another cell.
    """
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_here = frame.f_globals is exercise.__globals__
        if is_here and file != exercise.__code__.co_filename:
            source = linecache.getline(file, number).strip()
            found = f" (line {number}: {source})"
    return found


def reason(name):
    """Return the comment on top of a solution in this folder, or nothing.

    name: of the function that checks it, such as exercise_1.
    """
    file, banner = Path("solutions.py"), f"# ---- {name.replace('_', ' ')} -"
    _, _, rest = (file.read_text() if file.exists() else "").partition(banner)
    lines = itertools.takewhile(lambda x: x.startswith("# "), rest.splitlines()[1:])
    return " ".join(line.removeprefix("# ") for line in lines)
