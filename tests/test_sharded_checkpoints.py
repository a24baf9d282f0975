"""Stage 13: what is written in shards, killed, damaged, and read by other processes.

What is shown first needs one process only, and takes no step of a script. That the
stage trains the same weights, resumes and stops at a signal is shown in the tests that
do so for every stage.
"""

import functools
import gc
import re
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
import types

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint import CheckpointException

from common import sharded_checkpointer
from common.model import GPT
from common.model import decay_groups
from common.sharded_checkpointer import check
from tests import fsdp_ranks
from tests.conftest import only_in_sweep
from tests.fault_injection import devices_of_weights_printed
from tests.fault_injection import hide_checkpoints
from tests.fault_injection import infinite_gradient
from tests.fault_injection import nan_logits
from tests.fault_injection import no_large_files
from tests.fault_injection import signalled
from tests.fault_injection import signalled_at_file
from tests.fault_injection import slow_to_write
from tests.resume_harness import EVERY_4
from tests.resume_harness import NEVER
from tests.resume_harness import SHORT
from tests.resume_harness import Run
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import read_state
from tests.resume_harness import resumed_from
from tests.resume_harness import step_of
from tests.resume_harness import uninterrupted
from tests.training import DOUBLE
from tests.training import assert_one_error_line
from tests.training import call_all
from tests.training import counts
from tests.training import load_stage
from tests.training import plain
from tests.training import run_stage
from tests.training import small_workload
from tools.harness import call_in_forks
from tools.stages import first_with
from tools.weights import max_abs_diff

STAGE = first_with("sharded_checkpoints")
BEFORE = first_with("shards")
WORK = small_workload(STAGE, 600)  # 10 steps in an epoch
SUMS = torch.arange(4, dtype=torch.float64).reshape(1, 4)
BOTH = pytest.mark.parametrize("async_save", [False, True], ids=["save", "async_save"])


# ---- one process, without a run ------------------------------------------------------
class Training:
    """A small model, its optimizer and so on, as in a run of one process."""

    def __init__(self, folder, seed=0, keep=2, async_save=False, width=20):
        self.script = load_stage(STAGE)
        self.args = types.SimpleNamespace(
            checkpoint_dir=folder,
            keep_checkpoints=keep,
            async_save=async_save,
            activation_checkpointing=False,
            keep_unsharded=False,
            amp="off",
            device=torch.device("cpu"),
            width=width,
        )
        torch.manual_seed(seed)
        self.model = GPT(256, 8, width, 1, 2)
        self.script.shard_model(self.args, self.model)
        groups = decay_groups(self.model, 0.1)
        self.optimizer = torch.optim.AdamW(groups, 0.01, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.9**step
        )
        self.ckpt = self.script.ShardedCheckpointer(
            self.args,
            types.SimpleNamespace(dataset=range(100)),
            self.script.ShardedModel(self.model),
            self.script.ShardedOptimizer(self.model, self.optimizer),
            self.scheduler,
            torch.amp.GradScaler("cpu", enabled=False),
            dist.new_group(backend="gloo"),
        )

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.arange(16).reshape(2, 8)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def save(self, *steps):
        """Take a step before each of these checkpoints; return the last one's state."""
        for step in steps:
            self.step()
            state = self.state()
            self.script.save_checkpoint(self.args, self.ckpt, step, SUMS)
        return state

    def load(self):
        self.ckpt.restore(self.script.load_latest(self.ckpt))
        return self.state()

    def state(self):
        """Return copies of all that a step changes."""
        found = [plain(each).detach().clone() for each in self.model.parameters()]
        for one in self.optimizer.state.values():
            found += [plain(value).clone() for value in one.values()]
        rate = self.optimizer.param_groups[0]["lr"]
        return [*found, torch.tensor([rate, self.scheduler.last_epoch])]


@pytest.fixture
def make(group, tmp_path):  # noqa: ARG001
    """Return a function that makes a Training in this process."""
    return functools.partial(Training, tmp_path / "checkpoints")


def same(one, other):
    return all(map(torch.equal, one, other))


def steps_in(training):
    return [step_of(path) for path in training.ckpt.paths()]


