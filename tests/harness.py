"""How the tests run a stage: by its own command, or forked from a server.

Most of a short run's time goes by before it begins: importing torch takes a process two
to four seconds, and the tests start a thousand processes. So most runs are *forked*. A
server process (multiprocessing's "forkserver") imports torch once; each fork of it is a
fresh process that has torch already, and it executes the stage's script from its first
line, with arguments, environment variables and output files of its own, as if it had
been started by a launcher. A fork proves what a script does. What a launcher does (its
command line, its signals, its exit code, a process that is still importing torch) is
proved by a real launch, and only that.

    little_work         flags with which an epoch takes a second or two
    run, started        a command: to its end, or as a context in which it runs
    fork, fork_ranks    a script, or all ranks of a stage, in forks of the server
    train, train_in_forks   a stage, from a copy and by its command, or in forks
    copied, changed, injected   a stage in another folder, as it is or with a fault
    wait_until, kill, assert_gone   waiting, ending, and what is left afterwards
"""

import collections
import contextlib
import functools
import importlib.util
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
import tempfile
import time
import types
from pathlib import Path

import psutil
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from common import data
from tests.by_fork import spawn_by_fork
from tools.stages import ROOT
from tools.stages import command
from tools.stages import launcher
from tools.stages import stages
from tools.stages import takes_processes
from tools.stages import trains_on_text

LAUNCHED = [stage for stage in stages() if takes_processes(stage)]
LAUNCHERS = ["03_ddp_launch", "04_ddp_spawn"]  # the first stages of torchrun and spawn
# What torchrun sets for the only process of a run; MASTER_PORT is to be added.
LAUNCHER_ENV = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
ENDLESS = ["--epochs", "100000"]

forkserver = multiprocessing.get_context("forkserver")
preloaded = ["torch", "torchvision", "torch.distributed.checkpoint"]
preloaded += ["torch.distributed.checkpoint.state_dict"]
preloaded += ["tests.harness", "tests.forkserver_preload"]
forkserver.set_forkserver_preload(preloaded)


def environment(**variables):
    """Return the environment of a run: no launcher's variables, a thread a process."""
    launchers = re.compile("RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|SLURM_(?!CONF)")
    ours = {k: v for k, v in os.environ.items() if not launchers.match(k)}
    return {**ours, "OMP_NUM_THREADS": "1", **variables}


def counts(device):
    """Return the numbers of processes to try: 1 to 4, if there are as many GPUs."""
    most = torch.cuda.device_count() if device == "cuda" else 4
    return range(1, min(4, most) + 1)


def missing_for_slurm():
    """Return what the local cluster lacks on this machine; "" if it can run."""
    if os.geteuid() != 0:
        return "the local cluster needs root"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))):
        return "no Slurm here: apt-get install slurmctld slurmd slurm-client munge"
    name = os.uname().nodename
    if socket.gethostbyname(name) != "127.0.0.1":
        return f"Slurm would leave loopback: echo 127.0.0.1 {name} >>/etc/hosts"
    return ""


# ---- a stage's flags -----------------------------------------------------------------
# flags: of the data; train, val: targets in an epoch and in the validation set; logits:
# the shape of the whole validation set's.
Work = collections.namedtuple("Work", "flags train val logits")
WINDOW = 8


@functools.cache
def texts():
    """Return the folder of the texts that `little_work` writes."""
    return tempfile.TemporaryDirectory()


