"""Check a piece that you wrote, on several ranks: python exercises/check.py NAME [FILE]

Without FILE, exercises/mine/NAME.py is checked. Without NAME, all pieces are listed.
Exit code 0: solved; 1: not yet; 2: there is no such piece or file.
"""

import ast
import faulthandler
import importlib
import importlib.util
import json
import linecache
import math
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from harness import commands

PIECES = ("ring", "ddp", "sampler", "resume", "zero1", "fsdp", "column_row", "pipeline")
# The runs of a check: the number of ranks, and torch's default dtype. The second one
# finds what is written for three ranks, or for float64.
RUNS = [(3, "float64"), (2, "float32")]

# Seconds. A limit runs only while no rank computes, so it does not matter how busy the
# machine is.
HANGS = 5  # all ranks wait
AFTER_A_FAILURE = 1  # a rank has failed, and all others wait
COMPUTES = 10  # of a core's time, for one rank: an endless loop
IN_FORK = " in in_fork"  # harness/commands.py's, which is outside of all that we run

HANG = "do all ranks make the same calls, in the same order?"
MESSAGES = "does each begin to send and to receive before it waits? What one does in a "
MESSAGES += "batch, the other does in a batch, too"
GLOO_ABORTS = "gloo ends a rank if two give a call tensors of different size or dtype"


# ---- one rank ------------------------------------------------------------------------
def be_a_rank(name, path, dtype, folder):
    """Run the check, write (kind, text) of its error or ("", ""), and wait for the end.

    If this process ended first, the others would see errors of their connections to it
    in place of what is wrong.
    """
    import torch
    import torch.distributed as dist

    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False)
    faulthandler.register(signal.SIGXCPU, sys.stderr, all_threads=False, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPUTES, COMPUTES + 1))
    torch.set_default_dtype(getattr(torch, dtype))
    # Not ended by gloo before: the parent knows better when nothing happens.
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    check = importlib.import_module(f"exercises.checks.{name}").check
    said = ("", "")
    try:
        check(load(path), dist.get_rank())
    except BaseException as error:
        said = (type(error).__name__, explain(error, path))
    unfinished = Path(folder, f"unfinished-{dist.get_rank()}")
    unfinished.write_text(json.dumps(said))
    unfinished.rename(Path(folder, f"said-{dist.get_rank()}"))
    while True:
        signal.pause()


