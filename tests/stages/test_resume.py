"""docs/faults.md, from 09 on: a killed run resumes, and ends with the same weights.

And what it refuses to resume from. Signals are the subject of test_preemption.py,
checkpoints in shards that of test_sharded_checkpoints.py, and common/checkpoint.py by
itself that of test_checkpoint.py.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

from common import checkpoint
from common.loader import collate
from common.loader import skip_first_batches
from harness import commands
from harness.stages import ROOT
from harness.stages import features
from harness.stages import first_with
from harness.stages import registry
from harness.stages import with_feature
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.fault_injection import in_folder
from tests.fault_injection import nan_logits
from tests.fault_injection import no_large_files
from tests.fault_injection import no_step
from tests.fault_injection import read_only_from
from tests.fault_injection import signalled_at_file
from tests.fault_injection import signalled_while_evaluating
from tests.fault_injection import with_flags
from tests.resume_harness import EVERY_4
from tests.resume_harness import SAMPLES
from tests.resume_harness import STEPS
from tests.resume_harness import Run
from tests.resume_harness import app_state
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import read_state
from tests.resume_harness import resumed_from
from tests.resume_harness import rows
from tests.resume_harness import step_of
from tests.resume_harness import take_step
from tests.resume_harness import uninterrupted
from tests.training import DOUBLE
from tests.training import assert_one_error_line
from tests.training import injected
from tests.training import load_stage
from tests.training import plain
from tests.training import skip_without_gpus
from tests.training import small_workload
from tests.training import stage_args

STAGES = with_feature("checkpoints")
STAGE, *_ = STAGES
SHARDS = with_feature("checkpoints", "shards")
IN_FOLDERS = first_with("sharded_checkpoints")
EVERY_1, EVERY_2 = ("--checkpoint-every", "1"), ("--checkpoint-every", "2")


@pytest.fixture(scope="module")
def halfway(several, device, tmp_path_factory):
    """A run that was killed in step 7; its checkpoints are of the steps 6 and 4."""
    folder = tmp_path_factory.mktemp("halfway")
    run = Run(STAGE, folder, device, *EVERY_2, processes=several)
    run.stop(7, "SIGKILL")
    assert run.steps() == [6, 4]
    return run


@pytest.fixture
def stopped(halfway, device, tmp_path):
    """A copy of that run, to be resumed."""
    shutil.copytree(halfway.checkpoint_dir, tmp_path / "checkpoints")
    return Run(STAGE, tmp_path, device, *EVERY_4, processes=halfway.processes)


# ---- what a checkpoint holds ---------------------------------------------------------
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_has_all_that_the_next_step_needs(stage, tmp_path):
    module = load_stage(stage)
    args = stage_args(module, "--checkpoint-dir", tmp_path / "checkpoints")
    first, second = (app_state(stage, module, args, seed) for seed in (0, 1))
    module.load_latest(args, first)  # nothing is there
    for _ in range(3):
        take_step(first)
    module.save_checkpoint(args, first)
    take_step(second)
    module.load_latest(args, second)
    assert second.step == 3
    for _ in range(2):
        for name in ("scheduler", "scaler"):
            one, other = (getattr(each, name).state_dict() for each in (first, second))
            one.pop("_is_initial", None), other.pop("_is_initial", None)
            assert one == other, name
        for one, other in zip(
            first.model.parameters(), second.model.parameters(), strict=True
        ):
            assert torch.equal(plain(one), plain(other))
        take_step(first)
        take_step(second)


# ---- killed and resumed, on the same number of processes -----------------------------
@pytest.mark.parametrize(
    "stage",
    [only_in_release(stage, unless=stage == STAGE) for stage in STAGES],
)
def test_a_killed_run_ends_with_the_weights_of_another(
    stage, trained, several, device, tmp_path
):
    """It is killed in the middle of an epoch, and after an epoch's last step."""
    run = Run(stage, tmp_path, device, *EVERY_4, processes=several)
    run.stop(7, "SIGKILL")
    assert run.steps() == [4]
    evaluating = partial(signalled_while_evaluating, 10 - 4, "SIGKILL")
    done = run.run(code=None, prepare=evaluating)
    assert resumed_from(done.ranks[0].stdout) == [4]
    assert not any(one.stdout for one in done.ranks[1:])
    assert run.steps() == [10, 8]
    done = run.run()
    assert resumed_from(done.stdout) == [10]
    assert re.findall("^epoch .:", done.stdout, re.M) == ["epoch 1:", "epoch 2:"]
    assert_same(run.out_dir, uninterrupted(trained, stage, several))
    run.assert_no_step_is_lost_or_doubled()
    assert run.steps() == [20, 16]
    before = run.files()
    done = run.run()  # a finished run only evaluates
    assert resumed_from(done.stdout) == [20]
    assert re.findall("^epoch .:", done.stdout, re.M) == ["epoch 2:"]
    assert run.files() == before
    assert_same(run.out_dir, uninterrupted(trained, stage, several))


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
    " new ones, and the next save removes the temporary file",
    lost="the steps since the last checkpoint, which are done again",
)
@pytest.mark.parametrize(
    "moments",
    [ONE_OF_EACH, only_in_release(WHILE_SAVING)],
    ids=["one_of_each", "while_saving"],
)
def test_kills_while_a_file_is_written(
    moments, trained, several, device, tmp_path, fault
):
    run = Run(STAGE, tmp_path, device, *EVERY_4, processes=several)
    for event, pattern, call, leaves in moments:
        before = temporary_files(run)
        kill = partial(signalled_at_file, event, pattern, call=call, ranks=["0"])
        done = run.run(code=None, prepare=kill)
        assert exit_codes(done)[0] == -signal.SIGKILL, (event, pattern)
        for name, files in temporary_files(run).items():
            assert len(files - before[name]) == (name == leaves), (event, pattern)
    done = run.run()
    fault.assert_seen(done.stdout)
    assert not any(temporary_files(run).values())
    assert_same(run.out_dir, uninterrupted(trained, STAGE, several))
    run.assert_no_step_is_lost_or_doubled()


