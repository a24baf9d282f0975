"""Check a piece that you wrote, on three ranks: python exercises/check.py NAME [FILE]

Without FILE, exercises/mine/NAME.py is checked. Without NAME, all pieces are listed.
Exit code 0: solved; 1: not yet; 2: there is no such piece or file.
"""

import ast
import contextlib
import ctypes
import faulthandler
import hashlib
import importlib.util
import json
import linecache
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
MINE = HERE / "mine"
SOLVED = MINE / "solved.json"  # {name: the hash of the answer that was right}

# Seconds. A limit runs only while no rank computes, so it does not matter how busy the
# machine is: each rank counts its PULSEs in which it used less than 2 % of a core.
PULSE = 0.1
NOTHING = 0.02 * PULSE
HANGS = 5  # all ranks wait
AFTER_A_FAILURE = 1  # a rank has failed, and all others wait
COMPUTES = 10  # of a core's time, for one rank: an endless loop

DIED = "died"  # what is said of a rank that has ended without a word
HANG = ": do all ranks make the same calls, in the same order?"
MESSAGE = ": a message needs two ranks: does the other begin it before it waits itself?"

fork = multiprocessing.get_context("fork")


# ---- one rank ------------------------------------------------------------------------
def one_rank(phase, rank, path, wanted, folder, pulse, parent, connection):
    """Run a phase of a check as one rank: send (kind, text) of an error, or ("", "").

    Then it waits until it is killed: if it ended, the others would see errors of their
    connections to it in place of what is wrong.
    """
    os.setpgid(0, 0)  # it is killed together with what it starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPUTES, COMPUTES + 1))
    only_python_prints()
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    faulthandler.enable(os.open(pulse.fault[rank], flags))
    os.chdir(folder / "work")
    beats = (pulse, parent, str(path), rank)
    threading.Thread(target=beat, args=beats, daemon=True).start()
    said = ("", "")
    try:
        join(rank, folder, phase)
        phase(load(path, wanted), rank)
    except BaseException as error:
        said = (type(error).__name__, explain(error, path))
    connection.send(said)
    while True:
        signal.pause()