def names(folder):
    return {path.name for path in folder.iterdir()}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_complete(path):
    """Assert that every file of a checkpoint is there as it was written."""
    state = read_state(path)
    assert state["step"] == step_of(path)
    metadata = sharded_checkpointer.FileSystemReader(path).read_metadata()
    needed = {info.relative_path for info in metadata.storage_data.values()}
    assert state["checksums"].keys() == {*needed, ".metadata"}
    for name in state["checksums"]:
        check(path / name, state["checksums"])
    assert names(path) == {*state["checksums"], "rest.pt"}


@BOTH
def test_what_was_saved_is_restored(async_save, make):
    first, second = make(async_save=async_save), make(seed=1)
    saved = first.save(1, 2, 7)
    first.ckpt.wait()
    assert not same(second.state(), saved)
    assert same(second.load(), saved)
    assert second.ckpt.step == 7 and torch.equal(second.ckpt.sums, SUMS)
    first.step()
    second.step()
    assert same(first.state(), second.state())
    assert_complete(second.ckpt.paths()[0])


def held_up(monkeypatch, name):
    """Have a method of the Writer begin only at an event, which is returned."""
    event, original = threading.Event(), getattr(sharded_checkpointer.Writer, name)

    def late(*args, **options):
        assert event.wait(20)
        return original(*args, **options)

    monkeypatch.setattr(sharded_checkpointer.Writer, name, late)
    return event


@pytest.mark.parametrize("name", ["prepare_local_plan", "write_data", "finish"])
def test_async_save_writes_the_state_at_its_call(name, make, monkeypatch):
    first, event = make(async_save=True), held_up(monkeypatch, name)
    saved = first.save(1)
    first.step()
    first.step()
    assert first.ckpt.paths() == []
    event.set()
    first.ckpt.wait()
    assert not same(first.state(), saved)
    assert same(make(seed=1).load(), saved)


def test_two_saves_are_never_at_once(make, monkeypatch):
    begun, ended = [], []
    write_data, finish = (
        getattr(sharded_checkpointer.Writer, name) for name in ("write_data", "finish")
    )

    def begin(writer, *args):
        begun.append(len(ended))
        return write_data(writer, *args)

    def end(writer, *args, **options):
        time.sleep(0.05)
        finish(writer, *args, **options)
        ended.append(writer)

    monkeypatch.setattr(sharded_checkpointer.Writer, "write_data", begin)
    monkeypatch.setattr(sharded_checkpointer.Writer, "finish", end)
    training = make(async_save=True, keep=9)
    training.save(*range(1, 6))
    training.ckpt.wait()
    assert begun == [0, 1, 2, 3, 4]
    assert steps_in(training) == [5, 4, 3, 2, 1]


@BOTH
def test_an_optimizer_has_taken_no_step_until_it_takes_one(async_save, make):
    """Although ShardedOptimizer has torch make the state that a first step makes."""
    first = make(async_save=async_save)
    assert {int(each["step"]) for each in first.optimizer.state.values()} == {0}
    first.script.save_checkpoint(first.args, first.ckpt, 1, SUMS)
    first.ckpt.wait()
    restored = make(seed=1)
    restored.load()
    untouched = make()
    untouched.optimizer = torch.optim.AdamW(
        decay_groups(untouched.model, 0.1), 0.01, fused=True
    )
    assert not untouched.optimizer.state
    for _ in range(3):
        states = []
        for training in (first, restored, untouched):
            training.optimizer.param_groups[0]["lr"] = 0.01
            training.optimizer.param_groups[1]["lr"] = 0.01
            training.optimizer.zero_grad()
            training.model(torch.arange(16).reshape(2, 8)).square().sum().backward()
            training.optimizer.step()
            states.append(training.state()[:-1])
        assert same(states[0], states[1]) and same(states[0], states[2])


@pytest.mark.parametrize("keep", [1, 2, 3])
@BOTH
def test_the_latest_are_kept(keep, async_save, make, tmp_path):
    training = make(keep=keep, async_save=async_save)
    training.save(1, 2, 9, 10, 100)
    training.ckpt.wait()
    assert steps_in(training) == [100, 10, 9][:keep]
    assert len(names(tmp_path / "checkpoints")) == keep


