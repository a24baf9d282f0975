"""How the tests run a stage: by its own command, or in a fork of a process that has torch."""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tools.stages import ROOT
from tools.stages import command
from tools.stages import launcher
from tools.stages import takes_processes

import psutil
import torch
from torch import multiprocessing as mp

ANSWER = 120  # seconds within which bad input is answered
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["torch", "torchvision", "tests.forkserver_preload"])


def environment(**variables):
    """Return the environment of a run: no launcher's variables, one thread per process."""
    launchers = re.compile("RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|SLURM_(?!CONF)")
    ours = {k: v for k, v in os.environ.items() if not launchers.match(k)}
    return {**ours, "OMP_NUM_THREADS": "1", **variables}


def free_port():
    """Return a TCP port of this machine that nobody listens at, as text."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def missing_for_slurm():
    """Return what the local cluster lacks on this machine; nothing if it can run."""
    if os.geteuid() != 0:
        return "the local cluster needs root"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))):
        return "no Slurm here; type: apt-get install slurmctld slurmd slurm-client munge"
    name = os.uname().nodename
    if socket.gethostbyname(name) != "127.0.0.1":
        return f"Slurm would not stay on loopback; type: echo 127.0.0.1 {name} >>/etc/hosts"
    return ""


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

    def wait_for(text, seconds=300):
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


def run(arguments, folder, seconds=300, **variables):
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


def copied(stage, folder):
    """Copy a stage's script and common/ into a new folder, as a reader does; return that folder."""
    (folder / stage).mkdir(parents=True)
    shutil.copy(ROOT / stage / "train.py", folder / stage)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "common", folder / "common", ignore=ignored)
    return folder


def changed(stage, folder, *replacements):
    """Copy a stage likewise, with texts of its script replaced, each of which stands there once."""
    root = copied(stage, folder)
    text = (root / stage / "train.py").read_text()
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (root / stage / "train.py").write_text(text)
    return root


def train(stage, processes, flags, folder):
    """Copy a stage elsewhere, and run it from a third place by the command it shows, with --out-dir.

    In that place is another package of the name `common`, which must not be taken for the copy's.
    Returns `run`'s answer, with the rows and the weights.
    """
    folder = Path(folder)
    project = copied(stage, folder / "project")
    (folder / "common").mkdir()
    (folder / "common/__init__.py").write_text("raise ImportError('the wrong common')")
    out = folder / "out"
    done = run([*command(stage, processes, project), *flags, "--out-dir", "out"], folder, cwd=folder)
    return with_results(done, out)


def with_results(done, out):
    """Add to the answer of a run what it wrote into its folder `out`: rows and weights."""
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
    multiprocessing.set_start_method(None, force=True)  # that of the fork server is inherited
    torch.set_num_threads(1)  # the fork server read its environment before OMP_NUM_THREADS was set
    if prepare:
        prepare()
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(str(script), run_name="__main__")


def as_child(function, rank, *arguments):
    """Be one of the processes of `spawn_by_fork`, whose parent has imported `attached`."""
    sys.modules["common.attached"].PARENT = os.getppid()
    function(rank, *arguments)


def spawn_by_fork():
    """Have mp.spawn fork its processes, which saves their imports; to be given as `prepare`."""

    def spawn(function, arguments, nprocs, join):
        child = functools.partial(as_child, function)
        return mp.start_processes(child, arguments, nprocs, join, start_method="fork")

    mp.spawn = spawn


def fork(script, arguments, folder, prepare=None, seconds=300, **variables):
    """Start a script in a fork of a process that has torch imported, which saves those seconds.

    Returns a function that waits for its end and returns `returncode`, `stdout` and `stderr`; its
    attribute `process` is the fork. prepare: a picklable function that the fork calls first.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
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

    finish.process = process
    return finish


def fork_ranks(stage, processes, flags, folder, root=ROOT, **options):
    """Start a stage on so many processes, forked: with a launcher's variables, or by its own spawn.

    Returns the functions that wait for their ends, rank 0 first; of a spawning stage its parent's.
    """
    if not takes_processes(stage):
        return [fork(root / stage / "train.py", flags, folder, **options)]
    if launcher(stage) == "python":
        flags = ["--nproc", str(processes), *flags]
        return [fork(root / stage / "train.py", flags, folder, spawn_by_fork, **options)]
    variables = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = free_port()
    ends = []
    for rank in map(str, range(processes)):
        place = {**variables, "RANK": rank, "LOCAL_RANK": rank, **options}
        ends.append(fork(root / stage / "train.py", flags, Path(folder) / rank, **place))
    return ends


def train_in_forks(stage, processes, flags, folder):
    """Do as `train` does, in forks instead of by the stage's command, which saves the imports."""
    out = Path(folder) / "out"
    flags = [*flags, "--out-dir", str(out)]
    ends = fork_ranks(stage, processes, flags, folder)
    done = [end() for end in ends]
    assert [one.returncode for one in done] == [0] * len(ends), done
    assert not any(one.stdout for one in done[1:])
    return with_results(done[0], out)
