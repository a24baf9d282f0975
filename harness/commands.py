"""Starts commands, for tests, notebooks, tools and benchmarks, and waits for them.

    done = run("torchrun --standalone --nproc-per-node=2 03_ddp_launch/train.py")
    with start(["python", script, *flags], folder) as job:
        job.wait_for("epoch 1")

A command is run as it is typed: `torchrun` and `python` are those of this Python.

With `forks=True` the same command is run without its launcher. Most of a short run's
time goes by before it begins, because importing torch takes a process two to four
seconds. So a server process (multiprocessing's "forkserver") imports torch once. Each
fork of it is a fresh process that has torch already. It executes the script from its
first line, with the arguments, the environment variables and the output files that the
launcher would have given it. A fork proves what a script does. What a launcher does
(its command line, its signals, its exit code, a process that is still importing torch)
is proved by a real launch.

    start, run          a command: as a context in which it runs, or to its end
    call_in_forks       a function, in several processes
    wait_until, kill, alive, assert_gone   waiting, ending, and what is left afterwards
"""

import contextlib
import dataclasses
import errno
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from harness.sections import ROOT

PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
OUTPUTS = ("stdout", "stderr")
# Seconds, of what is waited for. A command has this limit only while it does nothing.
LIMIT = 300
# Of a core: a launcher, and a rank that waits for another, use less.
NOTHING = 0.02
LAUNCHERS = r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD|NAME)|MASTER_"
LAUNCHERS = re.compile(rf"{LAUNCHERS}|TORCHELASTIC_|SLURM_(?!CONF)")

# The server of the forks; `preloaded` are the modules that it imports when it starts.
forkserver = multiprocessing.get_context("forkserver")
preloaded = ["torch", "torchvision", "torch._dynamo", "torch.distributed.checkpoint"]
preloaded += ["torch.distributed.checkpoint.state_dict", "harness.commands"]
# What a notebook's forks need in addition, which the test that runs it says.
preloaded += os.environ.get("FORKS_PRELOAD", "").split()


class CommandError(AssertionError):
    """A command ended with another exit code than it should; says what it printed."""


@dataclasses.dataclass
class Done:
    """What a command ended with.

    ranks: the same for each process, rank 0 first, if it was run in forks. Then
    returncode is the first that is not 0, and the outputs are those of all ranks.
    returncode: "hung" if it had to be killed.
    """

    returncode: int | str
    stdout: str
    stderr: str
    ranks: list = dataclasses.field(default_factory=list)


def environment(**variables):
    """Return the environment of a run: no launcher's variables, a thread a process.

    variables: to add, or to leave out if the value is None.
    """
    ours = {k: v for k, v in os.environ.items() if not LAUNCHERS.match(k)}
    ours["PATH"] = f"{Path(sys.executable).parent}:{ours.get('PATH', '')}"  # torchrun
    wanted = {**ours, "OMP_NUM_THREADS": "1", **variables}
    return {name: str(value) for name, value in wanted.items() if value is not None}


# ---- start and run -------------------------------------------------------------------
class Activity:
    """Tells for how long some processes have done nothing: on a busy machine, too.

    processes: a function that returns the live ones, as psutil.Process; paths: the
    files to which they print.
    """

    def __init__(self, processes, paths=()):
        self.processes, self.paths = processes, paths
        self.seen = self.look()
        self.last = self.seen[0]

    def look(self):
        """Return the time, the sizes of the outputs, and {process: its CPU time}."""
        used = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                used[process] = sum(process.cpu_times()[:2])
        sizes = [path.stat().st_size for path in self.paths]
        return time.monotonic(), sizes, used

    def idle(self):
        """Return for how many seconds they have printed nothing and computed nothing.

        It looks at them once a second at most.
        """
        now = time.monotonic()
        before, printed, used = self.seen
        if now - before >= 1:
            self.seen = now, sizes, uses = self.look()
            most = NOTHING * (now - before)
            computed = any(time - used.get(p, 0) > most for p, time in uses.items())
            if computed or sizes != printed:
                self.last = now
        return now - self.last


