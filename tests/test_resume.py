"""Stage 09: a run that is killed and resumed ends with the weights of one that was not.

The later stages are killed at random moments as well; signals are the subject of
test_preemption.py, and the Checkpointer by itself of test_checkpointer.py.
"""

import itertools
import random
import re
import shlex
import shutil
import signal
import time
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

from common import checkpoint
from common import checkpointer
from common.checkpointer import HARMLESS_FLAGS
from common.loader import collate
from common.loader import skip_first_batches
from tests.conftest import only_in_sweep
from tests.fault_injection import hide_checkpoints
from tests.fault_injection import no_large_files
from tests.fault_injection import no_step
from tests.fault_injection import signalled_at_file
from tests.resume_harness import EVERY_4
from tests.resume_harness import SHORT
from tests.resume_harness import Run
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import resumed_from
from tests.resume_harness import rows
from tests.resume_harness import step_of
from tests.resume_harness import uninterrupted
from tests.training import DOUBLE
from tests.training import assert_one_error_line
from tests.training import changed
from tests.training import counts
from tests.training import injected
from tests.training import small_workload
from tools import harness
from tools.stages import first_with
from tools.stages import registry
from tools.stages import with_feature
from tools.weights import max_abs_diff

STAGE, *LATER = with_feature("checkpoints")
SHARDS = with_feature("checkpoints", "shards")
EVERY_2 = ("--checkpoint-every", "2")


@pytest.fixture(scope="module")
def halfway(several, device, tmp_path_factory):
    """A run that was killed in step 15; its checkpoints are of the steps 14 and 12."""
    folder = tmp_path_factory.mktemp("halfway")
    run = Run(STAGE, folder, device, *SHORT, *EVERY_2, processes=several)
    run.stop(15, "SIGKILL")
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
    done = run.run()
    assert resumed_from(done.ranks[0].stdout) == [14]
    assert not any(one.stdout for one in done.ranks[1:])
    return run


# ---- killed and resumed, on the same number of processes -----------------------------
def test_a_resumed_run_differs_in_no_bit(finished, trained):
    reference = uninterrupted(trained, STAGE, finished.processes, *SHORT)
    assert_same(finished.out_dir, reference)
    finished.assert_no_step_is_lost_or_doubled(50)
    assert finished.steps() == [50, 48]


def test_a_finished_run_only_evaluates(finished, trained):
    before = finished.files()
    done = finished.run(prepare=no_step)
    assert resumed_from(done.stdout) == [50]
    assert re.findall("^epoch .:", done.stdout, re.M) == ["epoch 2:"]
    assert finished.files() == before
    reference = uninterrupted(trained, STAGE, finished.processes, *SHORT)
    assert_same(finished.out_dir, reference)


def kill_at_some_moment(run, job, draw):
    """Kill one rank of a run, or all of them; return words for the moment.

    It is a little after the run has started, or after a checkpoint has appeared.
    """
    step, delay = draw.choice([0, *range(1, 13)]), draw.uniform(0, 0.1)
    victims = draw.choice([job.forks, job.forks, [draw.choice(job.forks)]])

    def wait_until(predicate):
        def reached_or_over():
            return predicate() or not job.running()

        harness.wait_until(reached_or_over, harness.LIMIT, job.screen, every=0.001)

    wait_until(lambda: "processes on" in job.screen())
    wait_until(lambda: run.latest() >= run.step + step)
    time.sleep(delay)
    for fork in victims:
        fork.kill()
    return f"{len(victims)} killed {delay:.3f} s after step {run.step + step}"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "stage, options",
    [
        *((stage, ()) for stage in (STAGE, *LATER)),
        (first_with("sharded_checkpoints"), ("--async-save",)),
    ],
)
def test_kills_at_random_moments_change_no_bit(
    stage, options, trained, several, device, tmp_path
):
    flags = (*SHORT, *small_workload(stage).flags)
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
            with run.start() as job:
                moment = kill_at_some_moment(run, job, draw)
                done = job.wait()
            expected = [run.step] if run.step else []
            assert resumed_from(done.stdout) in ([], expected), moment
            finished = done.ranks[0].returncode == 0
            if not finished:
                kills[-1].append(moment)
                assert -signal.SIGKILL in exit_codes(done), kills
                assert "hung" not in exit_codes(done), kills
        assert_same(run.out_dir, reference, kills)
        run.assert_no_step_is_lost_or_doubled(50, kills)
        assert len(run.steps()) == 2


