"""Stage 09: a run that is killed and resumed ends with the weights of one that was not.

The later stages are killed at random moments as well; signals are the subject of
test_preemption.py, and the Checkpointer by itself of test_checkpointer.py.
"""

import functools
import itertools
import random
import re
import shutil
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

from common import checkpoint
from common import checkpointer
from common.checkpointer import HARMLESS_FLAGS
from common.loader import collate
from common.loader import skip_first_batches
from nbtools.lesson import max_abs_diff
from tests.conftest import swept_unless
from tests.fault_injection import killed_at
from tests.fault_injection import no_large_files
from tests.fault_injection import no_step
from tests.fault_injection import signalled
from tests.harness import assert_one_error_line
from tests.harness import changed
from tests.harness import counts
from tests.harness import kill
from tests.harness import little_work
from tests.harness import ranks
from tests.harness import shards_the_weights
from tests.harness import started
from tests.harness import wait_until
from tests.resume_faults import blind_and_broadcasts_printed
from tests.resume_harness import SHORT
from tests.resume_harness import Run
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import resumed_from
from tests.resume_harness import rows
from tests.resume_harness import step_of
from tests.resume_harness import torchrun_command
from tests.resume_harness import uninterrupted
from tools.stages import stages

STAGE = "09_resume"
STAGES = stages()[8:]
EVERY_2 = ("--checkpoint-every", "2")
EVERY_4 = ("--checkpoint-every", "4")
DOUBLE = ("--dtype", "float64", "--epochs", "2")


@pytest.fixture(scope="module")
def halfway(several, device, tmp_path_factory):
    """A run that was killed in step 15; its checkpoints are of the steps 14 and 12."""
    folder = tmp_path_factory.mktemp("halfway")
    run = Run(STAGE, folder, device, *SHORT, *EVERY_2, processes=several)
    done = run.go(prepare=functools.partial(signalled, 15, "SIGKILL"))
    assert exit_codes(done) == [-signal.SIGKILL] * several
    assert run.steps() == [14, 12]
    return run


@pytest.fixture
def stopped(halfway, device, tmp_path):
    """A copy of that run, to be resumed."""
    shutil.copytree(halfway.checkpoint_dir, tmp_path / "checkpoints")
    flags = (*SHORT, *EVERY_4)
    return Run(STAGE, tmp_path, device, *flags, processes=halfway.processes)