@BOTH
def test_what_killed_saves_have_left_is_removed(async_save, make, tmp_path):
    """By the next save, and when a run resumes."""
    folder = tmp_path / "checkpoints"
    training = make(async_save=async_save)
    saved = training.save(1)
    training.ckpt.wait()

    def leave():
        for name in (
            ".step-000000002.tmp",
            ".step-000000003.tmp",
            ".step-000000001.removed.tmp",
            ".step-000000001.tmp.removed.tmp",
        ):
            (folder / name).mkdir()
            (folder / name / "__3_0.distcp").write_text("of a fourth process")

    leave()
    second = make(seed=1)
    assert same(second.load(), saved)
    assert names(folder) == {"step-000000001"}
    leave()
    training.save(2)
    training.ckpt.wait()
    assert names(folder) == {"step-000000001", "step-000000002"}
    assert not (folder / "step-000000002/__3_0.distcp").exists()


# ---- damaged ones and others ---------------------------------------------------------
def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def with_a_bit_flipped(path):
    content = bytearray(path.read_bytes())
    content[min(200, len(content) // 2)] ^= 1  # not in a gap between two tensors
    path.write_bytes(content)


def missing(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def of_another_step(path):
    """As after a copy of one folder over another that was interrupted."""
    other = path.parent.with_name("step-000000001") / path.name
    assert other.stat().st_size == path.stat().st_size
    shutil.copy(other, path)


FILES = [".metadata", "__0_0.distcp", "rest.pt"]
KINDS = [truncated, with_a_bit_flipped, missing, empty, of_another_step]
DAMAGES = [(name, damage) for name in FILES for damage in KINDS]


@pytest.mark.parametrize("name, damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(name, damage, make, capsys, tmp_path):
    """In one line; it stays until the next save, also when a run has resumed."""
    folder = tmp_path / "checkpoints"
    first, second = make(), make(seed=1)
    saved = first.save(1)
    first.save(2)
    path = folder / "step-000000002"
    damage(path / name)
    before = contents(folder)
    script, ckpt = second.script, second.ckpt
    state = script.load_latest(ckpt)
    assert state["step"] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"skipping corrupt checkpoint {path}")
    ckpt.restore(state)
    assert same(second.state(), saved)
    assert contents(folder) == before
    second.save(2)
    assert steps_in(second) == [2, 1]
    assert_complete(path)


def test_each_file_is_checked_by_one_rank(make, monkeypatch):
    """Although most ranks read something of each: the learning rate, for instance."""
    training = make()
    training.save(1)
    path = training.ckpt.paths()[0]
    checksums, checked = read_state(path)["checksums"], []
    monkeypatch.setattr(
        sharded_checkpointer, "check", lambda path, _: checked.append(path.name)
    )
    for rank in range(2):
        calls = {"rank": lambda rank=rank: rank, "size": lambda: 2}
        group = types.SimpleNamespace(**calls)
        reader = sharded_checkpointer.Reader(path, checksums, group)
        reader.prepare_local_plan(None)
    assert sorted(checked) == [".metadata", "__0_0.distcp"]


def folder_of_weights(path):
    path.mkdir()
    torch.save({"weight": torch.zeros(3)}, path / "rest.pt")


def empty_folder(path):
    path.mkdir()


def rest_alone(path):
    shutil.copytree(path.with_name("step-000000001"), path)
    for file in path.iterdir():
        if file.name != "rest.pt":
            file.unlink()


FOREIGN = [folder_of_weights, empty_folder, rest_alone]


def test_foreign_folders_are_skipped_a_line_each(make, capsys, tmp_path):
    """The line is not repeated, although the search starts again after a failed load.

    Whatever has another name than a checkpoint of ours is never touched.
    """
    folder = tmp_path / "checkpoints"
    first = make()
    saved = first.save(1)
    paths = [folder / f"step-{20 + n:09}" for n in range(len(FOREIGN))]
    for path, foreign in zip(paths, FOREIGN, strict=True):
        foreign(path)
    shutil.copytree(folder / "step-000000001", folder / "step-000000001-copy")
    (folder / "step-by-step").mkdir()
    (folder / "step-000000030").write_text("a file")
    second = make(seed=1)
    assert same(second.load(), saved)
    lines = capsys.readouterr().err.splitlines()
    for path, line in zip(reversed(paths), lines, strict=True):
        assert line.startswith(f"skipping corrupt checkpoint {path}")
    others = {"step-000000001-copy", "step-by-step", "step-000000030"}
    assert names(folder) == {"step-000000001", *others, *(path.name for path in paths)}


def error_line(capsys):
    """Return the last line on standard error, that of a wrong flag; and the others."""
    *others, line = capsys.readouterr().err.splitlines()
    assert ": error: --checkpoint-dir: " in line
    return line, others


def test_if_none_can_be_read_the_line_says_why_and_nothing_is_removed(
    make, capsys, tmp_path
):
    folder = tmp_path / "checkpoints"
    make(keep=3).save(1, 2, 3)
    for step, name in enumerate((".metadata", "__0_0.distcp", "rest.pt"), start=1):
        truncated(folder / f"step-{step:09}" / name)
    before = contents(folder)
    with pytest.raises(SystemExit, match="^2$"):
        make(seed=1).load()
    line, others = error_line(capsys)
    path = folder / "step-000000003/rest.pt"
    assert f"no checkpoint can be read, not even {path} (" in line
    assert [re.search(r"step-0+(\d)", one)[1] for one in others] == ["3", "2", "1"]
    assert "000002 (rank 0: __0_0.distcp: the checksum does not match)" in others[1]
    assert contents(folder) == before


def test_an_interrupt_or_a_lack_of_memory_is_no_damage(make, monkeypatch, tmp_path):
    """Otherwise the run would resume from an older checkpoint and remove this one."""
    make().save(1, 2)
    before = contents(tmp_path)

    for cause in (KeyboardInterrupt(), RuntimeError("out of memory")):

        def fail(*_, cause=cause):
            raise cause

        monkeypatch.setattr(sharded_checkpointer.FileSystemReader, "read_data", fail)
        with pytest.raises(CheckpointException, match="memory|KeyboardInterrupt"):
            make(seed=1).load()
    assert contents(tmp_path) == before


def test_checkpoints_in_one_file_each_are_refused(make, capsys, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-000000004.pt").write_text("of stage 12")
    with pytest.raises(SystemExit, match="^2$"):
        make().load()
    line, others = error_line(capsys)
    assert f"{folder} has checkpoints in one file each" in line and not others
    assert names(folder) == {"step-000000004.pt"}


def test_save_is_an_error_since_it_would_write_no_weights(make, tmp_path):
    training = make()
    training.save(1)
    before = contents(tmp_path)
    with pytest.raises(TypeError, match=r"dcp\.save\(.*with ckpt\.saving\("):
        training.ckpt.save(2, SUMS)
    assert contents(tmp_path) == before


def test_other_flags_are_refused(make, capsys, tmp_path):
    make().save(1)
    before = contents(tmp_path)
    with pytest.raises(SystemExit, match="^2$"):
        make(width=24).load()
    line, others = error_line(capsys)
    assert "was written with --width 20, not 24; use the same flags" in line
    assert not others and contents(tmp_path) == before


def test_a_converted_checkpoint_has_the_weights_by_their_names(
    make, monkeypatch, tmp_path
):
    training, file = make(), tmp_path / "converted.pt"
    training.save(1)
    module = "torch.distributed.checkpoint.format_utils"
    arguments = ["dcp_to_torch", str(training.ckpt.paths()[0]), str(file)]
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    weights = torch.load(file, weights_only=True)["model"]
    model = GPT(256, 8, 20, 1, 2)
    model.load_state_dict(weights)
    assert same(model.parameters(), training.state())


@BOTH
def test_on_a_full_disk_the_earlier_checkpoint_survives(
    async_save, make, capsys, tmp_path
):
    training = make(async_save=async_save)
    saved = training.save(1)
    training.ckpt.wait()
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, size in ((2, 100_000), (3, 3_000)):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            training.save(step)
            training.ckpt.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (line,) = capsys.readouterr().err.splitlines()
        pattern = rf"step-{step:09}: checkpoint not written \(rank 0: .+\)"
        assert re.fullmatch(pattern, line)
        assert contents(tmp_path) == before
        assert names(tmp_path / "checkpoints") == {"step-000000001"}
    assert same(make(seed=1).load(), saved)
    training.save(4)
    training.ckpt.wait()
    assert steps_in(training) == [4, 1]


def num_tensors():
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_a_failed_async_save_keeps_no_copy_of_the_state(make, monkeypatch, capsys):
    training = make(async_save=True)
    training.save(1)
    training.ckpt.wait()

    def fail(*_):
        raise OSError("cannot")

    monkeypatch.setattr(sharded_checkpointer.FileSystemWriter, "write_data", fail)
    gc.collect()
    gc.disable()
    try:
        before = num_tensors()
        for step in (2, 3, 4):
            training.script.save_checkpoint(training.args, training.ckpt, step, SUMS)
            training.ckpt.wait()
        assert num_tensors() <= before
    finally:
        gc.enable()
    assert capsys.readouterr().err.count("(rank 0: cannot)") == 3


@BOTH
def test_shards_that_rank_0_cannot_see_are_no_checkpoint(
    async_save, make, monkeypatch, capsys, tmp_path
):
    """Otherwise it would remove the older ones, and nobody could resume."""
    training = make(async_save=async_save)
    saved = training.save(1)
    training.ckpt.wait()
    before = contents(tmp_path)
    finish = sharded_checkpointer.FileSystemWriter.finish

    def on_another_disk(writer, *args, **options):
        (writer.path / "__0_0.distcp").unlink()
        return finish(writer, *args, **options)

    monkeypatch.setattr(
        sharded_checkpointer.FileSystemWriter, "finish", on_another_disk
    )
    training.save(2)
    training.ckpt.wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step-000000002: checkpoint not written (rank 0: ")
    assert line.endswith("__0_0.distcp must be on a disk that every node sees)")
    assert contents(tmp_path) == before
    assert names(tmp_path / "checkpoints") == {"step-000000001"}
    assert same(make(seed=1).load(), saved)


def test_another_version_of_torch(make, monkeypatch, capsys, tmp_path):
    """A warning; one that cannot read the checkpoint says so."""
    first = make()
    first.ckpt.circumstances["torch_version"] = "2.0.1"
    saved = first.save(1)
    path = tmp_path / "checkpoints/step-000000001"
    assert same(make(seed=1).load(), saved)
    warning = f"{path} was written with torch_version 2.0.1, not {torch.__version__}"
    assert capsys.readouterr().err == f"warning: {warning}\n"
    before = contents(tmp_path)

    def unknown(*_):
        raise AttributeError("no such class")

    monkeypatch.setattr(sharded_checkpointer.FileSystemReader, "read_metadata", unknown)
    with pytest.raises(SystemExit, match="^2$"):
        make(seed=1).load()
    line, _ = error_line(capsys)
    ours = f"torch {torch.__version__} cannot read it (AttributeError: no such class)"
    assert f"{path} was written with torch 2.0.1, and {ours}" in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["checksum", "remove"])
def test_a_failure_of_rank_0_alone(name, make, monkeypatch, capsys, tmp_path):
    """After the others have written, and when a corrupt checkpoint is replaced."""
    training = make()
    training.save(1, 2)
    truncated(tmp_path / "checkpoints/step-000000002/rest.pt")
    before = contents(tmp_path)
    original, paths = getattr(sharded_checkpointer, name), []

    def fail(path):
        paths.append(path)
        if path.name in (".metadata", "step-000000002"):
            raise OSError("cannot")
        return original(path)

    monkeypatch.setattr(sharded_checkpointer, name, fail)
    training.save(2)
    assert paths
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "step-000000002: checkpoint not written (rank 0: cannot)"
    assert contents(tmp_path) == before


# ---- runs that are killed ------------------------------------------------------------
def make_run(folder, device, *flags, processes=2):
    return Run(STAGE, folder, device, *WORK.flags, *flags, processes=processes)


# Before which event a rank is killed, in one start after the other: of a file that is
# opened, of the new name of one that is renamed, or of a folder that is removed.
KILLS = [
    ("os.rename", "*/step-*", 2),  # the second checkpoint is there, except for its name
    ("open", "*/checkpoints", 2),  # it has its name, which may not be on the disk yet
    ("shutil.rmtree", "*.removed.tmp", 1),
]
MORE_KILLS = [
    ("open", "*/__1_0.distcp", 1),  # rank 1 has written nothing
    ("open", "*/__0_0.distcp", 2),  # written, and about to be read for its checksum
    ("os.rename", "*/.metadata", 1),
    ("os.rename", "*/rest.pt", 1),
    ("os.rename", "*/step-*", 1),
    ("open", "*/checkpoints", 1),
    ("os.rename", "*.removed.tmp", 1),  # an old one is about to be removed
]


@pytest.mark.parametrize(
    "kills, flags",
    [
        (KILLS, ()),
        (KILLS, ("--async-save",)),
        only_in_sweep(MORE_KILLS, ()),
        only_in_sweep(MORE_KILLS, ("--async-save",)),
    ],
    ids=["few", "few_async", "many", "many_async"],
)
def test_kills_while_a_checkpoint_is_written(
    kills, flags, trained, two, device, tmp_path
):
    """What has a checkpoint's name is complete, and no bit of the result differs."""
    run = make_run(tmp_path, device, *SHORT, *EVERY_4, *flags, processes=two)
    for event, pattern, call in kills:
        kill = functools.partial(signalled_at_file, event, pattern, call=call)
        done = run.run(code=None, prepare=kill)
        assert -signal.SIGKILL in exit_codes(done), (event, pattern)
        assert resumed_from(done.stdout) in ([], [run.step])
        assert run.latest() >= run.step
        for path in run.paths():
            assert_complete(path)
    run.run()
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two, *SHORT, *WORK.flags))
    run.assert_no_step_is_lost_or_doubled(20)
    assert names(run.checkpoint_dir) == {"step-000000016", "step-000000020"}


@pytest.mark.parametrize(
    "flags",
    [only_in_sweep(()), ("--async-save",)],
    ids=["save", "async_save"],
)
def test_a_run_resumes_on_one_number_of_processes_after_another(
    flags, trained, device, tmp_path
):
    """The first is stopped, the others are killed; they differ by rounding only."""
    if 4 not in counts(device):
        pytest.skip("4 processes need as many GPUs")
    before = 0
    # Of an asynchronous save in step 12 there may be nothing when step 15 is killed.
    for processes, step, name, latest in (
        (2, 6, "SIGTERM", {7}),
        (3, 11, "SIGKILL", {10}),
        (1, 15, "SIGKILL", {10, 12} if flags else {12}),
        (4, None, None, {20}),
    ):
        options = (*DOUBLE, *EVERY_4, *flags)
        run = make_run(tmp_path, device, *options, processes=processes)
        done = run.stop(step, name) if step else run.run()
        assert resumed_from(done.stdout) == ([before] if before else [])
        before = run.latest()
        assert before in latest
    whole = uninterrupted(trained, BEFORE, 1, *DOUBLE, *WORK.flags)
    assert max_abs_diff(run.out_dir / "last.pt", whole.weights) <= 1e-10
    run.assert_no_step_is_lost_or_doubled(20)


@pytest.mark.fault(
    since="sharded_checkpoints",
    what="one rank cannot write its shards because its disk is full",
    sees="`step-...: checkpoint not written (rank 1: ...)`; the training continues",
    seconds=60,
    lost="nothing: the earlier checkpoints stay, and nothing is left of this one",
)
@pytest.mark.parametrize(
    "flags",
    [only_in_sweep(()), ("--async-save",)],
    ids=["save", "async_save"],
)
def test_rank_1_alone_cannot_write(flags, trained, two, device, tmp_path, fault):
    """Then no rank has written a checkpoint; training continues."""
    run = make_run(tmp_path, device, *SHORT, *EVERY_4, *flags, processes=two)
    run.stop(5, "SIGTERM")
    assert run.steps() == [6, 4]
    before = run.files()
    prepare = functools.partial(no_large_files, 100_000, ranks=["1"])
    rank_0, rank_1 = run.run(prepare=prepare).ranks
    fault.assert_seen(rank_0.stderr)
    pattern = r"^step-(\d{9}): checkpoint not written \(rank 1: .+\)$"
    failed = [int(step) for step in re.findall(pattern, rank_0.stderr, re.M)]
    assert failed == [8, 10, 12, 16, 20]
    assert not rank_1.stderr
    assert run.files() == before
    assert names(run.checkpoint_dir) == {path.name for path in run.paths()}
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two, *SHORT, *WORK.flags))