def load(path):
    """Return the answer as a module."""
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location("answer", path)
    answer = sys.modules["answer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answer)
    return answer


def explain(error, path):
    """Return what a check asserts, or else an error, and where in answer and check."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = frames[-1].f_code
    if isinstance(error, AssertionError) and code.co_filename != path:
        return str(error)
    if isinstance(error, NotImplementedError):
        return f"{code.co_name} is not written (line {frames[-1].f_lineno})"
    ours = str(HERE / "checks")
    known = traceback.extract_tb(error.__traceback__)
    known = [each for each in known if each.filename.startswith((path, ours))]
    lines = traceback.format_list(known) + traceback.format_exception_only(error)
    return f"{type(error).__name__}, in\n{''.join(lines).rstrip()}"


# ---- all ranks -----------------------------------------------------------------------
def run(name, path, ranks, dtype, folder):
    """Run a check on all ranks; return what is wrong, "" for nothing.

    What they print is printed at the end, each line with its rank.
    """
    words = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", HERE / "check.py"]
    results = folder / dtype
    words += [name, path, dtype, results]
    said, died = {}, {}
    with commands.start(words, results, forks=True, cwd=folder) as job:

        def is_over():
            codes = {rank: fork.exitcode for rank, fork in enumerate(job.forks)}
            died.update({rank: c for rank, c in codes.items() if c is not None})
            for rank in range(ranks):
                if (file := results / f"said-{rank}").exists():
                    said[rank] = json.loads(file.read_text())
            failed = died or any(kind for kind, _ in said.values())
            limit = AFTER_A_FAILURE if failed else HANGS
            return len(said | died) == ranks or job.idle() > limit

        commands.wait_until(is_over, math.inf, every=0.05)
        waiting = [rank for rank in range(ranks) if rank not in said | died]
        for rank in waiting:
            os.kill(job.forks[rank].pid, signal.SIGUSR1)
            stderr = job.folders[rank] / "stderr"  # whose stack ends with this:
            commands.wait_until(lambda s=stderr: IN_FORK in s.read_text(), 300)
        screens = job.printed().ranks
    for rank, screen in enumerate(screens):
        for line in screen.stdout.splitlines():
            print(f"rank {rank}: {line}")
    if died:
        rank = min(died)
        return f"rank {rank} {how_it_died(died[rank], screens[rank].stderr, path)}"
    for rank, (kind, text) in sorted(said.items()):
        if kind:
            return f"rank {rank}: {text}"
    if not waiting:
        return ""
    lines = [f"  rank {rank} has ended" for rank in said]
    lines += [f"  rank {n} waits in {where(screens[n].stderr, path)}" for n in waiting]
    hint = MESSAGES if name in ("ring", "pipeline") else HANG
    return "\n".join([f"the ranks wait for each other: {hint}", *sorted(lines)])


def how_it_died(code, stderr, path):
    """Return why a rank's process has ended before it said anything."""
    if code >= 0:
        return f"ended its process, with exit code {code}: by os._exit?"
    if code == -signal.SIGXCPU:
        return f"computes and does not end, in {where(stderr, path)}"
    hint = f": {GLOO_ABORTS}" if code == -signal.SIGABRT else ""
    return f"was ended by {signal.Signals(-code).name}, in {where(stderr, path)}{hint}"


def where(stderr, path):
    """Return in which line of the answer a rank is, by what faulthandler has written.

    That begins with the innermost call; that of the collective is before the answer's.
    """
    found = re.search(rf'File "{re.escape(str(path))}", line (\d+)', stderr)
    if not found:
        return "the check"
    before = stderr[: found.start()]
    calls = re.findall(r'distributed_c10d\.py", line \d+ in (\w+)', before)
    source = linecache.getline(str(path), int(found[1])).strip()
    return f"{calls[-1] if calls else 'your code'} (line {found[1]}: {source})"


# ---- a piece -------------------------------------------------------------------------
def check(name, path):
    """Check an answer; return what is wrong, "" for nothing."""
    commands.preloaded[:] = ["torch", "harness.commands", f"exercises.checks.{name}"]
    with tempfile.TemporaryDirectory() as folder:
        for ranks, dtype in RUNS:
            if wrong := run(name, path, ranks, dtype, Path(folder)):
                is_other = (ranks, dtype) != RUNS[0]
                return (f"on {ranks} ranks, in {dtype}: " if is_other else "") + wrong
    return ""


def fail(text):
    """Print what is wrong with the command, and end with exit code 2."""
    print(text, file=sys.stderr)
    sys.exit(2)


def main(arguments):
    if not arguments:
        for name in PIECES:
            stub = ast.parse((HERE / f"stubs/{name}.py").read_text())
            print(f"{name:12}{ast.get_docstring(stub).splitlines()[0]}")
        return
    name, *files = arguments
    if name not in PIECES or len(files) > 1:
        usage = "python exercises/check.py NAME [FILE]"
        fail(f"{usage}, where NAME is one of {', '.join(PIECES)}")
    mine, stub = HERE / f"mine/{name}.py", HERE / f"stubs/{name}.py"
    path = Path(files[0]) if files else mine if mine.is_file() else stub
    if not path.is_file():
        fail(f"there is no file {path}")
    if path == stub:
        here, there = map(os.path.relpath, (stub, mine.parent))
        print(f"This checks the stub. To begin: cp {here} {there}/")
    if wrong := check(name, path.resolve()):
        print(f"Not solved yet: {wrong}")
        sys.exit(1)
    print(f"Solved. What torch does beyond it is in exercises/solutions/{name}.py.")


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_a_rank(*sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