# Before which event rank 0 is killed, in one start after the other, and in which
# directory it leaves a temporary file. The pattern is of a file's new name.
CHECKPOINT, WEIGHTS, METRICS = "*/step-*.pt", "*/last.pt", "*/metrics.jsonl"
ONE_OF_EACH = [
    ("os.rename", CHECKPOINT, 3, "checkpoints"),
    ("os.rename", WEIGHTS, 1, "out"),
]
WHILE_SAVING = [
    ("os.rename", CHECKPOINT, 1, "checkpoints"),  # the very first: it starts over
    ("os.rename", CHECKPOINT, 3, "checkpoints"),
    ("open", CHECKPOINT, 1, None),  # while it loads
    ("os.remove", CHECKPOINT, 1, None),  # the new name is there, and the old one, too
    ("open", "*/checkpoints", 1, None),  # the new name may not be on the disk yet
    ("open", "*/.step-*.tmp", 1, None),
    ("os.rename", CHECKPOINT, 1, "checkpoints"),
]
WHILE_SAVING_THE_EPOCH = [
    ("os.rename", WEIGHTS, 1, "out"),
    ("os.rename", METRICS, 1, "out"),  # after the weights
]


def temporary_files(run):
    """Return the temporary files in a run's directories, by the directory's name."""
    return {
        name: set((run.folder / name).glob(".*.tmp")) for name in ("checkpoints", "out")
    }


@pytest.mark.fault(
    since="checkpoints",
    what="rank 0 is killed while it writes a checkpoint, weights or metrics",
    sees="the next run says `resumed from step`; every file has its old contents or its"
    " new ones, and resuming removes the temporary file",
    seconds=60,
    lost="the steps since the last checkpoint, which are done again",
)
@pytest.mark.parametrize(
    "moments",
    [ONE_OF_EACH, only_in_sweep(WHILE_SAVING), only_in_sweep(WHILE_SAVING_THE_EPOCH)],
    ids=["one_of_each", "while_saving", "while_saving_the_epoch"],
)
def test_kills_while_a_file_is_written(
    moments, trained, several, device, tmp_path, fault
):
    run = Run(STAGE, tmp_path, device, *SHORT, *EVERY_4, processes=several)
    for event, pattern, call, leaves in moments:
        before, step = temporary_files(run), run.latest()
        kill = partial(signalled_at_file, event, pattern, call=call, ranks=["0"])
        done = run.run(code=None, prepare=kill)
        assert exit_codes(done)[0] == -signal.SIGKILL, (event, pattern)
        after = temporary_files(run)
        for name, files in after.items():
            assert len(files - before[name]) == (name == leaves), (event, pattern)
        if step and step != run.latest():
            assert not after["checkpoints"] & before["checkpoints"]
    done = run.run()
    fault.assert_seen(done.stdout)
    assert not temporary_files(run)["checkpoints"]
    assert_same(run.out_dir, uninterrupted(trained, STAGE, several, *SHORT))
    run.assert_no_step_is_lost_or_doubled(50)


# Squeezenet drops half of what reaches its last layer.
DROPOUT = ("--data", "fake", "--images", "120", "--image-size", "32", "--epochs", "2")
DROPOUT += ("--batch-size", "12", "--arch", "squeezenet1_1", *EVERY_2)
SEEDED = "torch.manual_seed(data.derive_seed(args.seed, step, dist.get_rank()))"


@pytest.mark.parametrize("seeded", [True, only_in_sweep(False)])
def test_dropout_draws_the_same_numbers(seeded, two, device, tmp_path):
    line = SEEDED if seeded else SEEDED.partition("(")[2][:-1]  # without manual_seed
    root = changed(STAGE, tmp_path / "copy", (SEEDED, line))
    whole = Run(STAGE, tmp_path / "whole", device, *DROPOUT, root=root, processes=two)
    whole.run()
    parts = Run(STAGE, tmp_path / "parts", device, *DROPOUT, root=root, processes=two)
    parts.stop(13, "SIGKILL")
    assert parts.latest() == 12
    parts.run()
    difference = max_abs_diff(whole.out_dir / "last.pt", parts.out_dir / "last.pt")
    assert (difference == 0) == seeded
    assert (rows(whole.out_dir) == rows(parts.out_dir)) == seeded