@pytest.mark.fault(
    since="sharded_checkpoints",
    what="a file of the latest checkpoint is corrupt or missing",
    sees="`skipping corrupt checkpoint ...step-... (rank ...)`; all ranks resume from"
    " the checkpoint before",
    seconds=60,
    lost="the steps between the two, which are done again",
)
def test_a_shard_that_only_rank_1_reads_is_damaged(two, device, tmp_path, fault):
    """All ranks skip the checkpoint together."""
    run = make_run(tmp_path, device, *SHORT, *EVERY_4, processes=two)
    run.stop(7, "SIGTERM")
    latest, older = run.paths()
    with_a_bit_flipped(latest / "__1_0.distcp")
    first_step = functools.partial(signalled, 1, "SIGTERM")
    rank_0, rank_1 = run.run(code=128 + signal.SIGTERM, prepare=first_step).ranks
    fault.assert_seen(rank_0.stderr)
    assert resumed_from(rank_0.stdout) == [step_of(older)] == [4]
    (line,) = [line for line in rank_0.stderr.splitlines() if "step-" in line]
    why = r"\(rank \d: __1_0.distcp: the checksum does not match\)"
    assert re.fullmatch(rf"skipping corrupt checkpoint {latest} {why}", line)
    assert not rank_1.stderr
    for path in run.paths():
        with_a_bit_flipped(path / ".metadata")
    before = run.files()
    for one in run.run(code=2).ranks:
        *skipped, line = one.stderr.splitlines()
        one.stderr = line
        assert_one_error_line(one, "no checkpoint can be read, not even")
    assert run.files() == before


