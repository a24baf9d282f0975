"""Stage 09: a run that is killed and started again ends with the weights of one that was not."""

import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
import types
import zipfile
from pathlib import Path

from common import checkpoint
from common import data
from common import checkpointer
from nbtools.lesson import max_abs_diff
from tests.conftest import counts
from tests.fault_injection import killed_at
from tests.fault_injection import no_large_files
from tests.fault_injection import no_step
from tests.fault_injection import signalled
from tests.fault_injection import signalled_and_slow_to_write
from tests.harness import ROOT
from tests.harness import changed
from tests.harness import family
from tests.harness import fork_ranks
from tests.harness import started
from tests.harness import train_in_forks
from tests.test_amp import Batches
from tests.test_chain import load
from tools.stages import shown_commands
from tools.stages import stages

import psutil
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

FAULT_TOLERANT = stages()[8:]
FIRST = FAULT_TOLERANT[0]
SHORT = ("--epochs", "2")  # of 25 steps each
DOUBLE = ("--dtype", "float64", "--epochs", "2")
FAKE = ("--data", "fake", "--epochs", "2")


@pytest.fixture
def two(several):
    """The test is about one of two processes."""
    if several < 2:
        pytest.skip("a second process needs a second GPU")
    return several


class Run:
    """A run in forks that keeps checkpoints: it can be killed, and started again, time after time."""

    def __init__(self, folder, device, *flags, stage=FIRST, processes=2, root=ROOT):
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"
        self.out = self.folder / "out"
        self.flags = [*flags, "--device", device, "--checkpoint-dir", str(self.checkpoints)]
        self.start_of = functools.partial(fork_ranks, stage, root=root)
        self.processes = processes
        self.starts = 0

    def start(self, *flags, **options):
        """Start its ranks and return the functions that wait for their ends."""
        self.starts += 1
        self.step = self.newest()
        flags = [*self.flags, "--out-dir", str(self.out), *flags]
        screens = self.folder / f"start-{self.starts}"
        self.ends = self.start_of(self.processes, flags, screens, **options)
        return self.ends

    def go(self, *flags, **options):
        """Start it and wait; return what each rank printed, rank 0 first."""
        return [end() for end in self.start(*flags, **options)]

    def screen(self):
        """Return what rank 0 printed since the last start."""
        path = self.folder / f"start-{self.starts}/0/stdout"
        return path.read_text() if path.exists() else ""

    def newest(self):
        """Return the step of the newest checkpoint, 0 where there is none."""
        return max([0, *(step_of(path) for path in checkpointer.paths(self.checkpoints))])

    def files(self):
        """Return the names and the contents of what lies in the folder of checkpoints."""
        return {path.name: path.read_bytes() for path in self.checkpoints.iterdir()}


def step_of(path):
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def went_on(text):
    """Return the steps after which a run that printed this says that it goes on."""
    return [int(step) for step in re.findall(r"^goes on after step (\d+)\b", text, re.M)]


def codes(done):
    return [one.returncode for one in done]


def rows(folder):
    """Return the rows of metrics.jsonl in a folder, without the seconds."""
    found = checkpoint.read_metrics(folder)
    for row in found:
        assert row["train"].pop("seconds") >= 0 and row["val"].pop("seconds") >= 0
    return found


def assert_same(out, reference, what=""):
    """Compare what two runs wrote, bit for bit."""
    there = reference.weights.parent
    for name in ("last.pt", "best.pt"):
        assert max_abs_diff(out / name, there / name) == 0, what
    assert rows(out) == rows(there), what


def assert_no_step_is_lost_or_doubled(run, steps, what=""):
    """Look at the last checkpoint of a run that has ended."""
    state = checkpointer.read(checkpointer.paths(run.checkpoints)[0])
    assert state["step"] == state["scheduler"]["last_epoch"] == steps, what
    assert state["sums"][:, 3].sum() == rows(run.out)[-1]["train"]["images"], what


@pytest.fixture(scope="module")
def halfway(several, device, tmp_path_factory):
    """A run that was killed in step 15; its newest checkpoints are of the steps 12 and 14."""
    folder = tmp_path_factory.mktemp("halfway")
    run = Run(folder, device, *SHORT, "--checkpoint-every", "2", processes=several)
    run.go(prepare=functools.partial(signalled, 15, "SIGKILL"))
    assert [step_of(path) for path in checkpointer.paths(run.checkpoints)] == [14, 12]
    return run


@pytest.fixture
def copy_of_halfway(halfway, device, tmp_path):
    """A copy of that run, to be gone on with."""
    shutil.copytree(halfway.checkpoints, tmp_path / "checkpoints")
    flags = (*SHORT, "--checkpoint-every", "4")
    return Run(tmp_path, device, *flags, processes=halfway.processes)