@pytest.fixture(scope="module")
def finished(halfway, device, tmp_path_factory):
    """Another copy, resumed and finished."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(halfway.checkpoint_dir, folder / "checkpoints")
    flags = (*SHORT, *EVERY_2)
    run = Run(STAGE, folder, device, *flags, processes=halfway.processes)
    done = run.go()
    assert exit_codes(done) == [0] * run.processes, done
    assert resumed_from(done[0].stdout) == [14]
    assert not any(one.stdout for one in done[1:])
    return run


# ---- killed and resumed, on the same number of processes -----------------------------
def test_a_resumed_run_differs_in_no_bit(finished, trained):
    reference = uninterrupted(trained, STAGE, finished.processes, *SHORT)
    assert_same(finished.out_dir, reference)
    finished.assert_no_step_is_lost_or_doubled(50)
    assert finished.steps() == [50, 48]


def test_a_finished_run_only_evaluates(finished, trained):
    before = finished.files()
    done = finished.go(prepare=no_step)
    assert exit_codes(done) == [0] * finished.processes, done
    assert resumed_from(done[0].stdout) == [50]
    assert re.findall("^epoch .:", done[0].stdout, re.M) == ["epoch 2:"]
    assert finished.files() == before
    reference = uninterrupted(trained, STAGE, finished.processes, *SHORT)
    assert_same(finished.out_dir, reference)


def kill_at_some_moment(run, draw):
    """Kill one rank of a run, or all of them; return words for the moment.

    It is a little after the run has started, or after a checkpoint has appeared.
    """
    step, delay = draw.choice([0, *range(1, 13)]), draw.uniform(0, 0.1)
    victims = draw.choice([run.ends, run.ends, [draw.choice(run.ends)]])
    if run.wait_until(lambda: "processes on" in run.screen()) and step:
        run.wait_until(lambda: run.latest() >= run.step + step)
    time.sleep(delay)
    for end in victims:
        end.process.kill()
    return f"{len(victims)} killed {delay:.3f} s after step {run.step + step}"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "stage, options",
    [*((stage, ()) for stage in STAGES), ("13_sharded_checkpoints", ("--async-save",))],
)
def test_kills_at_random_moments_change_no_bit(
    stage, options, trained, several, device, tmp_path
):
    flags = (*SHORT, *little_work(stage).flags)
    reference = uninterrupted(trained, stage, several, *flags)
    draw, kills = random.Random(9), []
    for number in itertools.count():
        if sum(map(len, kills)) >= 12:
            break
        kills.append([])
        folder = tmp_path / str(number)
        own = (*flags, *options, *EVERY_4)
        run = Run(stage, folder, device, *own, processes=several)
        finished = False
        while not finished:
            run.start()
            moment = kill_at_some_moment(run, draw)
            done = [end() for end in run.ends]
            expected = [run.step] if run.step else []
            assert resumed_from(done[0].stdout) in ([], expected), moment
            finished = done[0].returncode == 0
            if not finished:
                kills[-1].append(moment)
                assert -signal.SIGKILL in exit_codes(done), kills
                assert "hung" not in exit_codes(done), kills
        assert_same(run.out_dir, reference, kills)
        run.assert_no_step_is_lost_or_doubled(50, kills)
        assert len(run.steps()) == 2


# The n-th call of which function it is, in one start after the other, and in which
# directory it leaves a temporary file. In a run from the beginning, the first 14 calls
# of fsync are those of the seven checkpoints of an epoch.
WHILE_SAVING = [
    ("fsync", 1, "checkpoints"),  # the very first checkpoint, so it starts over
    ("fsync", 5, "checkpoints"),
    ("replace", 3, "checkpoints"),
    ("unlink", 3, None),  # the new name is there, and the old checkpoint as well
    ("fsync", 2, None),  # the new name is there, but not yet on the disk
    ("fsync", 1, "checkpoints"),
]
WHILE_SAVING_THE_EPOCH = [
    ("fsync", 15, "out"),  # last.pt
    ("fsync", 5, "out"),  # metrics.jsonl, after the two others
]
ONE_OF_EACH = [WHILE_SAVING[2], ("fsync", 13, "out")]


def temporary_files(run):
    """Return the temporary files in a run's directories, by the directory's name."""
    return {
        name: set((run.folder / name).glob(".*.tmp")) for name in ("checkpoints", "out")
    }


@pytest.mark.fault(
    stages="09 to 13",
    what="rank 0 is killed while it writes a checkpoint, weights or metrics",
    sees="the next run says `resumed from step`; every file has its old contents or its"
    " new ones, and resuming removes the temporary file",
    seconds=60,
    lost="the steps since the last checkpoint, which are done again",
)
@pytest.mark.parametrize(
    "moments",
    [
        ONE_OF_EACH,
        pytest.param(WHILE_SAVING, marks=pytest.mark.sweep),
        pytest.param(WHILE_SAVING_THE_EPOCH, marks=pytest.mark.sweep),
    ],
    ids=["one_of_each", "while_saving", "while_saving_the_epoch"],
)
def test_kills_while_a_file_is_written(
    moments, trained, several, device, tmp_path, fault
):
    run = Run(STAGE, tmp_path, device, *SHORT, *EVERY_4, processes=several)
    for name, call, leaves in moments:
        before = temporary_files(run)
        done = run.go(prepare=functools.partial(killed_at, call, name))
        assert done[0].returncode == -signal.SIGKILL, (name, call)
        after = temporary_files(run)
        if leaves:
            assert len(after[leaves] - before[leaves]) == 1, (name, call)
        if call > 2 and name != "unlink":  # a checkpoint was written before the kill
            assert not after["checkpoints"] & before["checkpoints"]
    done = run.go(seconds=fault.seconds)
    assert exit_codes(done) == [0] * several
    fault.assert_seen(done[0].stdout)
    assert not temporary_files(run)["checkpoints"]
    assert_same(run.out_dir, uninterrupted(trained, STAGE, several, *SHORT))
    run.assert_no_step_is_lost_or_doubled(50)


# Squeezenet drops half of what reaches its last layer.
DROPOUT = ("--data", "fake", "--images", "120", "--image-size", "32", "--epochs", "2")
DROPOUT += ("--batch-size", "12", "--arch", "squeezenet1_1", *EVERY_2)
SEEDED = "torch.manual_seed(data.derive_seed(args.seed, step, dist.get_rank()))"


@pytest.mark.parametrize("seeded", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_dropout_draws_the_same_numbers(seeded, two, device, tmp_path):
    line = SEEDED if seeded else SEEDED.partition("(")[2][:-1]  # without manual_seed
    root = changed(STAGE, tmp_path / "copy", (SEEDED, line))
    whole = Run(STAGE, tmp_path / "whole", device, *DROPOUT, root=root, processes=two)
    assert exit_codes(whole.go()) == [0, 0]
    parts = Run(STAGE, tmp_path / "parts", device, *DROPOUT, root=root, processes=two)
    parts.go(prepare=functools.partial(signalled, 13, "SIGKILL"))
    assert parts.latest() == 12
    assert exit_codes(parts.go()) == [0, 0]
    difference = max_abs_diff(whole.out_dir / "last.pt", parts.out_dir / "last.pt")
    assert (difference == 0) == seeded
    assert (rows(whole.out_dir) == rows(parts.out_dir)) == seeded


# ---- torchrun's restarts -------------------------------------------------------------
@pytest.mark.fault(
    stages="09 to 13",
    what="one rank or all of them are killed, under `--max-restarts=3`",
    sees="what torchrun says of every stage, `failed (exitcode: -9)`, then"
    " `resumed from step`; exit code 0 in the end",
    seconds=120,
    lost="the steps since the last checkpoint, which are done again",
)
@pytest.mark.parametrize(
    "kills",
    [
        [[1]],
        pytest.param([[1], [0, 1], [0]], marks=pytest.mark.sweep),
    ],
    ids=["once", "as_often_as_the_command_allows"],
)
def test_torchrun_restarts_killed_ranks(kills, trained, two, device, tmp_path, fault):
    flags = ("--epochs", str(2 * len(kills)))
    own = (*flags, "--checkpoint-every", "10", "--device", device)
    arguments, variables = torchrun_command(STAGE, two, tmp_path, *own)
    draw, moments = random.Random(3), []

    def latest():
        return max((tmp_path / "checkpoints").glob("step-*.pt"), default=None)

    with started(arguments, tmp_path, **variables) as child:
        for number, victims in enumerate(kills, start=1):
            child.wait_for("processes on", times=number)
            before = latest()
            wait_until(lambda old=before: latest() != old, fault.seconds, child.screen)
            delay = draw.uniform(0, 0.05)
            moments.append((latest(), victims, delay))
            time.sleep(delay)
            living = ranks(child)
            assert len(living) == 2, moments
            kill(living[rank] for rank in victims)
        assert child.wait(fault.seconds) == 0, child.screen()
        assert len(resumed_from(child.screen())) == len(kills), moments
        fault.assert_seen(child.screen())
    assert_same(tmp_path / "out", uninterrupted(trained, STAGE, two, *flags), moments)


# ---- on another number of processes --------------------------------------------------
@pytest.fixture(scope="module")
def stopped_at_36(device, tmp_path_factory):
    """Return a function: a float64 run on some processes that was killed in step 37."""
    runs = {}

    def get(processes, stage=STAGE):
        if (stage, processes) not in runs:
            folder = tmp_path_factory.mktemp(f"on-{processes}")
            flags = (*DOUBLE, *EVERY_4, *little_work(stage).flags)
            run = Run(stage, folder, device, *flags, processes=processes)
            run.go(prepare=functools.partial(signalled, 37, "SIGKILL"))
            assert run.latest() == 36
            runs[stage, processes] = run
        return runs[stage, processes]

    return get


PAIRS = list(itertools.product(range(1, 5), repeat=2))
# Those that shard the weights are on several numbers of processes in test_fsdp.py, too.
PAIRS_SHARDED = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 3), (3, 4), (4, 1)]
FEW = [(STAGE, 3, 3), (STAGE, 3, 2)]
FEW += [("12_fsdp", 3, 3)]


@pytest.mark.parametrize(
    "stage, before, after",
    [
        swept_unless((stage, *pair) in FEW, stage, *pair)
        for stage in STAGES
        if stage == STAGE or shards_the_weights(stage)
        for pair in (PAIRS if stage == STAGE else PAIRS_SHARDED)
    ],
)
def test_a_run_resumes_on_any_number_of_processes(
    stage, before, after, trained, stopped_at_36, device, tmp_path
):
    """On as many as before it differs in no bit, on others by rounding only.

    Three and more processes add up a gradient in an order that depends on its place in
    DDP's buffers.
    """
    if max(before, after) not in counts(device):
        pytest.skip(f"{max(before, after)} processes need as many GPUs")
    for name in ("checkpoints", "out"):
        shutil.copytree(stopped_at_36(before, stage).folder / name, tmp_path / name)
    work = little_work(stage)
    flags = (*DOUBLE, *work.flags)
    run = Run(stage, tmp_path, device, *flags, *EVERY_4, processes=after)
    done = run.go()
    assert exit_codes(done) == [0] * after
    assert resumed_from(done[0].stdout) == [36]
    reference = uninterrupted(trained, stage, before, *flags)
    if before == after:
        assert_same(run.out_dir, reference)
    assert max_abs_diff(run.out_dir / "last.pt", reference.weights) <= 1e-10
    ours, theirs = rows(run.out_dir), rows(reference.weights.parent)
    assert [row["epoch"] for row in ours] == [1, 2]
    for part, targets in (("train", work.train), ("val", work.val)):
        for one, other in zip(ours, theirs, strict=True):
            assert one[part]["count"] == targets
            assert one[part] == pytest.approx(other[part], abs=1e-10)
    run.assert_no_step_is_lost_or_doubled(50)


class Counted(torch.utils.data.Dataset):
    """Its images are their own numbers; it notes the batches it is asked for."""

    def __init__(self, n):
        self.n, self.asked = n, []

    def __len__(self):
        return self.n

    def __getitems__(self, indices):
        self.asked.append(indices)
        return torch.tensor(indices), torch.tensor(indices)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_skip_first_batches_leaves_the_rest_of_the_epoch(processes, workers):
    for rank in range(processes if workers == 0 else 1):
        train_set = Counted(99)
        sampler = DistributedSampler(train_set, processes, rank, seed=3, drop_last=True)
        sampler.set_epoch(2)
        options = {"collate_fn": collate, "num_workers": workers, "drop_last": True}
        loader = DataLoader(train_set, 6, sampler=sampler, **options)
        whole = [images.tolist() for images, _ in loader]
        assert len(whole) == len(loader) == 99 // processes // 6
        for done in range(len(loader) + 1) if workers == 0 else [0, 2, len(loader)]:
            train_set.asked.clear()
            rest = skip_first_batches(loader, done)
            assert len(rest) == len(loader) - done
            assert [images.tolist() for images, _ in rest] == whole[done:]
            if workers == 0:
                assert train_set.asked == whole[done:]  # the others are not read


# ---- what a run refuses, and what may change -----------------------------------------
def assert_refused(run, done, named):
    """Assert that all ranks said the same line, and that nothing was written."""
    for one in done:
        ours = [line for line in one.stderr.splitlines() if "skipping" not in line]
        one.stderr = "\n".join(ours)
        assert_one_error_line(one, f"--checkpoint-dir: {named}")
    assert len({one.stderr for one in done}) == 1
    assert "epoch" not in done[0].stdout
    assert not run.out_dir.exists()


@pytest.mark.fault(
    stages="09 to 13",
    what="the checkpoints were written with another learning rate, batch, model, seed,"
    " number of epochs, or any other flag that can change the weights",
    sees="`train.py: error: --checkpoint-dir: ... was written with --..., not ...; use"
    " the same flags, or another directory`; exit code 2",
    seconds=60,
    lost="nothing is written or removed",
)
def test_a_run_with_other_flags_is_refused_by_all_ranks(stopped, fault):
    """In test_checkpointer.py there is a case for each flag."""
    before = stopped.files()
    done = stopped.go("--lr", "0.1", seconds=fault.seconds)
    fault.assert_seen(done[0].stderr)
    path = stopped.paths()[0]
    assert_refused(stopped, done, f"{path} was written with --lr 0.05, not 0.1;")
    assert stopped.files() == before


@pytest.mark.fault(
    stages="09 to 13",
    what="no checkpoint in the directory can be read",
    sees="`train.py: error: --checkpoint-dir: no checkpoint can be read, not even ...`;"
    " exit code 2",
    seconds=60,
    lost="nothing is written or removed",
)
def test_if_none_can_be_read_the_run_does_not_start_over(stopped, fault):
    for path in stopped.paths():
        path.write_text("not a checkpoint")
    before = stopped.files()
    done = stopped.go(seconds=fault.seconds)
    fault.assert_seen(done[0].stderr)
    path = stopped.paths()[0]
    assert_refused(stopped, done, f"no checkpoint can be read, not even {path}")
    assert stopped.files() == before


@pytest.mark.fault(
    stages="09 to 13",
    what="`--checkpoint-dir` is on a disk that one of the nodes does not see",
    sees="`train.py: error: --checkpoint-dir: ... must be on a disk that every node"
    " sees`, from the ranks on that node; exit code 2",
    seconds=60,
    lost="nothing is written or removed",
)
def test_rank_0_decides_and_every_rank_reads(stopped, two, fault):  # noqa: ARG001
    prepare = functools.partial(blind_and_broadcasts_printed, "1")
    path = stopped.paths()[0]
    before = stopped.files()
    rank_0, rank_1 = stopped.start(prepare=prepare, seconds=fault.seconds)
    done = rank_1()
    assert_one_error_line(done, f"{path} must be on a disk that every node sees")
    fault.assert_seen(done.stderr)
    assert done.stdout == f"broadcast: {path!r}\n"  # and not what it holds
    assert rank_0().returncode == 1  # its connection broke
    assert stopped.files() == before


HARMLESS = {
    "activation_checkpointing": None,  # stage 13 has it
    "async_save": None,  # stage 13 has it
    "checkpoint_every": "7",
    "checkpoint_minutes": None,  # stage 10 has it: see test_preemption.py
    "sample": None,  # stage 11 has it
    "data_dir": "elsewhere",
    "device": None,  # there is no other one here
    "evaluate": None,  # does not train
    "grad_accum_steps": "3",
    "keep_checkpoints": "3",
    "timeout": "100",
    "workers": "1",
}


def test_harmless_flags_may_change(trained, stopped_at_36, several, device, tmp_path):
    """Also the directories: all of them have moved."""
    shutil.copytree(stopped_at_36(several).checkpoint_dir, tmp_path / "checkpoints")
    run = Run(STAGE, tmp_path, device, *DOUBLE, processes=several)
    flags = ["--download", "--save-logits", tmp_path / "logits.pt"]
    for name, value in HARMLESS.items():
        if value:
            flags += [f"--{name.replace('_', '-')}", value]
    others = {"checkpoint_dir", "out_dir", "download", "save_logits"}
    assert HARMLESS.keys() | others == HARMLESS_FLAGS
    done = run.go(*flags)
    assert exit_codes(done) == [0] * several, done
    assert resumed_from(done[0].stdout) == [36]
    reference = uninterrupted(trained, STAGE, several, *DOUBLE)
    assert max_abs_diff(run.out_dir / "last.pt", reference.weights) <= 1e-10
    run.assert_no_step_is_lost_or_doubled(50)
    assert run.steps() == [50, 49, 42]


def test_evaluate_does_not_look_at_the_checkpoints(stopped, trained):
    reference = uninterrupted(trained, STAGE, stopped.processes, *SHORT)
    before = stopped.files()
    done = stopped.go("--evaluate", reference.weights, "--lr", "0.1")
    assert exit_codes(done) == [0] * stopped.processes, done
    val = reference.epochs[-1].partition("val ")[2]
    assert done[0].stdout == f"val {val}\n"
    assert stopped.files() == before


@pytest.mark.fault(
    stages="09 to 13",
    what="the training set has another size, or torch another version, than when the"
    " checkpoint was written",
    sees="`warning: ... was written with torch_version ..., not ...`, once",
    seconds=60,
    lost="nothing; but the result may differ from that of an uninterrupted run",
)
def test_another_torch_version_is_a_warning(stopped, fault):
    latest = stopped.paths()[0]
    state = checkpointer.read(latest)
    checkpoint.save(state | {"torch_version": "2.0.0"}, latest)
    done = stopped.go("--epochs", "2", seconds=fault.seconds)
    assert exit_codes(done) == [0] * stopped.processes
    fault.assert_seen(done[0].stderr)
    assert resumed_from(done[0].stdout) == [14]
    assert "".join(one.stderr for one in done).count("warning: ") == 1


# ---- corrupt checkpoints and full disks ----------------------------------------------
@pytest.mark.fault(
    stages="09 to 12",
    what="the latest checkpoint is corrupt, or another file has its name",
    sees="`skipping corrupt checkpoint ...step-...pt (...)`; the run is resumed from"
    " the one before",
    seconds=60,
    lost="the steps between the two, which are done again",
)
def test_corrupt_checkpoints_are_skipped(stopped, trained, fault):
    """In test_checkpointer.py there are more kinds of them."""
    latest, older = stopped.paths()
    latest.write_bytes(latest.read_bytes()[:300_000])
    later = latest.with_name("step-000000020.pt")
    torch.save({"weight": torch.zeros(3)}, later)
    done = stopped.go(seconds=fault.seconds)
    assert exit_codes(done) == [0] * stopped.processes
    fault.assert_seen(done[0].stderr)
    lines = [line for line in done[0].stderr.splitlines() if "skipping" in line]
    assert [
        str(path) in line for path, line in zip((later, latest), lines, strict=True)
    ]
    assert not any("skipping" in one.stderr for one in done[1:])
    assert resumed_from(done[0].stdout) == [step_of(older)] == [12]
    reference = uninterrupted(trained, STAGE, stopped.processes, *SHORT)
    assert_same(stopped.out_dir, reference)
    stopped.assert_no_step_is_lost_or_doubled(50)
    assert stopped.steps() == [50, 48]


@pytest.mark.fault(
    stages="09 to 12",
    what="a checkpoint cannot be written because the disk is full",
    sees="`step ...: checkpoint not written (...)`; the training continues",
    seconds=60,
    lost="nothing: the earlier checkpoints stay; but with `--out-dir` on the same disk"
    " the end of the epoch fails",
)
def test_a_full_disk_ends_no_run(stopped, trained, fault):
    before = stopped.files()
    prepare = functools.partial(no_large_files, 400_000)
    done = stopped.go(prepare=prepare, seconds=fault.seconds)
    assert exit_codes(done) == [0] * stopped.processes
    written = (stopped.out_dir / "last.pt").stat().st_size
    assert written < 400_000 < len(before["step-000000014.pt"])
    lines = re.findall(
        r"^step (\d+): checkpoint not written \(.+\)$", done[0].stderr, re.M
    )
    assert lines == ["16", "20", "24", "25", "28", "32", "36", "40", "44", "48", "50"]
    assert not any("not written" in one.stderr for one in done[1:])
    assert stopped.files() == before
    reference = uninterrupted(trained, STAGE, stopped.processes, *SHORT)
    assert_same(stopped.out_dir, reference)