@pytest.mark.sweep
def test_a_rank_that_does_not_see_the_checkpoints(two, device, tmp_path):
    run = make_run(tmp_path, device, *SHORT, *EVERY_4, processes=two)
    run.stop(5, "SIGTERM")
    before = run.files()
    hide = functools.partial(hide_checkpoints, "1")
    rank_0, rank_1 = run.run(code=None, prepare=hide).ranks
    seen = f"{run.paths()[0]} must be on a disk that every node sees"
    assert_one_error_line(rank_1, seen)
    assert rank_0.returncode == 1  # its connection broke
    assert run.files() == before


def test_a_signal_waits_for_the_save_that_goes_on(two, device, tmp_path):
    """A launcher would take the first end for a failure, and kill the other rank."""
    run = make_run(tmp_path, device, *SHORT, *NEVER, "--async-save", processes=two)
    slow = functools.partial(slow_to_write, 0.5)
    stop = functools.partial(signalled, 5, "SIGTERM")
    run.run(code=128 + signal.SIGTERM, prepare=functools.partial(call_all, slow, stop))
    assert names(run.checkpoint_dir) == {"step-000000006"}
    assert_complete(run.paths()[0])


def test_ranks_that_fail_end_after_the_save_that_goes_on(two, device, tmp_path):
    flags = (*SHORT, *EVERY_4, "--async-save")
    run = make_run(tmp_path, device, *flags, processes=two)
    slow = functools.partial(slow_to_write, 0.5)
    failing = functools.partial(nan_logits, 5)
    done = run.run(code=1, prepare=functools.partial(call_all, slow, failing))
    assert "FloatingPointError: rank 1, step 5: " in done.ranks[1].stderr
    assert names(run.checkpoint_dir) == {"step-000000004"}
    assert_complete(run.paths()[0])