def wait_until(true, run):
    """Wait until `true()`, or until a rank of a run in forks has ended; return whether it is."""
    end = time.monotonic() + 300
    while not true() and all(rank.process.is_alive() for rank in run.ends):
        assert time.monotonic() < end, run.screen()
        time.sleep(0.001)
    return true()


def kill_at_some_moment(run, draw):
    """Kill one rank of a run, or all of them; return words for the moment.

    It is a little after the run has begun, or after some checkpoint has appeared.
    """
    step, delay = draw.choice([0, *range(1, 13)]), draw.uniform(0, 0.1)
    victims = draw.choice([run.ends, run.ends, [draw.choice(run.ends)]])
    begun = wait_until(lambda: "processes on" in run.screen(), run)
    begun = begun and wait_until(lambda: run.newest() >= run.step + step or step == 0, run)
    time.sleep(delay)
    for rank in victims:
        rank.process.kill()
    return f"{len(victims)} killed {delay:.3f} s after step {run.step + step}"


@pytest.mark.parametrize("stage", FAULT_TOLERANT)
def test_kills_at_random_moments_change_no_bit(stage, trained, several, device, tmp_path):
    reference = trained(stage, several, *SHORT, how=train_in_forks)
    draw, kills = random.Random(9), []
    for number in itertools.count():
        if sum(map(len, kills)) >= 20:
            break
        kills.append([])
        flags = (*SHORT, "--checkpoint-every", "4")
        run = Run(tmp_path / str(number), device, *flags, stage=stage, processes=several)
        finished = False
        while not finished:
            run.start()
            moment = kill_at_some_moment(run, draw)
            done = [end() for end in run.ends]
            assert went_on(done[0].stdout) in ([], [run.step] if run.step else []), moment
            finished = done[0].returncode == 0
            if not finished:
                kills[-1].append(moment)
                assert -signal.SIGKILL in codes(done) and "hung" not in codes(done), kills
        assert_same(run.out, reference, kills)
        assert_no_step_is_lost_or_doubled(run, 50, kills)
        assert len(checkpointer.paths(run.checkpoints)) == 2


# Which call of which function it is in each start after the other, and what that leaves: in a run
# from the beginning, the first 14 calls of fsync are those of the seven checkpoints of an epoch.
WHILE_WRITING = [
    ("fsync", 1, "checkpoints"),  # the very first, so it begins from the start
    ("fsync", 5, "checkpoints"),
    ("replace", 3, "checkpoints"),
    ("unlink", 3, None),  # the new name is there, what is too old is not gone
    ("fsync", 2, None),  # the new name is there, but not yet on the disk
    ("fsync", 1, "checkpoints"),
]
WHILE_RECORDING = [
    ("fsync", 15, "out"),  # last.pt
    ("fsync", 5, "out"),  # metrics.jsonl, after the two others
]


def left_by_a_kill(run):
    """Return the temporary files in a run's folders, by the folder's name."""
    return {name: set((run.folder / name).glob(".*.tmp")) for name in ("checkpoints", "out")}


@pytest.mark.fault(
    stages="09",
    what="the process that writes is killed while it writes a checkpoint, weights or figures",
    sees="started again it says `goes on after step`; a file has its old contents or its "
    "new ones, and the temporary one goes with the next checkpoint",
    seconds=60,
    lost="the steps since the last checkpoint, taken once more",
)
@pytest.mark.parametrize("moments", [WHILE_WRITING, WHILE_RECORDING])
def test_kills_while_a_file_is_written(moments, trained, several, device, tmp_path, fault):
    run = Run(tmp_path, device, *SHORT, "--checkpoint-every", "4", processes=several)
    for name, call, leaves in moments:
        before = left_by_a_kill(run)
        done = run.go(prepare=functools.partial(killed_at, call, name))
        assert done[0].returncode == -signal.SIGKILL, (name, call)
        after = left_by_a_kill(run)
        if leaves:
            assert len(after[leaves] - before[leaves]) == 1, (name, call)
        if call > 2 and name != "unlink":  # a checkpoint has been written before the kill
            assert not after["checkpoints"] & before["checkpoints"]
    done = run.go(seconds=fault.seconds)
    assert codes(done) == [0] * several
    fault.assert_seen(done[0].stdout)
    assert not left_by_a_kill(run)["checkpoints"]
    assert_same(run.out, trained(FIRST, several, *SHORT, how=train_in_forks))
    assert_no_step_is_lost_or_doubled(run, 50)


def shown(stage, processes, folder, *flags):
    """Return the command that a stage shows first, as arguments, and the variables before it."""
    words = shlex.split(shown_commands(stage)[0], comments=True)
    variables = dict(word.split("=") for word in words[: words.index("torchrun")])
    words = words[words.index("torchrun") + 1 :]
    words[words.index("checkpoints")] = str(folder)
    words = [re.sub(r"(--nproc-per-node)=\d+", rf"\1={processes}", word) for word in words]
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    return [sys.executable, "-m", "torch.distributed.run", *words, *flags], variables


