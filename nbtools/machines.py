"""Two machines for the notebooks: tools/two_machines.sh, and commands sent to them.

Where network namespaces are not allowed, two addresses of the loopback interface stand
for the machines. What needs a network between them is then not run.
"""

import contextlib
import os
import re
import shlex
import tempfile
from collections import Counter
from itertools import zip_longest

from harness import commands
from nbtools import lesson

SCRIPT = lesson.ROOT / "tools/two_machines.sh"
NOT_RUN = "(no network namespaces here: not run)"
ADDRESSES = {1: "127.0.0.1", 2: "127.0.0.2"}  # without namespaces
WIDTH = 44  # of machine1's column
STAYS = re.compile(  # the lines that `shortened` keeps
    r"^(?:\[rank\d+\]: )?(?:Traceback|[\w.]+Error\b)|failed \(exitcode| FAILED$|^=+$"
    r"|^Root Cause|^  (?:rank|exitcode) "
)
running = False


def start():
    """Make the two machines, and say what they are. They end with this process."""
    global running
    os.environ["TWO_MACHINES"] = f"machine-{os.getpid()}-"
    done = commands.run(["bash", SCRIPT, "start"], code=None)
    running = done.returncode == 0
    if running:
        lesson.run_at_end(f"bash {SCRIPT} stop")
        print("two network namespaces, machine1 and machine2")
    else:
        print(done.stderr.splitlines()[0])
        print("so two addresses stand for them, 127.0.0.1 and 127.0.0.2")


def do(words):
    """Show a command of two_machines.sh, and run it; print what it prints."""
    print(f"$ bash tools/two_machines.sh {words}")
    if running:
        print(commands.run(f"bash {SCRIPT} {words}").stdout, end="")
    else:
        print(NOT_RUN)


def words_on(machine, command):
    """Return the words of a command that runs on a machine."""
    command = command.replace("\\\n", " ").replace("$WORK", str(lesson.work))
    words = shlex.split(command)
    first = next(n for n, word in enumerate(words) if "=" not in word)
    program = commands.PROGRAMS.get(words[first], [words[first]])
    words = ["env", *words[:first], *program, *words[first + 1 :]]
    if running:
        return ["bash", SCRIPT, "on", machine, *words]
    words = [word.replace("machine1", ADDRESSES[1]) for word in words]
    return ["env", f"PET_LOCAL_ADDR={ADDRESSES[machine]}", *words]


def c10d(*options, processes=1, endpoint="machine1:29500", file=""):
    """Return a command with the c10d rendezvous: it is the same on both machines."""
    lines = (
        f"torchrun --nnodes=2 --nproc-per-node={processes} --rdzv-backend=c10d",
        " ".join((f"--rdzv-endpoint={endpoint}", *options)),
        f"06_slurm/demos/meet.py {file}".strip(),
    )
    return " \\\n    ".join(lines)


def static(machine, file=""):
    """Return a machine's command with numbers in place of a rendezvous."""
    lines = (
        f"torchrun --nnodes=2 --nproc-per-node=1 --node-rank={machine - 1}",
        "--master-addr=machine1 --master-port=29500",
        f"06_slurm/demos/meet.py {file}".strip(),
    )
    return " \\\n    ".join(lines)


@contextlib.contextmanager
def started(command, second=None, needs_network=False, disks=None):
    """Show a command and start it on both machines: a context with its two jobs.

    second: the command of machine2, if it is another one; needs_network: without
    namespaces it is not run, and there are no jobs; disks: each runs in a folder of its
    own below this one, in place of a disk.
    """
    if second is None:
        print(f"on both machines\n$ {command}", flush=True)
    else:
        print(f"on machine1\n$ {command}\non machine2\n$ {second}", flush=True)
    with contextlib.ExitStack() as stack:
        jobs = []
        if running or not needs_network:
            for machine, text in ((1, command), (2, second or command)):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                words, cwd = words_on(machine, text), lesson.ROOT
                if disks:
                    words = [cwd / w if f"{w}".endswith(".py") else w for w in words]
                    cwd = disks / f"machine{machine}"
                    cwd.mkdir(parents=True)
                job = commands.start(words, folder, cwd=cwd)
                jobs.append(stack.enter_context(job))
        yield jobs