def test_a_rank_that_is_killed_while_it_loads_ends_the_other(two, device, tmp_path):
    """The checkpoint stays the latest: it is not taken for a corrupt one."""
    run = make_run(tmp_path, device, *SHORT, *EVERY_4, processes=two)
    run.stop(5, "SIGTERM")
    before = run.files()
    reads_shards = functools.partial(signalled_at_file, "open", "*.distcp", ranks=["1"])
    done = run.run(code=None, prepare=reads_shards)
    assert exit_codes(done) == [1, -signal.SIGKILL]
    assert "skipping" not in done.stderr
    assert run.files() == before


def test_a_checkpoint_before_the_first_optimizer_step(two, device, tmp_path):
    """The first step overflows in fp16; the weights are those of stage 12, too."""
    flags = (*WORK.flags, "--amp", "fp16", "--epochs", "1", "--device", device)
    overflow = functools.partial(infinite_gradient, 1)
    own = [*flags, "--out-dir", tmp_path / "before"]
    run_stage(BEFORE, two, own, tmp_path / "screens", prepare=overflow)
    flags = (*flags, "--checkpoint-every", "1")
    run = Run(STAGE, tmp_path, device, *flags, processes=two)
    kill = functools.partial(signalled, 1, "SIGKILL")  # in step 2: step 1 is skipped
    run.run(code=None, prepare=functools.partial(call_all, overflow, kill))
    assert run.steps() == [1]
    assert read_state(run.paths()[0])["scheduler"]["last_epoch"] == 0
    assert resumed_from(run.run().stdout) == [1]
    weights = tmp_path / "before/last.pt"
    assert max_abs_diff(run.out_dir / "last.pt", weights) == 0