# ---- torchrun's restarts -------------------------------------------------------------
# In the 13th step of each start, the others wait to be ended by torchrun.
KILLS = """
import itertools
import signal
import time
from torch.optim.optimizer import register_optimizer_step_pre_hook

count = itertools.count(1)
kills = dict(enumerate(KILLS))

def kill(*_):
    victims = kills.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    if victims and next(count) == 13:
        if dist.get_rank() in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

register_optimizer_step_pre_hook(kill)
"""


@pytest.mark.fault(
    since="checkpoints",
    what="one rank or all of them are killed, under `--max-restarts=3`",
    sees="what torchrun says of every stage, `failed (exitcode: -9)`, then"
    " `resumed from step`; exit code 0 in the end",
    seconds=120,
    lost="the steps since the last checkpoint, which are done again",
)
@pytest.mark.parametrize(
    "kills",
    [[[1]], only_in_sweep([[1], [0, 1], [0]])],
    ids=["once", "as_often_as_the_command_allows"],
)
def test_torchrun_restarts_killed_ranks(kills, trained, two, device, tmp_path, fault):
    root = injected(STAGE, tmp_path / "copy", KILLS.replace("KILLS", str(kills)))
    run = Run(STAGE, tmp_path, device, *SHORT, "--checkpoint-every", "10")
    words = shlex.split(registry()[STAGE].command)  # with --max-restarts=3
    words[words.index(f"{STAGE}/train.py")] = root / STAGE / "train.py"
    done = harness.run([*words, *run.flags], tmp_path / "screen")
    assert resumed_from(done.stdout) == [10, 20, 30][: len(kills)]
    fault.assert_seen(done.stdout + done.stderr)
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two, *SHORT))


# ---- on another number of processes --------------------------------------------------
@pytest.fixture(scope="module")
def stopped_at_36(device, tmp_path_factory):
    """Return a function: a float64 run on some processes that was killed in step 37."""
    runs = {}

    def get(processes, stage=STAGE):
        if (stage, processes) not in runs:
            folder = tmp_path_factory.mktemp(f"on-{processes}")
            flags = (*DOUBLE, *EVERY_4, *small_workload(stage).flags)
            run = Run(stage, folder, device, *flags, processes=processes)
            run.stop(37, "SIGKILL")
            assert run.latest() == 36
            runs[stage, processes] = run
        return runs[stage, processes]

    return get


PAIRS = [(STAGE, *pair) for pair in itertools.product(range(1, 5), repeat=2)]
# These are on several numbers of processes in test_fsdp.py, too.
PAIRS_SHARDED = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 3), (3, 4), (4, 1)]
PAIRS += [(stage, *pair) for stage in SHARDS for pair in PAIRS_SHARDED]
FEW = [(STAGE, 3, 3), (STAGE, 3, 2), (SHARDS[0], 3, 3)]