class Job:
    """A command that runs. Its processes' outputs are files: `stdout` and `stderr`.

    folder: where these files are; pid: of the process that was started; processes: the
    psutil.Process of each live one, as of the last call of `look`; idle: a function,
    for how many seconds has it done nothing?
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes = []

    def begin(self, paths):
        """Begin to look at what it does; paths: its outputs."""
        self.idle = Activity(self.members, paths).idle

    def screen(self):
        """Return what it has printed so far, to both outputs."""
        done = self.printed()
        return done.stdout + done.stderr

    def wait_for(self, text, times=1):
        """Wait until it has printed a text so many times; look at its processes then.

        Raises CommandError if it ends before, or does nothing for too long.
        """
        waiting = True
        while waiting:
            ended = not self.running()  # before the last look at the screen
            waiting = self.screen().count(text) < times
            if waiting and (ended or self.idle() > LIMIT):
                what = "ended" if ended else f"did nothing for {LIMIT} s"
                what = f"{what} without printing {text!r}"
                raise CommandError(f"{what}:\n{self.screen()}")
            time.sleep(0.01)
        self.look()

    def look(self):
        """Remember its processes, to kill them later, and return them."""
        self.processes = self.members()
        return self.processes

    def kill(self):
        """Kill all processes that it has, and had when one looked."""
        kill({*self.processes, *self.members()})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.reap()


class LaunchedJob(Job):
    """A command that the operating system runs."""

    def __init__(self, words, folder, cwd, variables):
        super().__init__(folder)
        self.paths = [self.folder / name for name in OUTPUTS]
        with self.paths[0].open("w") as out, self.paths[1].open("w") as err:
            self.child = subprocess.Popen(
                [*PROGRAMS.get(words[0], words[:1]), *words[1:]],
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=default_ctrl_c,
            )
        self.pid = self.child.pid
        self.begin(self.paths)

    def printed(self):
        return Done(self.child.poll(), *(path.read_text() for path in self.paths))

    def running(self):
        return self.child.poll() is None

    def members(self):
        # once it has ended, its number may be that of a stranger
        return family(self.pid) if self.running() else []

    def ranks(self):
        """Return the processes of a stage's ranks, in the order of their start."""
        found = []
        for process in self.members()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is gone, too
                words = " ".join(process.cmdline())
                if re.search(r"\.py\b|spawn_main", words) and "/torchrun " not in words:
                    found.append(process)
        return found

    def wait(self, seconds=LIMIT):
        """Wait for its end, or until it has done nothing for so many seconds.

        Returns what it ended with; if it had to be killed, it hung.
        """
        while self.running() and self.idle() <= seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(1)
        hung = self.running()
        if hung:
            self.kill()
            self.reap()
        done = self.printed()
        return dataclasses.replace(done, returncode="hung" if hung else done.returncode)

    def reap(self):
        self.child.wait()