# ---- a model without memory, and activations that are computed again -----------------
@pytest.fixture(scope="module")
def weights(several, device, tmp_path_factory):
    """A file of weights of this stage, and what each rank printed while it trained."""
    folder = tmp_path_factory.mktemp("weights")
    flags = [*WORK.flags, "--epochs", "1", "--device", device, "--sample", "0"]
    flags += ["--out-dir", folder / "out"]
    prepare = devices_of_weights_printed
    done = run_stage(STAGE, several, flags, folder, prepare=prepare)
    return folder / "out/last.pt", done.ranks


def test_only_rank_0_has_whole_weights(weights, two):
    _, done = weights
    devices = [one.stdout.splitlines()[0] for one in done]
    assert devices == ["weights on cpu", *["weights on meta"] * (two - 1)]


def of_another_model(path):
    torch.save(GPT(256, 8, 20, 2, 2).state_dict(), path)


def of_another_dictionary(path):
    torch.save({"weight": torch.zeros(3), "model": {"a": 1}}, path)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:100_000])


DAMAGED = {
    cut_off: "is missing, truncated or not a file of weights",
    of_another_model: "holds another model's weights",
    of_another_dictionary: "holds another model's weights",
}


@pytest.mark.parametrize(
    "damage, processes",
    [only_in_sweep(d, n, unless=n == 2) for d in DAMAGED for n in (1, 2, 3)],
)
def test_evaluate_refuses_other_files(damage, processes, weights, device, tmp_path):
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    path = shutil.copy(weights[0], tmp_path / "weights.pt")
    damage(path)
    flags = [*WORK.flags, "--evaluate", path, "--device", device]
    for one in run_stage(STAGE, processes, flags, tmp_path, code=2).ranks:
        assert_one_error_line(one, f"--evaluate: {path} {DAMAGED[damage]}")