def wait_for_more(child, text, number):
    """Wait until a command has printed a text so many times."""
    end = time.monotonic() + 300
    while child.screen().count(text) < number:
        assert time.monotonic() < end and child.poll() is None, child.screen()
        time.sleep(0.01)


def ranks(child):
    """Return the processes that torchrun has started for the ranks, and that live."""
    found = []
    for process in family(child.pid)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() == child.pid and "train.py" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.fault(
    stages="09",
    what="one rank or all of them are killed, under `--max-restarts=3`",
    sees="what torchrun says of every stage, `failed (exitcode: -9)`, then `goes on after "
    "step`; exit code 0 in the end",
    seconds=120,
    lost="the steps since the last checkpoint, taken once more",
)
def test_torchrun_starts_killed_ranks_again(trained, two, device, tmp_path, fault):
    """Three times, as often as the shown command allows: one rank, all at once, one rank."""
    flags = ("--epochs", "8")
    arguments, variables = shown(FIRST, two, tmp_path / "checkpoints", *flags)
    arguments += ["--checkpoint-every", "10", "--device", device, "--out-dir", str(tmp_path / "out")]
    draw, moments = random.Random(3), []
    with started(arguments, tmp_path, **variables) as child:
        for number, victims in enumerate(([1], [0, 1], [0]), 1):
            wait_for_more(child, "processes on", number)
            step = (checkpointer.paths(tmp_path / "checkpoints") or [Path("step-0")])[0]
            end = time.monotonic() + fault.seconds
            while checkpointer.paths(tmp_path / "checkpoints")[:1] in ([], [step]):
                assert time.monotonic() < end, child.screen()
                time.sleep(0.001)
            moments.append((step.name, victims, draw.uniform(0, 0.05)))
            time.sleep(moments[-1][-1])
            living = ranks(child)
            assert len(living) == 2, moments
            for rank in victims:
                living[rank].kill()
        assert child.wait(fault.seconds) == 0, child.screen()
        assert len(went_on(child.screen())) == 3, moments
        fault.assert_seen(child.screen())
    reference = trained(FIRST, two, *flags, how=train_in_forks)
    assert_same(tmp_path / "out", reference, moments)


def assert_all_end(members):
    _, left = psutil.wait_procs(members, 60)
    assert not left


def test_torchrun_itself_is_stopped_and_killed(trained, two, device, tmp_path):
    """SIGTERM, as Slurm sends it, and SIGKILL; each time the same command is typed again."""
    flags = (*FAKE, "--image-size", "8", "--images", "6000")  # 100 steps an epoch
    arguments, variables = shown(FIRST, two, tmp_path / "checkpoints", *flags)
    arguments += ["--checkpoint-every", "100000", "--device", device, "--out-dir", str(tmp_path / "out")]
    draw = random.Random(4)
    with started(arguments, tmp_path, **variables) as child:
        child.wait_for("processes on")
        time.sleep(delay := draw.uniform(0, 0.05))
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) not in (0, None)
        assert_all_end(child.members)
    (path,) = checkpointer.paths(tmp_path / "checkpoints")
    step = step_of(path)
    assert 0 < step < 100, delay
    with started(arguments, tmp_path, **variables) as child:
        child.wait_for("epoch 1: ")
        assert went_on(child.screen()) == [step]
        time.sleep(delay := draw.uniform(0, 0.05))
        child.kill()
        assert_all_end(child.members)
    step = step_of(checkpointer.paths(tmp_path / "checkpoints")[0])
    with started(arguments, tmp_path, **variables) as child:
        assert child.wait(300) == 0, child.screen()
        assert went_on(child.screen()) == [step]
    reference = trained(FIRST, two, *flags, how=train_in_forks)
    assert_same(tmp_path / "out", reference, delay)


# Which ranks get which signals in which step, in one start after the other.
SIGNALS = [
    (7, ["SIGTERM"], ["0"]),
    (19, ["SIGUSR1"], ["1"]),
    (26, ["SIGTERM"], ["0", "1"]),
    (38, ["SIGUSR1", "SIGUSR1"], ["1"]),
    (39, ["SIGTERM", "SIGUSR1", "SIGTERM"], ["0", "1"]),
]