# Squeezenet drops half of what reaches its last layer. There are 10 steps in an epoch.
DROPOUT = ("--data", "fake", "--images", "120", "--image-size", "32")
DROPOUT += ("--batch-size", "12", "--arch", "squeezenet1_1", *EVERY_2)


def test_dropout_draws_the_same_numbers(two, device, tmp_path):
    whole = Run(STAGE, tmp_path / "whole", device, *DROPOUT, processes=two)
    whole.run()
    parts = Run(STAGE, tmp_path / "parts", device, *DROPOUT, processes=two)
    parts.stop(7, "SIGKILL")
    assert parts.latest() == 6
    parts.run()
    last = [run.out_dir / "last.pt" for run in (whole, parts)]
    assert max_abs_diff(*last) == 0


# ---- torchrun's restarts -------------------------------------------------------------
# In the 7th step of each start, the others wait to be ended by torchrun.
KILLS = """
import itertools
import signal
import time
from torch.optim.optimizer import register_optimizer_step_pre_hook

count = itertools.count(1)
kills = dict(enumerate(KILLS))

def kill(*_):
    victims = kills.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    if victims and next(count) == 7:
        if dist.get_rank() in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

register_optimizer_step_pre_hook(kill)
"""


@pytest.mark.release  # notebook 09 kills a rank under --max-restarts, too
@pytest.mark.fault(
    since="checkpoints",
    what="one rank or all of them are killed, under `--max-restarts=3`",
    sees="torchrun's `failed (exitcode: -9)`, then `resumed from step`; exit code 0 in"
    " the end",
    lost="the steps since the last checkpoint, which are done again",
)
@pytest.mark.parametrize(
    "kills",
    [[[1]], [[1], [0, 1], [0]]],
    ids=["once", "as_often_as_the_command_allows"],
)
def test_torchrun_restarts_killed_ranks(kills, trained, two, device, tmp_path, fault):
    root = injected(STAGE, tmp_path / "copy", KILLS.replace("KILLS", str(kills)))
    run = Run(STAGE, tmp_path, device, *EVERY_4)
    words = shlex.split(registry()[STAGE].command)  # with --max-restarts=3
    words[words.index(f"{STAGE}/train.py")] = root / STAGE / "train.py"
    done = commands.run([*words, *run.flags], tmp_path / "screen")
    assert resumed_from(done.stdout) == [4, 10, 16][: len(kills)]
    fault.assert_seen(done.stdout + done.stderr)
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two))