class ForkedJob(Job):
    """The ranks of a command, each a fork of the server.

    forks: their multiprocessing.Process, rank 0 first. Each prints into a folder that
    is named by its rank. With `together` it is as under torchrun: all print into the
    same files, and the first that fails ends the others.
    """

    def __init__(self, arguments, environments, folder, cwd, prepare, together):
        super().__init__(folder)
        self.together, self.ended_others = together, False
        numbers = range(len(environments))
        self.folders = [folder if together else Path(folder, str(n)) for n in numbers]
        for place in self.folders:
            place.mkdir(exist_ok=True)
            for name in OUTPUTS:
                (place / name).write_text("")
        set_preloads()
        self.forks = []
        try:
            for variables, place in zip(environments, self.folders, strict=True):
                given = (arguments, place, str(cwd), variables, prepare)
                self.forks.append(forkserver.Process(target=in_fork, args=given))
                self.forks[-1].start()
        except BaseException:  # a signal, say: the job's context has not begun
            kill([one for fork in self.forks if fork.pid for one in family(fork.pid)])
            raise
        self.pid = self.forks[0].pid
        self.begin([place / name for place in self.folders for name in OUTPUTS])

    def printed(self):
        pairs = zip(self.folders, self.forks, strict=True)
        ranks = [result_in(place, fork.exitcode) for place, fork in pairs]
        return joined(ranks, self.together)

    def running(self):
        failed = self.together and any(fork.exitcode for fork in self.forks)
        if failed and not self.ended_others:  # as by torchrun: SIGTERM, once
            self.ended_others = True
            for fork in self.forks:
                fork.terminate()
        return any(fork.is_alive() for fork in self.forks)

    def members(self):
        live = [fork for fork in self.forks if fork.is_alive()]
        return [member for fork in live for member in family(fork.pid)]

    def ranks(self):
        """Return the processes of its ranks, rank 0 first. Raises NoSuchProcess."""
        return [psutil.Process(fork.pid) for fork in self.forks]

    def wait(self, seconds=LIMIT):
        """Wait for the end of all ranks, or until they do nothing for so many seconds.

        Returns what they ended with; a rank that had to be killed hung.
        """
        while live := [fork for fork in self.forks if fork.is_alive()]:
            if self.idle() > seconds:
                break
            self.running()  # with `together`, ends the others of one that has failed
            multiprocessing.connection.wait([fork.sentinel for fork in live], 1)
        hung = {rank for rank, fork in enumerate(self.forks) if fork.is_alive()}
        for rank in hung:
            kill(family(self.forks[rank].pid))
            self.forks[rank].join()
        ranks = self.printed().ranks
        for rank in hung:
            ranks[rank].returncode = "hung"
        return joined(ranks, self.together)

    def reap(self):
        for fork in self.forks:
            fork.join()


def result_in(folder, returncode):
    """Return the Done of a process that prints into `folder`."""
    texts = ((folder / name).read_text() for name in OUTPUTS)
    return Done(returncode, *texts)


def joined(ranks, together):
    """Return the Done of a job from those of its ranks."""
    codes = [rank.returncode for rank in ranks if rank.returncode]
    code = codes[0] if codes else 0
    if together and codes and len(ranks) > 1:
        # torchrun's own, whatever its ranks ended with
        code = "hung" if "hung" in codes else 1
    shown = ranks[:1] if together else ranks
    outputs = ("".join(getattr(rank, name) for rank in shown) for name in OUTPUTS)
    return Done(code, *outputs, ranks)


def start(
    command,
    folder,
    forks=False,
    cwd=ROOT,
    prepare=None,
    together=False,
    **variables,
):
    """Start a command; return a Job, whose context kills what is left at its end.

    command: a line as one types it, or its words; folder: where it prints, a file per
    output; prepare: a picklable function that each fork calls first, one of
    tests/fault_injection.py for instance; together: all forks print into one pair of
    files, and one that fails ends the others, as torchrun has it; variables: of its
    environment, which otherwise has no launcher's variables and one thread per process.

    A command is launched in any case if its launcher does something that forks do not:
    if it has options other than the number of processes. If RANKS_PER_GPU is set, so
    that ranks share a GPU, recipes/nccl_on_one_gpu.sh takes the place of torchrun.
    """
    words = shlex.split(command) if isinstance(command, str) else [*map(str, command)]
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables.setdefault(name, value)
    ranks = plan_forks(words) if forks else None
    if ranks is None and "RANKS_PER_GPU" in os.environ:
        words = on_shared_gpu(words)
        variables.setdefault("PORT", free_port())
    if ranks:
        arguments, ranks = ranks
        environments = [environment(**{**rank, **variables}) for rank in ranks]
        return ForkedJob(arguments, environments, Path(folder), cwd, prepare, together)
    if prepare:
        raise ValueError(f"only forks can be prepared: {' '.join(words)}")
    return LaunchedJob(words, folder, cwd, environment(**variables))


def run(command, folder=None, code=0, seconds=LIMIT, **options):
    """Run a command to its end; return a Done.

    code: the exit code that it should have, None for any; seconds: it is killed if it
    does nothing for so many; the other parameters are those of `start`. Raises
    CommandError with what it printed if it ends with another code.
    """
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        with start(command, folder, **options) as job:
            done = job.wait(seconds)
    if code is not None and done.returncode != code:
        shown = command if isinstance(command, str) else shlex.join(map(str, command))
        ended = f"exit code {done.returncode}, not {code}: {shown}"
        raise CommandError(f"{ended}\n{done.stdout}\n{done.stderr}")
    return done