@pytest.mark.fault(
    stages="09",
    what="SIGTERM or SIGUSR1 to any rank, from Slurm, Kubernetes or by hand",
    sees="all ranks end after the same step, with a checkpoint; exit code 143 or 138 of "
    "those that got it; started again, `goes on after step`",
    seconds=60,
    lost="nothing",
)
@pytest.mark.parametrize("stage", FAULT_TOLERANT)
def test_a_signal_to_any_rank_stops_all_at_the_same_step(
    stage, trained, two, device, tmp_path, fault
):
    run = Run(tmp_path, device, *SHORT, "--checkpoint-every", "100000", stage=stage)
    for step, names, who in SIGNALS:
        assert step % 25
        spoil = functools.partial(signalled, step, *names, ranks=who)
        done = run.go(prepare=spoil, seconds=fault.seconds)
        number = 128 + getattr(signal, names[0])
        assert codes(done) == [number, number]
        assert run.newest() == step
        state = checkpointer.read(checkpointer.paths(run.checkpoints)[0])
        assert state["sums"][:, 3].tolist() == [30 * (step - 25 * (step // 25))] * 2
    done = run.go()
    assert codes(done) == [0, 0]
    fault.assert_seen(done[0].stdout)
    assert_same(run.out, trained(stage, two, *SHORT, how=train_in_forks))
    assert_no_step_is_lost_or_doubled(run, 50)


def test_a_signal_in_the_last_step_leaves_the_evaluation_to_the_next_start(
    trained, several, device, tmp_path
):
    run = Run(tmp_path, device, *SHORT, processes=several)
    done = run.go(prepare=functools.partial(signalled, 50, "SIGTERM"))
    assert codes(done) == [128 + signal.SIGTERM] * several
    assert [row["epoch"] for row in rows(run.out)] == [1]
    assert codes(run.go()) == [0] * several
    assert_same(run.out, trained(FIRST, several, *SHORT, how=train_in_forks))


def test_no_rank_ends_before_the_snapshot_is_written(two, device, tmp_path):
    """A launcher would take the first end for a failure, and kill the rank that still writes."""
    run = Run(tmp_path, device, *SHORT, "--checkpoint-every", "100000")
    rank_0, rank_1 = run.start(prepare=functools.partial(signalled_and_slow_to_write, 7, 1.5))
    assert rank_1().returncode == 128 + signal.SIGTERM
    assert run.newest() == 7
    assert rank_0().returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])  # the latter from Python 3.14 on
def test_a_rank_that_fails_ends_the_workers_of_its_loaders(start_method, device, tmp_path):
    run = Run(tmp_path, device, *SHORT, "--workers", "2", processes=1)
    (rank,) = run.start(prepare=functools.partial(no_step, start_method))
    wait_until(lambda: len(family(rank.process.pid)) >= 3, run)
    members = family(rank.process.pid)[1:]
    assert rank().returncode == 1
    assert_all_end(members)


def test_a_signal_to_the_workers_of_the_loaders_too_loses_nothing(trained, device, tmp_path):
    """Slurm sends it to every process of a job."""
    run = Run(tmp_path, device, *SHORT, "--workers", "2", processes=1)
    done = run.go(prepare=functools.partial(signalled, 13, "SIGTERM", "SIGTERM"))
    assert codes(done) == [128 + signal.SIGTERM], done
    assert run.newest() == 13
    assert codes(run.go()) == [0]
    assert_same(run.out, trained(FIRST, 1, *SHORT, how=train_in_forks))


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_on_any_number_of_processes_no_bit_changes(processes, trained, device, tmp_path):
    """Three and more add up a gradient in an order that hangs on where it lies in DDP's buffers."""
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    run = Run(tmp_path, device, *SHORT, processes=processes)
    run.go(prepare=functools.partial(signalled, 31, "SIGTERM"))
    assert run.newest() == 31
    assert codes(run.go()) == [0] * processes
    assert_same(run.out, trained(FIRST, processes, *SHORT, how=train_in_forks))


@pytest.fixture(scope="module")
def in_mid_epoch(several, device, tmp_path_factory):
    """A float64 run on two processes that was stopped in step 37."""
    run = Run(tmp_path_factory.mktemp("mid-epoch"), device, *DOUBLE, processes=several)
    run.go(prepare=functools.partial(signalled, 37, "SIGTERM"))
    assert run.newest() == 37
    return run


@pytest.mark.parametrize("processes", range(1, 5))
def test_it_goes_on_with_any_number_of_processes(
    processes, trained, several, in_mid_epoch, device, tmp_path
):
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    for name in ("checkpoints", "out"):
        shutil.copytree(in_mid_epoch.folder / name, tmp_path / name)
    run = Run(tmp_path, device, *DOUBLE, processes=processes)
    done = run.go()
    assert codes(done) == [0] * processes
    assert went_on(done[0].stdout) == [37]
    reference = trained(FIRST, several, *DOUBLE, how=train_in_forks)
    assert max_abs_diff(run.out / "last.pt", reference.weights) <= 1e-10
    ours, theirs = rows(run.out), rows(reference.weights.parent)
    assert [row["epoch"] for row in ours] == [1, 2]
    for part, images in (("train", 1500), ("val", 297)):
        for one, other in zip(ours, theirs, strict=True):
            assert one[part]["images"] == images
            assert one[part] == pytest.approx(other[part], abs=1e-10)
    assert_no_step_is_lost_or_doubled(run, 50)


def keeper(folder, size=10):
    """Return the Checkpoints of four layers, which stand for a run's model, optimizer and so on."""
    args = types.SimpleNamespace(**dict.fromkeys(checkpointer.DECISIVE), checkpoints=Path(folder))
    return checkpointer.Checkpointer(args, None, *(nn.Linear(size, size) for _ in checkpoints.PARTS))


def save_endlessly(kept, step):
    for number in itertools.count(step + 1):
        kept.save(number, torch.zeros(2, 4))


def test_whatever_the_moment_of_a_kill_there_is_a_snapshot(tmp_path):
    """Fifty kills; a checkpoint has three megabytes."""
    draw, kept, steps, torn = random.Random(5), keeper(tmp_path, 450), [0], 0
    for _ in range(50):
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=save_endlessly, args=(kept, steps[0]))
        child.start()
        time.sleep(delay := draw.uniform(0, 0.05))
        child.kill()
        child.join()
        found = [checkpointer.read(path)["step"] for path in checkpointer.paths(tmp_path)]
        assert found[:1] >= steps[:1] or steps == [0], delay
        assert found[:2] == list(range(max(found, default=0), 0, -1))[: len(found[:2])], delay
        steps = found or [0]
        torn += any(tmp_path.glob(".step-*.tmp"))
    assert steps[0] > 5 and torn > 5
    kept.save(steps[0] + 1, torch.zeros(2, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step:09}.pt" for step in (steps[0], steps[0] + 1)
    ]