@pytest.mark.parametrize(
    "stage, before, after", [only_in_sweep(*one, unless=one in FEW) for one in PAIRS]
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
    work = small_workload(stage)
    flags = (*DOUBLE, *work.flags)
    run = Run(stage, tmp_path, device, *flags, *EVERY_4, processes=after)
    assert resumed_from(run.run().stdout) == [36]
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
    for one in done.ranks:
        ours = [line for line in one.stderr.splitlines() if "skipping" not in line]
        one.stderr = "\n".join(ours)
        assert_one_error_line(one, f"--checkpoint-dir: {named}")
    assert len({one.stderr for one in done.ranks}) == 1
    assert "epoch" not in done.stdout
    assert not run.out_dir.exists()


@pytest.mark.fault(
    since="checkpoints",
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
    done = stopped.run("--lr", "0.1", code=2)
    fault.assert_seen(done.stderr)
    path = stopped.paths()[0]
    assert_refused(stopped, done, f"{path} was written with --lr 0.05, not 0.1;")
    assert stopped.files() == before


@pytest.mark.fault(
    since="checkpoints",
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
    done = stopped.run(code=2)
    fault.assert_seen(done.stderr)
    path = stopped.paths()[0]
    assert_refused(stopped, done, f"no checkpoint can be read, not even {path}")
    assert stopped.files() == before


@pytest.mark.fault(
    since="checkpoints",
    what="`--checkpoint-dir` is on a disk that one of the nodes does not see",
    sees="`train.py: error: --checkpoint-dir: ... must be on a disk that every node"
    " sees`, from the ranks on that node; exit code 2",
    seconds=60,
    lost="nothing is written or removed",
)
def test_rank_0_decides_and_every_rank_reads(stopped, two, fault):  # noqa: ARG001
    """Rank 1 names a path that rank 0 has sent, and does not get what it holds."""
    path = stopped.paths()[0]
    before = stopped.files()
    done = stopped.run(code=None, prepare=partial(hide_checkpoints, "1"))
    rank_0, rank_1 = done.ranks
    assert_one_error_line(rank_1, f"{path} must be on a disk that every node sees")
    fault.assert_seen(rank_1.stderr)
    assert rank_0.returncode == 1  # its connection broke
    assert stopped.files() == before


HARMLESS = {
    "activation_checkpointing": None,  # later stages have it
    "async_save": None,  # later stages have it
    "checkpoint_every": "7",
    "checkpoint_minutes": None,  # later stages have it: see test_preemption.py
    "sample": None,  # later stages have it
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
    assert resumed_from(run.run(*flags).stdout) == [36]
    reference = uninterrupted(trained, STAGE, several, *DOUBLE)
    assert max_abs_diff(run.out_dir / "last.pt", reference.weights) <= 1e-10
    run.assert_no_step_is_lost_or_doubled(50)
    assert run.steps() == [50, 49, 42]


def test_evaluate_does_not_look_at_the_checkpoints(stopped, trained):
    reference = uninterrupted(trained, STAGE, stopped.processes, *SHORT)
    before = stopped.files()
    done = stopped.run("--evaluate", reference.weights, "--lr", "0.1")
    val = reference.epochs[-1].partition("val ")[2]
    assert done.stdout == f"val {val}\n"
    assert stopped.files() == before


@pytest.mark.fault(
    since="checkpoints",
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
    done = stopped.run()
    fault.assert_seen(done.stderr)
    assert resumed_from(done.stdout) == [14]
    assert done.stderr.count("warning: ") == 1


# ---- corrupt checkpoints and full disks ----------------------------------------------
@pytest.mark.fault(
    since="checkpoints",
    without="sharded_checkpoints",
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
    done = stopped.run()
    fault.assert_seen(done.stderr)
    lines = [line for line in done.stderr.splitlines() if "skipping" in line]
    for path, line in zip((later, latest), lines, strict=True):
        assert str(path) in line
    assert not any("skipping" in one.stderr for one in done.ranks[1:])
    assert resumed_from(done.stdout) == [step_of(older)] == [12]
    reference = uninterrupted(trained, STAGE, stopped.processes, *SHORT)
    assert_same(stopped.out_dir, reference)
    stopped.assert_no_step_is_lost_or_doubled(50)
    assert stopped.steps() == [50, 48]


@pytest.mark.fault(
    since="checkpoints",
    without="sharded_checkpoints",
    what="a checkpoint cannot be written because the disk is full",
    sees="`step ...: checkpoint not written (...)`; the training continues",
    seconds=60,
    lost="nothing: the earlier checkpoints stay; but with `--out-dir` on the same disk"
    " the end of the epoch fails",
)
def test_a_full_disk_ends_no_run(stopped, trained, fault):
    before = stopped.files()
    done = stopped.run(prepare=partial(no_large_files, 400_000))
    rank_0, *others = done.ranks
    fault.assert_seen(rank_0.stderr)
    written = (stopped.out_dir / "last.pt").stat().st_size
    assert written < 400_000 < len(before["step-000000014.pt"])
    lines = re.findall(
        r"^step (\d+): checkpoint not written \(.+\)$", rank_0.stderr, re.M
    )
    assert lines == ["16", "20", "24", "25", "28", "32", "36", "40", "44", "48", "50"]
    assert not any("not written" in one.stderr for one in others)
    assert stopped.files() == before
    reference = uninterrupted(trained, STAGE, stopped.processes, *SHORT)
    assert_same(stopped.out_dir, reference)