def little_work(stage, samples=1500):
    """Return the Work of a stage with so many training samples of a few values each.

    With 1,500, an epoch has 25 steps. Images are then the digits, and random ones with
    another number; a text is the beginning of common/text.txt.
    """
    if trains_on_text(stage):
        training = WINDOW * (samples + 1)  # so many fit, wherever the first one begins
        size = -(-10 * training // 9)  # of which nine tenths are for training
        windows = (size - training - 1) // WINDOW
        path = Path(texts().name, f"{samples}.txt")
        path.write_bytes((ROOT / "common/text.txt").read_bytes()[:size])
        flags = ("--text-file", str(path), "--context-length", str(WINDOW))
        shape = (windows, 256, WINDOW)
        return Work(flags, WINDOW * samples, WINDOW * windows, shape)
    if samples == 1500:
        return Work((), samples, 297, (297, 10))
    flags = ("--data", "fake", "--image-size", "8", "--images", str(samples))
    images = max(1, samples // 5)
    return Work(flags, samples, images, (images, 10))


# ---- stages as modules and as copies -------------------------------------------------
def load_stage(stage):
    """Return a stage's script as a module, without running it."""
    script = ROOT / stage / "train.py"
    spec = importlib.util.spec_from_file_location(f"stage_{stage}", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_stage_for_vectors(stage):
    """Return a stage's script as a module that takes float vectors for samples."""
    module = load_stage(stage)
    module.data = types.SimpleNamespace(**vars(data))
    module.data.normalize = lambda args, vectors: vectors.to(args.dtype)
    return module


def give_sets(module, train_set, val_set):
    """Have a stage's script, loaded as a module, get these sets instead of its data."""
    module.data = types.SimpleNamespace(**vars(module.data))
    module.data.load_data = module.data.load_text = lambda _: (train_set, val_set)


def make_checkpointer(module, args, loader, *parts):
    """Return the Checkpointer of a stage's script, for a run that saves nothing."""
    if hasattr(module, "ShardedCheckpointer"):
        return module.ShardedCheckpointer(args, loader, *parts, group=None)
    return module.Checkpointer(args, loader, *parts)


def shards_the_weights(stage):
    """Return whether a stage shards its model with FSDP2; the others copy it."""
    return "fully_shard(" in (ROOT / stage / "train.py").read_text()


def sharded(model):
    """Shard a small model with FSDP2 over the processes of the default group."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh)


def plain(tensor):
    """Return a tensor, whole if FSDP2 has sharded it: then all ranks must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class FakeLoader(list):
    """A list of batches, with what a training loop asks of a DataLoader."""

    class Dataset(list):
        """Has a length, and `epoch` can be set."""

    def __init__(self, batches):
        super().__init__(batches)
        self.dataset = self.Dataset(label for _, labels in batches for label in labels)
        self.sampler = types.SimpleNamespace(set_epoch=lambda _: None)


def copied(stage, folder):
    """Copy a stage's script and common/ into a new folder, as a reader does."""
    (folder / stage).mkdir(parents=True)
    shutil.copy(ROOT / stage / "train.py", folder / stage)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "common", folder / "common", ignore=ignored)
    return folder


def replace_once(path, *replacements, target=None):
    """Replace texts of a file, each of which is there once; write it, or `target`."""
    text = path.read_text()
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (target or path).write_text(text)


def changed(stage, folder, *replacements):
    """Copy a stage and replace texts of its script, each of which is there once."""
    replace_once(copied(stage, folder) / stage / "train.py", *replacements)
    return folder


def injected(stage, folder, code):
    """Copy a stage and add code to its end, which every process of a run executes."""
    end = '\n\nif __name__ == "__main__":\n'
    return changed(stage, folder, (end, f"\n\n{code}\n{end}"))


# ---- commands ------------------------------------------------------------------------
@contextlib.contextmanager
def started(arguments, folder, cwd=ROOT, **variables):
    """Start a command that prints into `folder`/stdout and stderr; kill what is left.

    Yields the subprocess.Popen, with three more attributes: `screen()` returns what it
    has printed so far, `wait_for(text, times=1, seconds=300)` waits until it has
    printed a text so many times, `members` are its processes at that moment.
    """
    folder = Path(folder)
    outputs = [folder / "stdout", folder / "stderr"]
    with outputs[0].open("w") as out, outputs[1].open("w") as err:
        child = subprocess.Popen(
            arguments,
            cwd=cwd,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            # Whoever starts the tests in the background has them ignore Ctrl-C.
            preexec_fn=functools.partial(
                signal.signal, signal.SIGINT, signal.default_int_handler
            ),
        )
    child.screen = lambda: "".join(path.read_text() for path in outputs)
    child.members = []

    def wait_for(text, times=1, seconds=300):
        def seen():
            ended = child.poll() is not None  # before the last look at the screen
            if child.screen().count(text) >= times:
                return True
            assert not ended, child.screen()
            return False

        wait_until(seen, seconds, child.screen)
        child.members = family(child.pid)

    child.wait_for = wait_for
    try:
        yield child
    finally:
        kill({*child.members, *family(child.pid)})
        child.wait()


def run(arguments, folder, seconds=300, **variables):
    """Run a command; return its `returncode`, `stdout`, `stderr` and `seconds`."""
    begin = time.monotonic()
    with started(arguments, folder, **variables) as child:
        child.wait(timeout=seconds)
    done = result(child.returncode, folder)
    done.seconds = time.monotonic() - begin
    return done


def result(returncode, folder):
    """Return what a run that printed into `folder` ended with."""
    stdout, stderr = (
        (Path(folder) / name).read_text() for name in ("stdout", "stderr")
    )
    return types.SimpleNamespace(returncode=returncode, stdout=stdout, stderr=stderr)


def train(stage, processes, flags, folder):
    """Copy a stage elsewhere and run it from a third folder by its command.

    That folder contains another package called `common`, which must not be imported
    instead of the copy's. Returns `run`'s result, with what `with_results` adds.
    """
    folder = Path(folder)
    project = copied(stage, folder / "project")
    (folder / "common").mkdir()
    (folder / "common/__init__.py").write_text("raise ImportError('the wrong common')")
    arguments = [*command(stage, processes, project), *flags, "--out-dir", "out"]
    return with_results(run(arguments, folder, cwd=folder), folder / "out")


def with_results(done, out):
    """Add to a run's result its `rows`, `weights` and `epochs` (lines it printed)."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (out / "metrics.jsonl").read_text().splitlines()
    done.rows = [json.loads(line) for line in lines]
    done.weights = out / "last.pt"
    done.epochs = re.findall("^epoch .*", done.stdout, re.MULTILINE)
    return done


def assert_one_error_line(done, named):
    """Assert that a run ended with code 2 and one line that contains `named`."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("train.py: error: ")
    assert named in line


# ---- forks ---------------------------------------------------------------------------
def in_fork(script, arguments, folder, variables, prepare):
    """Be the process that `fork` starts: execute a script as a launched one does."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(Path(folder) / name, flags), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in `started`
    os.environ.clear()
    os.environ.update(environment(**variables))
    multiprocessing.set_start_method(None, force=True)  # not the fork server's
    tempfile.tempdir = None  # what TMPDIR was when the server started
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when the server imported torch
    if prepare:
        prepare()
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(str(script), run_name="__main__")


def fork(script, arguments, folder, prepare=None, seconds=300, **variables):
    """Start a script in a fork of the server; it prints into `folder`/stdout, stderr.

    Returns a function that waits for its end, at most `seconds`, and returns its
    `returncode` ("hung" if it had to be killed), `stdout` and `stderr`; the function's
    attribute `process` is the fork. prepare: a picklable function that the fork calls
    first, from tests/fault_injection.py for instance.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    arguments = (script, arguments, folder, variables, prepare)
    process = forkserver.Process(target=in_fork, args=arguments)
    process.start()

    def finish():
        process.join(seconds)
        hung = process.is_alive()
        if hung:
            kill(family(process.pid))
            process.join()
        return result("hung" if hung else process.exitcode, folder)

    finish.process = process
    return finish


def call_in_forks(function, calls, seconds=60):
    """Call a function in forks of the server, side by side; they must end with 0.

    calls: the arguments of each fork's call. A fork that hangs is killed.
    """
    forks = [forkserver.Process(target=function, args=call) for call in calls]
    for one in forks:
        one.start()
    for one in forks:
        one.join(seconds)
        if one.is_alive():
            one.kill()
            one.join()
    assert [one.exitcode for one in forks] == [0] * len(forks)


def fork_ranks(stage, processes, flags, folder, root=ROOT, **options):
    """Start all ranks of a stage in forks; return the functions that `fork` returns.

    The ranks get a launcher's variables, and print into folder/RANK. A stage that
    spawns its processes itself, or has one only, is a single fork.
    """
    script = root / stage / "train.py"
    if not takes_processes(stage):
        return [fork(script, flags, folder, **options)]
    if launcher(stage) == "python":
        prepare = options.pop("prepare", None)
        options["prepare"] = functools.partial(call_all, spawn_by_fork, prepare)
        return [fork(script, ["--nproc", processes, *flags], folder, **options)]
    shared = {**LAUNCHER_ENV, "WORLD_SIZE": str(processes), "MASTER_PORT": free_port()}
    ends = []
    for rank in map(str, range(processes)):
        variables = {**shared, "RANK": rank, "LOCAL_RANK": rank, **options}
        ends.append(fork(script, flags, Path(folder) / rank, **variables))
    return ends


def call_all(*functions):
    for function in filter(None, functions):
        function()


def train_in_forks(stage, processes, flags, folder):
    """Do as `train` does, in forks instead of by the stage's command."""
    out = Path(folder) / "out"
    ends = fork_ranks(stage, processes, [*flags, "--out-dir", out], folder)
    done = [end() for end in ends]
    assert [one.returncode for one in done] == [0] * len(ends), done
    assert not any(one.stdout for one in done[1:])
    return with_results(done[0], out)


# ---- waiting, ending, and what is left -----------------------------------------------
def wait_until(predicate, seconds, message="", every=0.01):
    """Wait until `predicate()` is true and return it; fail after so many seconds.

    message: what a failure says, or a function that returns it.
    """
    end = time.monotonic() + seconds
    while not (value := predicate()):
        if time.monotonic() > end:
            text = message() if callable(message) else message
            raise AssertionError(f"waited for {seconds} s in vain: {text}")
        time.sleep(every)
    return value


def family(pid):
    """Return the live processes that descend from process `pid`, and itself first."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ranks(child):
    """Return the processes of a started stage's ranks, in the order of their start."""
    found = []
    for process in family(child.pid)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as gone, too
            if re.search("train.py|spawn_main", " ".join(process.cmdline())):
                found.append(process)
    return found


def kill(processes):
    """Kill processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def alive(processes):
    """Return those of the processes that still run; a zombie does not."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def free_port():
    """Return a TCP port of this machine on which nobody listens, as text."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def ports(processes):
    """Return the TCP ports on which the processes listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.port)
    return found


def port_answers(port):
    """Return whether a process on this machine accepts connections on a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def assert_gone(processes, listening, seconds):
    """Assert that within so many seconds all processes end and no port answers.

    A process whose first thread has ended counts as a zombie, but its other threads may
    hold a port for a moment longer.
    """
    wait_until(
        lambda: not alive(processes) and not any(map(port_answers, listening)),
        seconds,
        lambda: [process.cmdline() for process in alive(processes)],
    )