def test_the_newest_two_are_kept(tmp_path):
    kept = keeper(tmp_path)
    for number, step in enumerate((1, 2, 3, 9, 10, 11, 100, 99999)):
        kept.save(step, torch.zeros(2, 4))
        found = [step_of(path) for path in checkpointer.paths(tmp_path)]
        assert found[0] == step
        assert len(found) == min(number + 1, 2)
    kept.save(50, torch.zeros(2, 4))  # as after the later ones could not be read
    assert [step_of(path) for path in checkpointer.paths(tmp_path)] == [50]
    assert checkpointer.read(checkpointer.paths(tmp_path)[0])["step"] == 50
    assert kept.last() == f"the last checkpoint is {tmp_path}/step-000000050.pt"


@pytest.mark.fault(
    stages="09",
    what="a checkpoint cannot be written, for the disk is full",
    sees="`step ...: no checkpoint written (...); the last checkpoint is ...`; the training goes on",
    seconds=60,
    lost="nothing, and what is there is whole (but with --out-dir on that disk the epoch's end fails)",
)
def test_a_snapshot_that_cannot_be_written_ends_no_run(trained, copy_of_halfway, several, fault):
    run = copy_of_halfway
    before = run.files()
    done = run.go(prepare=functools.partial(no_large_files, 400_000), seconds=fault.seconds)
    assert codes(done) == [0] * several
    fault.assert_seen(done[0].stderr)
    written = (run.out / "last.pt").stat().st_size
    assert written < 400_000 < len(before["step-000000014.pt"])
    lines = re.findall("^step (\\d+): no checkpoint written \\(.+\\); (.*)$", done[0].stderr, re.M)
    last = f"the last checkpoint is {run.checkpoints}/step-000000014.pt"
    assert lines == [(str(step), last) for step in (16, 20, 24, 25, 28, 32, 36, 40, 44, 48, 50)]
    assert not any("no checkpoint" in one.stderr for one in done[1:])
    assert run.files() == before
    assert_same(run.out, trained(FIRST, several, *SHORT, how=train_in_forks))


def truncated(path, good):
    path.write_bytes(good.read_bytes()[:300_000])


def with_a_byte_flipped(path, good):
    """The byte is one of the largest tensor's; torch.load does not mind."""
    with zipfile.ZipFile(good) as file:
        largest = max(file.infolist(), key=lambda info: info.file_size)
    content = bytearray(good.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)
    assert checkpoint.load(path).keys() == checkpoint.load(good).keys()


def of_weights(path, good):
    torch.save(nn.Linear(3, 2).state_dict(), path)


def of_weights_in_the_old_format(path, good):
    state = checkpoint.load(good)
    torch.save(state, path, _use_new_zipfile_serialization=False)


def of_text(path, good):
    path.write_text("not a checkpoint")


def empty(path, good):
    path.write_bytes(b"")