def test_evaluate_gives_the_metrics_of_the_training(weights, two, device, tmp_path):
    path, (training, *_) = weights
    flags = [*WORK.flags, "--evaluate", path, "--device", device]
    rank_0, rank_1 = run_stage(STAGE, two, flags, tmp_path).ranks
    val = re.search("^epoch 1: .*(val .*)$", training.stdout, re.M)[1]
    assert (rank_0.stdout, rank_1.stdout) == (f"{val}\n", "")
    assert rank_1.stderr == ""


@pytest.mark.parametrize("keep_unsharded", [False, only_in_sweep(True)])
def test_activations_are_computed_again(keep_unsharded, tmp_path):
    """No bit of the weights differs, less is kept, and the same is exchanged."""
    seen = []
    for again in (False, True):
        folder = tmp_path / str(again)
        folder.mkdir()
        options = {"activation_checkpointing": again}
        options["keep_unsharded"] = keep_unsharded
        take_steps = functools.partial(fsdp_ranks.take_steps, **options)
        calls = [(take_steps, rank, 2, folder, STAGE) for rank in range(2)]
        call_in_forks(fsdp_ranks.in_group, calls)
        seen.append([torch.load(folder / f"{rank}.pt") for rank in range(2)])
    for kept, again in zip(*seen, strict=True):
        assert kept["norms"] == again["norms"]
        for name, weight in kept["weights"].items():
            assert torch.equal(weight, again["weights"][name])
        assert again["saved"] < kept["saved"] / 3
        assert kept["collectives"] == again["collectives"]