def finish(jobs, errors=None, fails=False):
    """Wait until two jobs have ended, and print what each has printed, in sorted order.

    errors: `show_errors` prints these lines, too. With it, or with `fails`, both jobs
    should fail. Returns a commands.Done for each. Raises commands.CommandError if one
    ends in another way.
    """
    if not jobs:
        print(NOT_RUN)
        return []
    found = [job.wait() for job in jobs]
    for done in found:
        failed = done.returncode != 0
        if done.returncode == "hung" or failed != bool(errors or fails):
            raise commands.CommandError(f"{done.returncode}:\n{done.stderr}")
    show(*(sorted(done.stdout.splitlines()) for done in found))
    if errors:
        show_errors(found, errors)
    return found


def show_errors(found, errors):
    """Print each match of `errors` in what two commands printed to standard error.

    found: what `finish` returned; errors: a regular expression. A line is printed once.
    """
    lines = []
    for number, done in enumerate(found, start=1):
        seen = dict.fromkeys(map(without_varying, re.findall(errors, done.stderr)))
        lines += [f"machine{number} | {line}" for line in seen]
    if found and not lines:
        raise commands.CommandError(f"no {errors!r} in:\n{found}")
    print("\n".join(lines) or NOT_RUN)


def print_when_seen(jobs, *patterns):
    """Wait until each job has printed a line that matches its pattern; print it."""
    pairs = zip(jobs, patterns, strict=bool(jobs))
    for number, (job, pattern) in enumerate(pairs, start=1):
        commands.wait_until(
            lambda job=job, pattern=pattern: re.search(pattern, job.screen()),
            commands.LIMIT,
            job.screen,
        )
        job.look()
        print(f"machine{number} | {re.search(pattern, job.screen())[0]}")


def wait_for_new_peers(port, before):
    """Wait until both machines have more connections to a port of machine1 than before.

    before: what `peers` returned then.
    """
    if running:
        commands.wait_until(
            lambda: len(peers(port) - before) == 2, commands.LIMIT, "not connected"
        )


def peers(port):
    """Return how many connections to a port of machine1 each address has: a Counter."""
    if not running:
        return Counter()
    ss = ["ss", "-Htn", "state", "established", f"( sport = :{port} )"]
    lines = commands.run(["bash", SCRIPT, "on", 1, *ss]).stdout.splitlines()
    return Counter(line.split()[-1].rpartition(":")[0] for line in lines)


def run(
    command, second=None, needs_network=False, errors=None, fails=False, disks=None
):
    """Run a command on both machines; see `started` and `finish`.

    With `disks`, it also prints the files that are on each of them.
    """
    with started(command, second, needs_network, disks) as jobs:
        found = finish(jobs, errors, fails)
    for disk in sorted(disks.iterdir()) if disks else ():
        files = sorted(p for p in disk.rglob("*") if p.is_file())
        names = " ".join(str(p.relative_to(disk)) for p in files)
        print(f"files of {disk.name}: {names or 'none'}")
    return found


def shortened(stderr):
    """Return standard error without most lines of tracebacks, and without numbers."""
    lines = []
    for line in map(str.rstrip, stderr.strip().splitlines()):
        if STAYS.search(line):
            line = re.sub(r"^[EW]\d{4} \S+ +\d+ \S+\] ", "", line)
            line = re.sub(r"\[/\S+?:\d+\]", "[...]", line)
            line = re.sub(r"\(pid: \d+\)", "(pid: ...)", line)
            lines.append(re.sub(r"of binary: .*", "of binary: ...", line))
        elif lines and lines[-1] != "...":
            lines.append("...")
    return "\n".join(lines)


def without_varying(line):
    """Return an error's line without the ports that the kernel chose, and C++ lines."""
    line = re.sub(r"\[/\S+?:\d+\] |\$\d$", "", line)
    return re.sub(r"(\]:|machine1, )(?!29500)\d+", r"\1<port>", line)


def show(*columns):
    """Print the lines of the two machines beside each other."""
    if any(columns):
        terminals = zip(("machine1", "machine2"), columns, strict=True)
        for left, right in zip_longest(
            *([name, *lines] for name, lines in terminals), fillvalue=""
        ):
            print(f"{left:{WIDTH}}{right}".rstrip())