def only_python_prints():
    """Let print() through, but not what gloo says about its connections."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, os.fdopen(os.dup(descriptor), "w", 1, errors="replace"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def join(rank, folder, phase):
    """Initialize the process group, over the loopback interface."""
    import torch
    import torch.distributed as dist

    from exercises.checks import RANKS

    torch.set_num_threads(1)
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    store = dist.FileStore(str(folder / f"store-{phase.__name__}"), RANKS)
    # Never ended by gloo: the parent knows better when nothing happens.
    dist.init_process_group("gloo", None, timedelta(days=1), RANKS, rank, store)


def load(path, wanted):
    """Return the answer as a module, which must have all names that are wanted."""
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location("answer", path)
    answer = sys.modules["answer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answer)
    for name in wanted:
        assert hasattr(answer, name), (
            f"{path.name} has no {name}: keep the stub's names"
        )
    return answer


def beat(pulse, parent, path, rank):
    """Note every PULSE for how long this rank has done nothing, and where it is.

    End it if the parent has ended.
    """
    quiet, used = 0, time.process_time()
    while True:
        time.sleep(PULSE)
        before, used = used, time.process_time()
        quiet = quiet + PULSE if used - before < NOTHING else 0
        pulse.where[rank].value = where(path).encode()[:300]
        pulse.quiet[rank] = quiet
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)


def where(path):
    """Return in which collective, and in which line of the answer, this rank is now."""
    frame, name = sys._current_frames()[threading.main_thread().ident], ""
    while frame and frame.f_code.co_filename != path:
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            name = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return f"{name} of the check" if name else "the check"
    line = f"line {frame.f_lineno}: {source(path, frame.f_lineno)}"
    return f"{name} ({line})" if name else line


def source(path, number):
    return linecache.getline(str(path), number).strip()


def explain(error, path):
    """Return an error as one line, with the line of the answer in which it was."""
    said = str(error).strip().partition("\n")[0]
    text = ": ".join(filter(None, (type(error).__name__, said)))
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = (error.text or "").strip()
        return f"SyntaxError: {error.msg} ({path.name}, line {error.lineno}: {line})"
    frames = [*traceback.walk_tb(error.__traceback__)]
    names = [frame.f_code.co_filename for frame, _ in frames]
    in_answer = [n for n, name in enumerate(names) if name == str(path)]
    if isinstance(error, AssertionError) and names[-1] != str(path):
        text = said
    if in_answer:
        frame, number = frames[in_answer[-1]]
        if isinstance(error, NotImplementedError):
            text = f"{frame.f_code.co_name} is not written"
        return f"{text} ({path.name}, line {number}: {source(path, number)})"
    if isinstance(error, AssertionError):
        return text
    number = frames[-1][1]
    file = Path(names[-1])  # with its folder, as a check has the name of an answer
    short = file.relative_to(HERE) if file.is_relative_to(HERE) else file.name
    line = f"{short}, line {number}: {source(file, number)}"
    return f"{text} (when the check used what your code returned; {line})"


# ---- all ranks -----------------------------------------------------------------------
class Pulse:
    """What each rank last wrote: `quiet`, in seconds, and `where`, as bytes.

    fault: a path for each, where Python writes the stack if a signal such as SIGABRT
    ends it.
    """

    def __init__(self, ranks, folder):
        self.fault = [folder / f"fault-{rank}" for rank in range(ranks)]
        self.quiet = fork.RawArray("d", ranks)
        self.where = [fork.RawArray(ctypes.c_char, 301) for _ in range(ranks)]


@contextlib.contextmanager
def started(ranks, phase, *args):
    """Start the ranks; yield them as pairs (process, connection); kill them."""
    pairs = []
    try:
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            arguments = (phase, rank, *args, os.getpid(), theirs)
            pairs.append((fork.Process(target=one_rank, args=arguments), ours))
            pairs[-1][0].start()
            theirs.close()
        yield pairs
    finally:
        for process, _ in pairs:
            if process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # if it had no time to make a group of its own
        for process, _ in pairs:
            if process.pid:
                process.join()


def heard(process, connection):
    """Return what a rank has said, (kind, text); None if it still runs."""
    with contextlib.suppress(EOFError):
        if connection.poll():
            return connection.recv()
    if process.is_alive():
        return None
    return DIED, process.exitcode


def run_phase(phase, path, wanted, folder):
    """Run a phase on all ranks; return what is wrong, "" for nothing."""
    from exercises.checks import RANKS

    pulse, said = Pulse(RANKS, folder), {}
    with started(RANKS, phase, path, wanted, folder, pulse) as pairs:
        while left := set(range(RANKS)) - {*said}:
            if min(pulse.quiet[rank] for rank in left) > (
                AFTER_A_FAILURE if any(kind for kind, _ in said.values()) else HANGS
            ):
                break
            multiprocessing.connection.wait([pairs[n][1] for n in left], PULSE)
            news = {rank: heard(*pairs[rank]) for rank in left}
            said.update({rank: each for rank, each in news.items() if each})
        return verdict(said, pulse, path, getattr(phase, "killed", False))


def verdict(said, pulse, path, may_die):
    """Return what is wrong, from what the ranks have said and where the others are."""
    died = {rank: code for rank, (kind, code) in said.items() if kind == DIED}
    if died and not may_die:
        return how_it_died(*min(died.items()), pulse, path)
    for rank in sorted({*said} - {*died}):
        kind, text = said[rank]
        if kind == "AssertionError" or kind and not died:
            return text
    if len(said) == len(pulse.where) or died:
        return ""
    places = {}
    for rank, where in enumerate(pulse.where):
        place = "have ended" if rank in said else f"wait in {where.value.decode()}"
        places.setdefault(place, []).append(rank)
    said = ", ".join(sentence(ranks, place) for place, ranks in places.items())
    return said + hint(places)


def hint(places):
    """Return why the ranks may be waiting there."""
    calls = {place.removeprefix("wait in ").split()[0] for place in places}
    others = calls - {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
    # "line": in a wait(); "have": have ended
    return MESSAGE if others < calls and others <= {"line", "have"} else HANG


def how_it_died(rank, code, pulse, path):
    if code == -signal.SIGXCPU:
        where = pulse.where[rank].value.decode()
        return f"rank {rank} computes and does not end, in {where}"
    if code < 0:
        name = signal.Signals(-code).name
        stack = pulse.fault[rank].read_text() if pulse.fault[rank].exists() else ""
        found = re.search(rf'File "{re.escape(str(path))}", line (\d+)', stack)
        line = found and f" (line {found[1]}: {source(path, int(found[1]))})"
        sizes = ": have the two tensors of each message the same size and dtype?"
        cause = sizes if -code == signal.SIGABRT else ""
        return f"rank {rank} was ended by {name}{line or ''}{cause}"
    return f"rank {rank} ended its process, with exit code {code}: by os._exit?"


def sentence(ranks, verb):
    """Return "rank 0 waits in ...", or "ranks 1 and 2 wait in ..."."""
    if len(ranks) > 1:
        *some, last = map(str, ranks)
        return f"ranks {', '.join(some)} and {last} {verb}"
    one = verb.replace("wait", "waits", 1) if verb.startswith("wait") else "has ended"
    return f"rank {ranks[0]} {one}"


# ---- a piece -------------------------------------------------------------------------
def pieces():
    """Return the names of all pieces, in the order of README's table."""
    table = (HERE / "README.md").read_text()
    names = [path.stem for path in HERE.glob("*.py") if path.name != "check.py"]
    return sorted(names, key=lambda name: table.find(f"[{name}]"))


