"""How the tests run a stage: by its own command, or in a fork of a process that has torch."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tools.stages import ROOT
from tools.stages import command

import psutil

ANSWER = 20  # seconds within which bad input is answered
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["torch", "torchvision", "sklearn.datasets"])


def environment(**variables):
    """Return the environment of a run: no launcher's variables, one thread per process."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "OMP_NUM_THREADS": "1", **variables}


def family(pid):
    """Return the live processes that descend from process `pid`, with itself."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def started(arguments, folder, cwd=ROOT, **variables):
    """Start a command, its outputs going to `folder`/stdout and stderr; kill what is left of it.

    Yields the subprocess.Popen, with three more attributes: `screen()` is all that it printed so
    far, `wait_for(text)` waits for it to print that, `members` collects its processes.
    """
    folder = Path(folder)
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        child = subprocess.Popen(
            arguments,
            cwd=cwd,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    child.screen = lambda: (folder / "stdout").read_text() + (folder / "stderr").read_text()
    child.members = []

    def wait_for(text, seconds=60):
        end = time.monotonic() + seconds
        while text not in child.screen():
            assert time.monotonic() < end and child.poll() is None, child.screen()
            time.sleep(0.05)
        child.members = family(child.pid)

    child.wait_for = wait_for
    try:
        yield child
    finally:
        for process in {*child.members, *family(child.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()


def run(arguments, folder, seconds=120, **variables):
    """Run a command to its end. Returns its `returncode`, `stdout`, `stderr` and `seconds`."""
    begin = time.monotonic()
    with started(arguments, folder, **variables) as child:
        child.wait(timeout=seconds)
    return SimpleNamespace(
        returncode=child.returncode,
        stdout=(Path(folder) / "stdout").read_text(),
        stderr=(Path(folder) / "stderr").read_text(),
        seconds=time.monotonic() - begin,
    )


def train(stage, processes, flags, folder, **options):
    """Run a stage by the command it shows, with --out; return `run`'s answer, rows and weights."""
    out = Path(folder) / "out"
    done = run([*command(stage, processes), *flags, "--out", str(out)], folder, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    done.rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    done.weights = out / "last.pt"
    done.epochs = re.findall("^epoch .*", done.stdout, re.MULTILINE)
    return done


def in_fork(script, arguments, folder, variables, prepare):
    """Be the process that `fork` starts: run a script as if it had been started by itself."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.clear()
    os.environ.update(environment(**variables))
    if prepare:
        prepare()
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(str(script), run_name="__main__")


def fork(script, arguments, folder, prepare=None, seconds=60, **variables):
    """Start a script in a fork of a process that has torch imported, which saves those seconds.

    Returns a function that waits for its end and returns `returncode`, `stdout` and `stderr`.
    prepare: a picklable function that the fork calls first.
    """
    Path(folder).mkdir(exist_ok=True)
    arguments = (script, arguments, folder, variables, prepare)
    process = forkserver.Process(target=in_fork, args=arguments)
    process.start()

    def finish():
        process.join(seconds)
        hung = process.is_alive()
        if hung:
            for member in family(process.pid):
                member.send_signal(signal.SIGKILL)
            process.join()
        return SimpleNamespace(
            returncode="hung" if hung else process.exitcode,
            stdout=(Path(folder) / "stdout").read_text(),
            stderr=(Path(folder) / "stderr").read_text(),
        )

    return finish