# ---- forks ---------------------------------------------------------------------------
def plan_forks(words):
    """Return the arguments of python and each rank's variables for a command.

    None for a command that has to be launched.
    """
    program, *rest = words
    if program == "python" and rest[0].endswith(".py"):
        return rest, [{}]
    if program != "torchrun" or rest[0] != "--standalone":
        return None
    count = re.fullmatch(r"--nproc-per-node=(\d+)", rest[1])
    if count is None or rest[2].startswith("-") and rest[2] != "-m":
        return None
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": count[1], "LOCAL_WORLD_SIZE": count[1]}
    ranks = [
        {**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(int(count[1]))
    ]
    if "RANKS_PER_GPU" in os.environ:  # what the script gives to each rank
        alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NCCL_SOCKET_IFNAME": "lo"}
        ranks = [each | alone | {"NCCL_HOSTID": each["RANK"]} for each in ranks]
    return rest[2:], ranks


def on_shared_gpu(words):
    """Return the words of torchrun's command with ranks that share a GPU."""
    count = re.fullmatch(r"--nproc-per-node=(\d+)", words[2]) if words[2:] else None
    if words[:2] != ["torchrun", "--standalone"] or count is None:
        return words
    return ["bash", str(ROOT / "recipes/nccl_on_one_gpu.sh"), count[1], *words[3:]]


def set_preloads():
    """Tell the server what to import when it starts, which is at the first fork."""
    forkserver.set_forkserver_preload([*preloaded, "harness.fork_preload"])


def in_fork(arguments, folder, cwd, variables, prepare):
    """Be a rank: execute a script as a launched process does."""
    import torch

    for descriptor, name in enumerate(OUTPUTS, 1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    default_ctrl_c()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method(None, force=True)  # not the server's
    tempfile.tempdir = None  # what TMPDIR was when the server started
    # These two variables were read when the server imported torch.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.set_debug_level_from_env()
    torch.default_generator.seed()  # otherwise it is the server's, the same in each
    if prepare:
        prepare()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, cwd)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            # absolute, because processes that it spawns import it, too
            script = Path(arguments[0]).resolve()
            sys.path[0] = str(script.parent)
            runpy.run_path(str(script), run_name="__main__")
    except Exception as error:  # printed as by python: torch's hook adds the rank
        frames = error.__traceback__
        while frames.tb_next and frames.tb_frame.f_globals["__name__"] != "__main__":
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def default_ctrl_c():
    """Have Ctrl-C interrupt: whoever starts us in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def call_in_forks(function, calls):
    """Call a function in forks of the server, side by side; they must end with 0.

    calls: the arguments of each fork's call. A fork that hangs is killed.
    """
    set_preloads()
    forks = [forkserver.Process(target=function, args=call) for call in calls]
    activity = Activity(
        lambda: [p for one in forks if one.pid for p in family(one.pid)]
    )
    try:
        for one in forks:
            one.start()
        for one in forks:
            while one.is_alive() and activity.idle() <= LIMIT:
                one.join(1)
    finally:
        for one in forks:
            if one.pid and one.is_alive():
                one.kill()
                one.join()
    assert [one.exitcode for one in forks] == [0] * len(forks)


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


def free_ports(count):
    """Return the first of so many TCP ports in a row on which nobody listens.

    They are below those that the kernel gives to connections, one of which could
    otherwise take a port before the process does that it was chosen for. And they are
    none that a notebook names, nor torchrun's own, 29400 and 29500.
    """
    while True:
        first = random.randrange(25_000, 29_000, count)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    one = stack.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return first


def free_port():
    """Return one such port, as text."""
    return str(free_ports(1))


def in_mask(process, mask, name="SIGTERM"):
    """Return whether a signal is in one of a process's masks; see proc(5).

    mask: SigCgt, the signals for which it has a handler, or SigPnd and ShdPnd, those
    that wait for the thread and for the process. One that has ended has none.
    """
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    found = re.search(rf"^{mask}:\s*(\w+)$", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> (getattr(signal, name) - 1) & 1)


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