# ---- on another number of processes --------------------------------------------------
@pytest.fixture(scope="module")
def stopped_at_16(device, tmp_path_factory):
    """Return a function: a float64 run on some processes that was killed in step 17."""
    runs = {}

    def get(processes, stage=STAGE):
        if (stage, processes) not in runs:
            folder = tmp_path_factory.mktemp(f"on-{processes}")
            run = Run(stage, folder, device, *DOUBLE, *EVERY_4, processes=processes)
            # rank 0, which has written; with nccl the others may be a step ahead
            run.stop(17, "SIGKILL", ranks=["0"])
            assert run.latest() == 16
            runs[stage, processes] = run
        return runs[stage, processes]

    return get


PAIRS = [(STAGE, *pair) for pair in [(1, 1), (1, 2), (3, 3)]]
PAIRS += [(each, *pair) for each in SHARDS for pair in [(2, 1), (2, 3)]]
FEW = [(STAGE, 1, 2), (STAGE, 3, 3), (SHARDS[0], 2, 3), (IN_FOLDERS, 2, 1)]


@pytest.mark.parametrize(
    "stage, before, after", [only_in_release(*one, unless=one in FEW) for one in PAIRS]
)
def test_a_run_resumes_on_any_number_of_processes(
    stage, before, after, trained, stopped_at_16, device, tmp_path
):
    """On one or two as before it differs in no bit, otherwise by rounding only.

    Three and more processes add up a gradient in an order that depends on its place in
    DDP's buffers.
    """
    skip_without_gpus(max(before, after), device)
    for name in ("checkpoints", "out"):
        shutil.copytree(stopped_at_16(before, stage).folder / name, tmp_path / name)
    run = Run(stage, tmp_path, device, *DOUBLE, *EVERY_4, processes=after)
    assert resumed_from(run.run().stdout) == [16]
    reference = uninterrupted(trained, stage, before, *DOUBLE)
    same = before == after and before <= 2
    assert_same(run.out_dir, reference, atol=0 if same else 1e-12)
    val = small_workload(stage, SAMPLES).val
    assert [row["val"]["count"] for row in rows(run.out_dir)] == [val] * 2
    run.assert_no_step_is_lost_or_doubled()