class Spy:
    """What unpickling it would do: make a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def that_runs_code(path, good):
    torch.save({**checkpoint.load(good), "step": Spy(path.parent.parent / "was-run")}, path)


UNREADABLE = [
    truncated,
    with_a_byte_flipped,
    of_weights,
    of_weights_in_the_old_format,
    of_text,
    empty,
    that_runs_code,
]


@pytest.mark.parametrize("damage", UNREADABLE)
def test_an_unreadable_snapshot_is_a_value_error(damage, halfway, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints/step-000000099.pt"
    damage(path, checkpointer.paths(halfway.checkpoints)[0])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        checkpointer.read(path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.fault(
    stages="09",
    what="a checkpoint is damaged, or another file has its name",
    sees="`step-...pt is damaged or no checkpoint, and passed over`; it goes on from the one before",
    seconds=60,
    lost="the steps between the two, taken once more",
)
def test_unreadable_snapshots_are_passed_over(trained, copy_of_halfway, several, fault):
    """All kinds at once: the newest of the run itself is truncated, the others are newer still."""
    run = copy_of_halfway
    newest, good = checkpointer.paths(run.checkpoints)
    files = [newest, *(run.checkpoints / f"step-{step:09}.pt" for step in range(20, 26))]
    for damage, path in zip(UNREADABLE, files, strict=True):
        damage(path, good)
    done = run.go(seconds=fault.seconds)
    assert codes(done) == [0] * several
    fault.assert_seen(done[0].stderr)
    passed = [line for line in done[0].stderr.splitlines() if "passed over" in line]
    assert len(passed) == len(files)
    assert all(str(path) in line for path, line in zip(reversed(files), passed, strict=True))
    assert not any("passed over" in one.stderr for one in done[1:])
    assert went_on(done[0].stdout) == [12]
    assert not (run.folder / "was-run").exists()
    assert_same(run.out, trained(FIRST, several, *SHORT, how=train_in_forks))
    assert_no_step_is_lost_or_doubled(run, 50)
    assert [step_of(path) for path in checkpointer.paths(run.checkpoints)] == [50, 48]


def assert_refused(run, done, *words):
    """All ranks said the same line, and nothing was written or removed."""
    assert codes(done) == [2] * run.processes, done
    for one in done:
        ours = [line for line in one.stderr.splitlines() if "passed over" not in line]
        assert len(ours) == 1, one.stderr
        assert ours[0].startswith("train.py: error: --checkpoint-dir: "), one.stderr
        assert all(word in ours[0] for word in words), one.stderr
    assert "epoch" not in done[0].stdout
    assert not run.out.exists()


@pytest.mark.fault(
    stages="09",
    what="no checkpoint in the folder can be read",
    sees="`train.py: error: --checkpoint-dir: ... holds no checkpoint that can be read`; exit code 2",
    seconds=60,
    lost="nothing is written or removed",
)
def test_if_none_can_be_read_no_run_begins(copy_of_halfway, fault):
    run = copy_of_halfway
    newest, older = checkpointer.paths(run.checkpoints)
    truncated(newest, older)
    of_text(older, None)
    before = run.files()
    done = run.go(seconds=fault.seconds)
    assert_refused(run, done, str(run.checkpoints))
    fault.assert_seen(done[0].stderr)
    assert run.files() == before


OTHER = {
    "--lr": ("0.05", "0.1"),
    "--epochs": ("2", "3"),
    "--batch-size": ("60", "120"),
    "--seed": ("0", "1"),
    "--arch": ("small", "resnet18"),
}
# fmt: off
ALIKE = ["--workers", "1", "--grad-accum-steps", "2", "--timeout", "100", "--checkpoint-every", "7"]
# fmt: on


@pytest.mark.fault(
    stages="09",
    what="the checkpoints are of a run with another learning rate, batch, model, seed or "
    "number of epochs",
    sees="`train.py: error: --checkpoint-dir: ... is of a run with --...; name another folder`; "
    "exit code 2",
    seconds=60,
    lost="nothing is written or removed",
)
@pytest.mark.parametrize("flag", OTHER)
def test_a_run_with_other_flags_does_not_go_on(flag, copy_of_halfway, fault):
    run = copy_of_halfway
    before = run.files()
    was, now = OTHER[flag]
    done = run.go(flag, now, seconds=fault.seconds)
    fault.assert_seen(done[0].stderr)
    assert_refused(run, done, f"of a run with {flag} {was}, not {now};", "step-000000014.pt")
    assert run.files() == before


def test_flags_that_decide_nothing_may_change(copy_of_halfway, several):
    run = copy_of_halfway
    run.out = run.folder / "other"
    done = run.go(*ALIKE)
    assert codes(done) == [0] * several, done
    assert went_on(done[0].stdout) == [14]
    assert [row["train"]["images"] for row in rows(run.out)] == [1500, 1500]
    assert_no_step_is_lost_or_doubled(run, 50)
    assert [step_of(path) for path in checkpointer.paths(run.checkpoints)] == [50, 49]


def test_a_finished_run_only_evaluates(trained, copy_of_halfway, several):
    run = copy_of_halfway
    assert codes(run.go()) == [0] * several
    before = run.files()
    done = run.go(prepare=no_step)
    assert codes(done) == [0] * several, done
    assert went_on(done[0].stdout) == [50]
    assert re.findall("^epoch .:", done[0].stdout, re.M) == ["epoch 2:"]
    assert run.files() == before
    assert_same(run.out, trained(FIRST, several, *SHORT, how=train_in_forks))


@pytest.fixture(params=FAULT_TOLERANT)
def steps(request, tmp_path):
    """Return a function that takes a step per letter, x for a batch with a nan; a group of one.

    It returns by how much the weights moved, and how many steps the scheduler counts.
    """
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    module = load(request.param)

    def take(letters, **others):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        names = {**dict.fromkeys(checkpointer.DECISIVE), "device": torch.device("cpu"), "seed": 0}
        names |= {"dtype": torch.float32, "grad_accum_steps": 1, "signals": [], "checkpoint_every": 4}
        args = types.SimpleNamespace(**{**names, "checkpoints": tmp_path, **others})
        parts = (model, optimizer, scheduler, scaler)
        args.checkpoints = checkpointer.Checkpointer(args, None, *parts)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        batches = Batches([(torch.randn(6, 4), torch.arange(6) % 3) for _ in letters])
        for letter, (images, _) in zip(letters, batches, strict=True):
            images[2, 1] = math.nan if letter == "x" else 0
        module.train_one_epoch(args, 1, model, batches, optimizer, scheduler, scaler)
        moves = [(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
        return torch.cat(moves).norm().item(), scheduler.last_epoch

    yield take
    dist.destroy_process_group()


def test_a_gradient_with_a_nan_is_skipped(steps, capsys, tmp_path):
    assert steps("x") == (0, 0)
    assert capsys.readouterr().out == "step 1: skipped, gradient not finite, loss scale 1\n"
    assert checkpointer.read(checkpointer.paths(tmp_path)[0])["step"] == 1  # it is not taken again
    moved, taken = steps("oxo")
    assert 0.001 < moved < math.inf and taken == 2
    assert "step 2: skipped" in capsys.readouterr().out


def test_four_in_a_row_are_no_reason_to_end(steps, capsys):
    moved, taken = steps("oxxxxoxxxxox")
    assert 0.001 < moved < math.inf and taken == 3
    assert capsys.readouterr().out.count("skipped") == 9


def test_the_fifth_in_a_row_ends_the_run(steps, tmp_path):
    words = f"step 7: 5 in a row skipped; the last checkpoint is {tmp_path}/step-000000004.pt"
    with pytest.raises(FloatingPointError, match=re.escape(words) + "$"):
        steps("ooxxxxxo")
    with pytest.raises(FloatingPointError, match="step 5: .*; there is no checkpoint$"):
        steps("xxxxx", checkpoints=None)


def test_with_clipping_a_nan_is_skipped_too(steps, capsys):
    assert steps("o", clip_grad=1.0)[1] == 1
    assert steps("xo", clip_grad=1.0)[1] == 1
    assert capsys.readouterr().out.count("step 1: skipped") == 1


def test_a_skipped_step_leaves_the_averages_of_batch_norm_alone(tmp_path):
    kept, model = keeper(tmp_path), nn.BatchNorm1d(3)
    for images in (torch.randn(8, 3), torch.full((8, 3), torch.nan)):
        model(images)
        finite = images.isfinite().all()
        kept.judge(1, torch.tensor(1.0 if finite else torch.nan), 1, model)
        if finite:
            good = model.running_mean.clone()
    assert good.norm() > 0 and torch.equal(model.running_mean, good)
    assert kept.skipped == 1 and model.num_batches_tracked == 1


def with_bad_images(folder, *bad):
    """Copy the script: rank 1 gets images of nan in some steps, and every rank tells its steps."""
    begin = "    parts = zip("
    spoil = f"    if dist.get_rank() == 1 and step in {bad}:\n        batch[0].fill_(math.nan)\n"
    tell = '            log(f"step {step}: skipped'
    main = "if args.out_dir and is_main_process():"
    every = 'if checkpoint.save(model.state_dict(), args.out_dir / f"{dist.get_rank()}.pt") or '
    return changed(
        FIRST,
        folder,
        (begin, spoil + begin),
        (tell, tell.replace("log", "print")),
        (main, every + main.removeprefix("if args.out_dir and ")),
    )


def test_all_ranks_skip_a_step_that_is_bad_on_one(two, device, tmp_path):
    root = with_bad_images(tmp_path / "copy", 7, 30, 31)
    run = Run(tmp_path, device, *SHORT, root=root)
    run.out.mkdir()
    done = run.go()
    assert codes(done) == [0, 0], done
    for one in done:
        assert re.findall(r"step (\d+): skipped", one.stdout) == ["7", "30", "31"]
    assert max_abs_diff(run.out / "0.pt", run.out / "1.pt") == 0
    assert max_abs_diff(run.out / "0.pt", run.out / "last.pt") == 0
    assert all(weights.isfinite().all() for weights in checkpoint.load(run.out / "1.pt").values())
    state = checkpointer.read(checkpointer.paths(run.checkpoints)[0])
    assert (state["step"], state["scheduler"]["last_epoch"]) == (50, 47)
    seen = [(row["train"]["images"], math.isfinite(row["train"]["loss"])) for row in rows(run.out)]
    assert seen == [(1440, True), (1380, True)]  # a batch that was skipped is not counted


@pytest.mark.fault(
    stages="09",
    what="five steps in a row have a gradient that is not finite, on one rank or on all",
    sees="`step ...: skipped` of each step, then `FloatingPointError: step ...: 5 in a row "
    "skipped; the last checkpoint is ...`; exit code 1",
    seconds=60,
    lost="nothing; the weights are those before the first of the five",
)
def test_five_bad_steps_in_a_row_end_all_ranks_and_are_counted_across_a_stop(
    two, device, tmp_path, fault
):
    root = with_bad_images(tmp_path / "copy", *range(6, 11))
    run = Run(tmp_path, device, *SHORT, "--checkpoint-every", "4", root=root)
    run.out.mkdir()
    text = f"step 10: 5 in a row skipped; the last checkpoint is {run.checkpoints}"
    done = run.go(seconds=fault.seconds)
    assert codes(done) == [1, 1]
    for one in done:
        fault.assert_seen(one.stdout + one.stderr)
        assert f"FloatingPointError: {text}/step-000000008.pt\n" in one.stderr
    done = run.go(prepare=functools.partial(signalled, 9, "SIGTERM"))
    assert codes(done) == [128 + signal.SIGTERM] * 2
    done = run.go()
    assert codes(done) == [1, 1]
    for one in done:
        assert f"FloatingPointError: {text}/step-000000009.pt\n" in one.stderr


# Squeezenet drops half of what reaches its last layer.
DROPOUT = (*FAKE, "--images", "120", "--image-size", "32", "--batch-size", "12")
DROPOUT += ("--arch", "squeezenet1_1")


@pytest.mark.parametrize("seeded", [True, False])
def test_dropout_goes_on_with_the_same_numbers(seeded, two, device, tmp_path):
    line = "torch.manual_seed(data.derive_seed(args.seed, step, dist.get_rank()))"
    new = line if seeded else "data.derive_seed(args.seed, step, dist.get_rank())"
    root = changed(FIRST, tmp_path / "copy", (line, new))
    whole = Run(tmp_path / "whole", device, *DROPOUT, root=root)
    assert codes(whole.go()) == [0, 0]
    parts = Run(tmp_path / "parts", device, *DROPOUT, root=root)
    parts.go(prepare=functools.partial(signalled, 13, "SIGTERM"))
    assert parts.newest() == 13
    assert codes(parts.go()) == [0, 0]
    assert (max_abs_diff(whole.out / "last.pt", parts.out / "last.pt") == 0) == seeded
    assert (rows(whole.out) == rows(parts.out)) == seeded


class Counted(torch.utils.data.Dataset):
    """Its images are their own numbers; it notes which batches it is asked for."""

    def __init__(self, n):
        self.n, self.asked = n, []

    def __len__(self):
        return self.n

    def __getitems__(self, indices):
        self.asked.append(indices)
        return torch.tensor(indices), torch.tensor(indices)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("processes", range(1, 5))
def test_what_is_left_of_an_epoch_is_its_end(processes, workers):
    for rank in range(processes):
        train_set = Counted(99)
        sampler = DistributedSampler(train_set, processes, rank, seed=3, drop_last=True)
        sampler.set_epoch(2)
        options = {"collate_fn": data.collate, "num_workers": workers, "drop_last": True}
        loader = DataLoader(train_set, 6, sampler=sampler, **options)
        whole = [images.tolist() for images, _ in loader]
        assert len(whole) == len(loader) == 99 // processes // 6
        for done in range(len(loader) + 1) if workers == 0 else [0, 2, len(loader)]:
            train_set.asked.clear()
            left = data.skip_first_batches(loader, done)
            assert len(left) == len(loader) - done
            assert [images.tolist() for images, _ in left] == whole[done:]
            if workers == 0:
                assert train_set.asked == whole[done:]