def names_of(stub):
    """Return the names of the classes and functions that a stub defines."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    body = ast.parse(stub.read_text()).body
    return [node.name for node in body if isinstance(node, kinds)]


def judge(name, path):
    """Check an answer. Return what is wrong, "" for nothing, and the check's module."""
    check = importlib.import_module(f"exercises.checks.{name}")  # with torch, once
    wanted = names_of(HERE / f"{name}.py")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work").mkdir()
        for phase in getattr(check, "PHASES", None) or [check.check]:
            if wrong := run_phase(phase, path, wanted, Path(folder)):
                return wrong, check
    return "", check


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def solved():
    """Return {name: the hash of the answer in mine/ that was right}."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(SOLVED.read_text())
    return {}


def list_pieces():
    """Print all pieces, and how far the reader is: without running anything."""
    right = solved()
    for name in pieces():
        first = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text()))
        mine = MINE / f"{name}.py"
        state = "begun" if mine.is_file() else "-"
        if name in right:
            is_same = mine.is_file() and hash_of(mine) == right[name]
            state = "solved" if is_same else "changed"  # since it was solved
        print(f"{name:12}{state:10}{first.partition(chr(10))[0]}")
    print("\nTo check one: python exercises/check.py NAME")


def main(arguments):
    if not arguments:
        return list_pieces()
    name, *files = arguments
    if name not in pieces() or len(files) > 1:
        usage = "python exercises/check.py NAME [FILE]"
        sys.exit(error(f"{usage}, where NAME is one of {', '.join(pieces())}"))
    mine, stub = MINE / f"{name}.py", HERE / f"{name}.py"
    path = Path(files[0]) if files else mine if mine.is_file() else stub
    if not path.is_file():
        sys.exit(error(f"there is no file {path}"))
    if path == stub:
        here, there = map(os.path.relpath, (stub, MINE))
        print(f"This checks the stub. To begin: cp {here} {there}/", flush=True)
    wrong, check = judge(name, path.resolve())
    if wrong:
        print(f"Not solved yet: {wrong}")
        sys.exit(1)
    print(textwrap.fill(f"Solved. {check.SOLVED}", 88))
    if path.resolve() == mine:
        SOLVED.write_text(json.dumps({**solved(), name: hash_of(mine)}, indent=1))


def error(text):
    """Print what is wrong with the command; return its exit code."""
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)  # the pieces have names of modules, such as evaluate
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