class Counted(torch.utils.data.Dataset):
    """99 images that are their own numbers; it notes the batches it is asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 99

    def __getitems__(self, indices):
        self.asked.append(indices)
        return torch.tensor(indices), torch.tensor(indices)


@pytest.mark.parametrize("done", [0, 2, 5])
def test_skip_first_batches_leaves_the_rest_and_reads_nothing_else(done):
    train_set = Counted()
    sampler = DistributedSampler(train_set, 3, rank=1, seed=3, drop_last=True)
    sampler.set_epoch(2)
    options = {"collate_fn": collate, "drop_last": True}
    loader = DataLoader(train_set, 6, sampler=sampler, **options)
    whole = [images.tolist() for images, _ in loader]
    assert len(whole) == len(loader) == 5
    train_set.asked.clear()
    rest = skip_first_batches(loader, done)
    assert len(rest) == len(loader) - done
    assert [images.tolist() for images, _ in rest] == whole[done:] == train_set.asked


# ---- what a run refuses, and what may change -----------------------------------------
def assert_refused(run, done, named):
    """Assert that all ranks said the same line, and that nothing was written."""
    for one in done.ranks:
        assert_one_error_line(one, f"--checkpoint-dir: {named}")
    assert len({one.stderr for one in done.ranks}) == 1
    assert "epoch" not in done.stdout
    assert not run.out_dir.exists()


COMPARED = {"epochs", "batch_size", "lr", "weight_decay", "seed", "dtype", "amp"}
COMPARED |= {"clip_grad", "tf32", "deterministic"}
OF_IMAGES = {"data", "image_size", "images", "arch"}
OF_TEXT = {"context_length", "width", "depth", "heads"}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", STAGES)
def test_every_flag_is_compared_unless_it_may_differ(stage, tmp_path, capsys):
    module = load_stage(stage)
    args = stage_args(module, "--checkpoint-dir", tmp_path)
    compared = COMPARED | (OF_TEXT if "text" in features(stage) else OF_IMAGES)
    assert args.fixed().keys() == compared
    state = app_state(stage, module, args, 0)
    state.identity = checkpoint.identity(args.fixed(), NoData)
    module.load_latest(args, state)
    take_step(state)
    module.save_checkpoint(args, state)
    for name, value in vars(args).items():
        other = stage_args(module, "--checkpoint-dir", tmp_path)
        if name != "checkpoint_dir":
            setattr(other, name, "another")
        state.identity = checkpoint.identity(other.fixed(), NoData)
        capsys.readouterr()
        if name in args.may_differ:
            module.load_latest(other, state)
            continue
        with pytest.raises(SystemExit, match="^2$"):
            module.load_latest(other, state)
        (line,) = capsys.readouterr().err.splitlines()
        flag = f"--{name.replace('_', '-')}"
        assert f": written with {flag} {value}, not another; use" in line


class NoData:
    """A data set that has a fingerprint and nothing else."""

    def fingerprint():
        return "0"


@pytest.mark.fault(
    since="checkpoints",
    what="no checkpoint in the directory can be read",
    sees="`train.py: error: --checkpoint-dir: no checkpoint in ... can be read`;"
    " exit code 2",
    lost="nothing is written or removed",
)
def test_if_none_can_be_read_the_run_does_not_start_over(stopped, fault):
    for path in stopped.paths():
        path.write_text("not a checkpoint")
    before = stopped.files()
    done = stopped.run(code=2)
    fault.assert_seen(done.stderr)
    named = f"no checkpoint in {stopped.checkpoint_dir} can be read"
    assert_refused(stopped, done, named)
    assert stopped.files() == before


@pytest.mark.fault(
    since="checkpoints",
    without="shards",
    what="`--checkpoint-dir` is on a disk that one of the nodes does not see",
    sees="`skipping checkpoint ... (it must be on a disk that every node sees)`, and"
    " `train.py: error: --checkpoint-dir: no checkpoint in ... can be read`; exit code"
    " 2",
    lost="nothing is written or removed",
)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.usefixtures("two")
def test_a_checkpoint_that_one_rank_does_not_see(rank, stopped, tmp_path, fault):
    """All try what any rank sees: otherwise some would start from scratch."""
    before, paths = stopped.files(), [f"checkpoints/{p.name}" for p in stopped.paths()]
    (tmp_path / "another disk").mkdir()
    prepare = partial(in_folder, tmp_path / "another disk", rank)
    options = {"cwd": stopped.folder, "prepare": prepare, "code": 2}
    done = stopped.run("--checkpoint-dir", "checkpoints", **options)
    fault.assert_seen(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if "skipping" in line]
    why = "(it must be on a disk that every node sees)"
    assert lines == [f"skipping checkpoint {path} {why}" for path in paths]
    assert_refused(stopped, done, "no checkpoint in checkpoints can be read")
    assert stopped.files() == before


# ---- before anything is read or written ----------------------------------------------
@pytest.mark.fault(
    since="checkpoints",
    what="one rank is started with other flags, or has other training data",
    sees="`train.py: error: ... rank 0... all ranks ...`: one line that names the flag"
    " or the data; exit code 2",
    lost="nothing is written or removed",
)
@pytest.mark.parametrize(
    "stage, flag, named",
    [
        (STAGE, "--lr", "--lr is 0.05 on rank 0, and 0.3 on rank 1"),
        (IN_FOLDERS, "--text-file", "the training data of rank 1 is not that of rank"),
    ],
)
def test_ranks_that_differ_do_not_start(
    stage, flag, named, two, device, tmp_path, fault
):
    """Otherwise their weights drift apart, without an error, or they hang."""
    run = Run(stage, tmp_path, device, *EVERY_4, processes=two)
    value = "0.3"
    if flag == "--text-file":
        value = tmp_path / "text.txt"
        theirs = Path(run.flags[run.flags.index(flag) + 1]).read_bytes()
        value.write_bytes(b"\0" + theirs[1:])
    done = run.run(code=2, prepare=partial(with_flags, flag, str(value)))
    for one in done.ranks:
        assert_one_error_line(one, named)
        fault.assert_seen(one.stderr)
    assert not run.checkpoint_dir.exists()


@pytest.mark.fault(
    since="checkpoints",
    what="a second run is started with the same `--checkpoint-dir`",
    sees="`train.py: error: --checkpoint-dir: another run is using ...; wait for its"
    " end, or name another directory`; exit code 2",
    lost="nothing; but if the file system has no locks, both train, and each replaces"
    " the other's checkpoints",
)
def test_a_second_run_in_one_directory_does_not_start(several, device, tmp_path, fault):
    """Also with the same flags: both could not remove each other's checkpoints."""
    first = Run(STAGE, tmp_path, device, *EVERY_4, processes=several)
    second = Run(STAGE, tmp_path, device, "--seed", "9", processes=several)
    second.folder, ends = tmp_path / "second", tmp_path / "ends"
    waiting = partial(no_step, ends)
    with first.start(prepare=waiting) as job:
        job.wait_for("an optimizer step", times=several)
        done = second.run(code=2)
        ends.touch()
        job.wait()
    for one in done.ranks:
        assert_one_error_line(one, "--checkpoint-dir: another run is using")
        fault.assert_seen(one.stderr)
    first.run()  # the lock has gone with the process
    assert first.steps() == [20, 16]


# ---- whose checkpoint it is ----------------------------------------------------------
each_kind = pytest.mark.parametrize("stage", [STAGE, IN_FOLDERS])


@pytest.mark.fault(
    since="checkpoints",
    what="the checkpoints were written with another learning rate, batch, model, seed,"
    " number of epochs, or any other flag that can change the weights",
    sees="`train.py: error: --checkpoint-dir: ...: written with --..., not ...; use the"
    " same flags, or another directory`; exit code 2",
    lost="nothing is written or removed",
)
@each_kind
def test_a_checkpoint_is_of_one_run_wherever_it_is(stage, two, device, tmp_path, fault):
    """Copied alone into a new folder, it is refused to a run with another seed."""
    run = Run(stage, tmp_path / "run", device, *EVERY_2, processes=two)
    run.stop(7, "SIGKILL")
    other = Run(stage, tmp_path / "other", device, *EVERY_2, processes=two)
    path = other.checkpoint_dir / run.paths()[0].name
    copy = shutil.copytree if run.paths()[0].is_dir() else shutil.copy
    path.parent.mkdir(parents=True)
    copy(run.paths()[0], path)
    before = other.files()
    done = other.run("--seed", "9", code=2)
    fault.assert_seen(done.stderr)
    assert_refused(other, done, f"{path}: written with --seed 0, not 9; use the same")
    assert other.files() == before
    assert resumed_from(other.run().stdout) == [6]


@pytest.mark.fault(
    since="checkpoints",
    what="the data has changed under its name, a text for instance",
    sees="`train.py: error: --checkpoint-dir: ...: written by a run on other data; use"
    " the same data, or another directory`; exit code 2",
    lost="nothing is written or removed",
)
def test_a_text_that_was_replaced_is_refused(two, device, tmp_path, fault):
    """The new one is as long, and differs in one byte."""
    text = tmp_path / "text.txt"
    text.write_bytes((ROOT / "common/text.txt").read_bytes()[:5000])
    flags = (*EVERY_2, "--text-file", text)
    run = Run(IN_FOLDERS, tmp_path, device, *flags, processes=two)
    run.stop(7, "SIGKILL")
    before = run.files()
    text.write_bytes(b"\0" + text.read_bytes()[1:])
    done = run.run(code=2)
    fault.assert_seen(done.stderr)
    assert_refused(run, done, f"{run.paths()[0]}: written by a run on other data;")
    assert run.files() == before


def with_another_weight(path):
    """Make of a checkpoint one of the same run and step that differs."""
    if path.is_dir():
        manifest = json.loads((path / checkpoint.MANIFEST).read_text())
        del manifest["digest"]
        manifest["id"] = "of another save"
        manifest["digest"] = checkpoint.digest(manifest)
        (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    else:
        state = read_state(path)
        next(iter(state["model"].values())).add_(1)
        torch.save(state, path)


@pytest.mark.fault(
    since="checkpoints",
    without="shards",
    what="each node has its own disk, and on it checkpoints of other runs or saves",
    sees="`skipping checkpoint ... (the ranks read different files)`, and `train.py:"
    " error: --checkpoint-dir: no checkpoint in ... can be read`; exit code 2",
    lost="nothing is written or removed",
)
@each_kind
def test_ranks_that_read_different_checkpoints(stage, two, device, tmp_path, fault):
    """Otherwise each would train on from its own, without an error."""
    run = Run(stage, tmp_path / "disk", device, *EVERY_2, processes=two)
    run.stop(7, "SIGKILL")
    shutil.copytree(run.checkpoint_dir, tmp_path / "other/checkpoints")
    for path in run.paths():
        with_another_weight(tmp_path / "other/checkpoints" / path.name)
    before = run.files()
    prepare = partial(in_folder, tmp_path / "other", "1")
    options = {"cwd": run.folder, "prepare": prepare, "code": 2}
    done = run.run("--checkpoint-dir", "checkpoints", **options)
    fault.assert_seen(done.stdout + done.stderr)
    assert done.stdout.count("(the ranks read different files)") == 2
    assert_refused(run, done, "no checkpoint in checkpoints can be read")
    assert run.files() == before


# ---- corrupt checkpoints, full disks, losses that are not finite ---------------------
@pytest.mark.fault(
    since="checkpoints",
    without="sharded_checkpoints",
    what="the latest checkpoint is corrupt, or another file has its name",
    sees="`skipping checkpoint ...step-...pt (...)`; the run is resumed from the one"
    " before",
    lost="the steps between the two, which are done again",
)
def test_corrupt_checkpoints_are_skipped(trained, several, device, tmp_path, fault):
    """In test_checkpoint.py there are more kinds of them."""
    run = Run(STAGE, tmp_path, device, *EVERY_2, processes=several)
    run.stop(7, "SIGKILL")
    latest, older = run.paths()
    latest.write_bytes(latest.read_bytes()[:-5000])
    done = run.run()
    fault.assert_seen(done.stdout)
    assert done.stdout.count(f"skipping checkpoint {latest} (") == 1
    assert resumed_from(done.stdout) == [step_of(older)] == [4]
    assert_same(run.out_dir, uninterrupted(trained, STAGE, several))
    run.assert_no_step_is_lost_or_doubled()


@pytest.mark.fault(
    since="checkpoints",
    without="sharded_checkpoints",
    what="a checkpoint cannot be written because the disk is full",
    sees="`step ...: checkpoint not written (...)`; the training continues",
    lost="nothing: the earlier checkpoints stay; with `--out-dir` on the same disk, a"
    " line says that its files were not written, and the exit code is 1",
)
def test_a_full_disk_ends_no_run(stopped, trained, fault):
    """The weights alone, without the optimizer's state, still fit."""
    before = stopped.files()
    most = len(before["step-000000006.pt"]) * 3 // 4
    done = stopped.run(prepare=partial(no_large_files, most))
    rank_0, *others = done.ranks
    fault.assert_seen(rank_0.stderr)
    pattern = r"^step (\d+): checkpoint not written \(.*File too large\)$"
    assert re.findall(pattern, rank_0.stderr, re.M) == ["8", "10", "12", "16", "20"]
    assert not any("not written" in one.stderr for one in others)
    assert stopped.files() == before
    assert_same(stopped.out_dir, uninterrupted(trained, STAGE, stopped.processes))


@pytest.fixture
def disk(tmp_path):
    """A disk of its own, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    if subprocess.run(words, check=False).returncode:
        pytest.skip("mount needs root")
    yield folder
    while folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.fault(
    since="checkpoints",
    what="the disk with the checkpoints becomes read-only",
    sees="`step ...: checkpoint not written (...Read-only file system...)`; the"
    " training continues",
    lost="nothing: the earlier checkpoints stay",
)
@each_kind
def test_a_disk_that_becomes_read_only_ends_no_run(
    stage, disk, trained, two, device, tmp_path, fault
):
    run = Run(stage, tmp_path, device, *EVERY_4, processes=two)
    flags = ("--checkpoint-dir", disk / "checkpoints")
    done = run.run(*flags, prepare=partial(read_only_from, 6, disk))
    printed = done.stdout + done.stderr
    fault.assert_seen(printed)
    pattern = r"^step (\d+): checkpoint not written \(.*Read-only file system.*\)$"
    assert re.findall(pattern, printed, re.M) == ["8", "10", "12", "16", "20"]
    (path,) = (disk / "checkpoints").glob("step-*")
    assert step_of(path) == read_state(path)["step"] == 4
    assert_same(run.out_dir, uninterrupted(trained, stage, two))


def test_what_is_not_finite_is_not_saved(two, device, tmp_path):
    """Of weights: a loss makes them so. The last valid checkpoint stays."""
    run = Run(STAGE, tmp_path, device, *EVERY_1, processes=two)
    done = run.run(code=1, prepare=partial(nan_logits, 3))
    lines = [line for line in done.stdout.splitlines() if "not saved" in line]
    why = "not saved, since training has diverged"
    assert lines == [f"step {step}: {why}" for step in range(3, STEPS // 2 + 1)]
    assert run.steps() == [2, 1]
    assert "stopped in epoch 1: training has diverged" in done.stdout
    assert not run.out_dir.exists()


# ---- what another stage has written --------------------------------------------------
@pytest.mark.parametrize(
    "before, after",
    [
        (SHARDS[0], IN_FOLDERS),
        (first_with("text"), SHARDS[0]),
    ],
)
def test_checkpoints_of_another_kind_are_refused(before, after, two, device, tmp_path):
    """A file in place of a folder, a folder of a file; an optimizer that has numbers.

    The optimizer of a plain model knows its weights by their numbers, that of a sharded
    one by their names.
    """
    flags = ("--width", "20", "--heads", "2", "--checkpoint-every", "5")
    Run(before, tmp_path, device, *flags, processes=two).stop(6, "SIGKILL")
    run = Run(after, tmp_path, device, *flags, processes=two)
    files = run.files()
    assert files
    done = run.run(code=2)
    for one in done.ranks:
        assert_one_error_line(one, "--checkpoint-dir: ")
    assert run.files() == files
