"""Checkpointer alone: what it saves, finds, refuses and removes. No stage is run."""

import errno
import itertools
import multiprocessing
import os
import random
import re
import resource
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from common import checkpoint
from common import checkpointer
from common.checkpointer import HARMLESS_FLAGS
from common.checkpointer import PARTS
from common.checkpointer import Checkpointer
from tests.resume_harness import step_of
from tests.training import load_stage
from tools.stages import features
from tools.stages import with_feature

COMPARED_FLAGS = {
    *("epochs", "batch_size", "lr", "weight_decay", "seed", "dtype", "amp"),
    *("clip_grad", "tf32", "deterministic"),
}
COMPARED_WITH_IMAGES = {
    *("data", "image_size", "images", "arch", "pretrained", "memory_format"),
    "sync_bn",
}
COMPARED_WITH_TEXT = {"text_file", "context_length", "width", "depth", "heads"}
COMPARED_WITH_SHARDS = {"keep_unsharded"}
ONLY_WITH_IMAGES, ONLY_WITH_TEXT = {"data_dir", "download"}, {"sample"}
ONLY_WITH_FOLDERS = {"activation_checkpointing", "async_save"}
SUMS = torch.arange(8, dtype=torch.float64).reshape(2, 4)


def make(folder, size=10, images=100, keep=2, **flags):
    """Return a Checkpointer of four layers, which stand for a run's model and so on."""
    args = types.SimpleNamespace(
        checkpoint_dir=folder,
        keep_checkpoints=keep,
        device=torch.device("cpu"),
        **flags,
    )
    loader = types.SimpleNamespace(dataset=range(images))
    return Checkpointer(args, loader, *(nn.Linear(size, size) for _ in PARTS))


def steps_in(ckpt):
    """Return the steps of the checkpoints, the latest first."""
    return [step_of(path) for path in ckpt.paths()]


def error_line(capsys):
    """Return the only line on standard error, which is that of a wrong flag."""
    (line,) = capsys.readouterr().err.splitlines()
    name = os.path.basename(sys.argv[0])  # noqa: PTH119 (as a program sees its name)
    assert line.startswith(f"{name}: error: --checkpoint-dir: ")
    return line


# ---- save and restore ----------------------------------------------------------------
def test_what_was_saved_is_restored(tmp_path):
    first, second = make(tmp_path / "new/folder"), make(tmp_path / "new/folder")
    first.save(7, SUMS)
    second.restore(second.load(second.find_latest()))
    assert second.step == 7
    assert torch.equal(second.sums, SUMS) and second.sums.dtype == torch.float64
    for name in PARTS:
        saved, restored = first.parts[name], second.parts[name]
        assert saved is not restored
        assert torch.equal(saved.weight, restored.weight)
        assert torch.equal(saved.bias, restored.bias)
    assert not torch.equal(first.parts["model"].weight, first.parts["scaler"].weight)


def test_a_process_that_does_not_write_asks_for_the_state_all_the_same(tmp_path):
    """Since each process may have a part of it, which it hands over then."""
    first, second = make(tmp_path), make(tmp_path)
    asked = []
    for name in PARTS:
        second.parts[name].state_dict = lambda name=name: asked.append(name)
    first.save(7, SUMS)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    second.save(8, SUMS, write=False)
    assert asked == list(PARTS)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert second.minutes_since_save() < 1


def test_without_checkpoint_dir_nothing_is_saved_or_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ckpt = make(None)
    ckpt.save(7, SUMS)
    assert list(tmp_path.iterdir()) == []
    assert ckpt.find_latest() is None
    ckpt.restore(ckpt.load(None))
    assert (ckpt.step, ckpt.sums) == (0, None)


@pytest.mark.parametrize(
    "step, epoch, done",
    [(0, 1, 0), (1, 1, 1), (24, 1, 24), (25, 1, 25), (26, 2, 1), (50, 2, 25)],
)
def test_an_epoch_of_25_steps_is_resumed_where_it_stopped(step, epoch, done):
    """A run that stopped after an epoch's last step resumes with its evaluation."""
    ckpt = make(None)
    ckpt.step = step
    assert ckpt.first_epoch(25) == epoch
    assert ckpt.steps_done(epoch, 25) == done
    assert ckpt.steps_done(epoch + 1, 25) == 0


def test_minutes_since_save(tmp_path, monkeypatch):
    clock = iter([60.0, 60.0, 240.0, 300.0, 330.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    ckpt = make(tmp_path)
    assert ckpt.minutes_since_save() == 0
    assert ckpt.minutes_since_save() == 3
    ckpt.save(1, SUMS)
    assert ckpt.minutes_since_save() == 0.5


# ---- which ones are kept -------------------------------------------------------------
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_latest_are_kept(keep, tmp_path):
    steps = (1, 2, 3, 9, 10, 11, 100, 99999)
    ckpt = make(tmp_path, keep=keep)
    for number, step in enumerate(steps, start=1):
        ckpt.save(step, SUMS)
        latest = sorted(steps[:number], reverse=True)
        assert steps_in(ckpt) == latest[:keep]
    assert len(list(tmp_path.iterdir())) == keep


def test_what_a_kill_before_the_pruning_left_is_removed_when_the_run_resumes(tmp_path):
    """By the process that looked for the latest, and by no other."""
    before = make(tmp_path, keep=3)
    for step in (1, 2, 3):
        before.save(step, SUMS)
    (tmp_path / ".step-000000004.pt.1.tmp").touch()
    first, second = make(tmp_path, keep=2), make(tmp_path, keep=2)
    path = first.find_latest()
    second.restore(second.load(path))
    assert steps_in(before) == [3, 2, 1]
    first.restore(first.load(path))
    assert steps_in(before) == [3, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_one_that_could_not_be_read_stays_until_a_later_step_is_saved(tmp_path):
    """It may be valid: perhaps only a read failed. It is not one of those to keep."""
    ckpt = make(tmp_path)
    for step in (40, 50, 60):
        ckpt.save(step, SUMS)
    latest, older = ckpt.paths()
    latest.write_bytes(b"")
    assert ckpt.find_latest() == older
    ckpt.restore(ckpt.load(older))
    assert steps_in(ckpt) == [60, 50]
    ckpt.save(55, SUMS)
    assert steps_in(ckpt) == [60, 55, 50]
    ckpt.save(65, SUMS)
    assert steps_in(ckpt) == [65, 55]


def test_what_cannot_be_removed_is_named_and_the_rest_is_removed(
    tmp_path, monkeypatch, capsys
):
    ckpt = make(tmp_path, keep=1)
    unlink = Path.unlink

    def fail(path, **options):
        if path.name == "step-000000001.pt":
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", fail)
    for step in (1, 2, 3):
        ckpt.save(step, SUMS)
    assert steps_in(ckpt) == [3, 1]
    line = f"{ckpt.paths()[1]} cannot be removed (Permission denied)"
    assert capsys.readouterr().err.splitlines() == [line, line]


# ---- other flags ---------------------------------------------------------------------
@pytest.mark.parametrize("stage", with_feature("signals"))
def test_every_flag_is_compared_unless_it_is_harmless(
    stage, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "argv", ["train.py", "--checkpoint-dir", "checkpoints"])
    module = load_stage(stage)
    args = module.parse_args()
    if "text" in features(stage):
        compared = COMPARED_FLAGS | COMPARED_WITH_TEXT
        if "shards" in features(stage):
            compared = compared | COMPARED_WITH_SHARDS
        harmless = HARMLESS_FLAGS - ONLY_WITH_IMAGES
    else:
        compared = COMPARED_FLAGS | COMPARED_WITH_IMAGES
        harmless = HARMLESS_FLAGS - ONLY_WITH_TEXT
    if "sharded_checkpoints" not in features(stage):
        harmless = harmless - ONLY_WITH_FOLDERS
    assert vars(args).keys() == harmless | compared
    assert HARMLESS_FLAGS.isdisjoint(compared)
    path = tmp_path / "step-000000007.pt"
    make(tmp_path).save(7, SUMS)
    state = checkpointer.read(path)
    loader = types.SimpleNamespace(dataset=range(100))
    parts = [nn.Linear(10, 10) for _ in PARTS]
    checkpoint.save(state | {"flags": Checkpointer(args, loader, *parts).flags}, path)
    for name, value in vars(args).items():
        other = types.SimpleNamespace(**{**vars(args), name: "another"})
        ckpt = Checkpointer(other, loader, *parts)
        if name in HARMLESS_FLAGS:
            assert ckpt.load(path)["step"] == 7
            continue
        with pytest.raises(SystemExit, match="^2$"):
            ckpt.load(path)
        flag = f"--{name.replace('_', '-')}"
        line = error_line(capsys)
        assert f"{path} was written with {flag} {value}, not another; " in line


@pytest.mark.parametrize(
    "old, new",
    [({}, {"nesterov": True}), ({"nesterov": True}, {}), ({"nesterov": None}, {})],
    ids=["added", "removed", "without_a_value_and_removed"],
)
def test_checkpoints_stay_valid_when_a_script_gains_or_loses_a_flag(
    old, new, tmp_path, capsys
):
    path = tmp_path / "step-000000007.pt"
    make(tmp_path, lr=0.1, **old).save(7, SUMS)
    assert make(tmp_path, lr=0.1, **new).load(path)["step"] == 7
    with pytest.raises(SystemExit, match="^2$"):
        make(tmp_path, lr=0.2, **new).load(path)
    assert "was written with --lr 0.1, not 0.2; use the same" in error_line(capsys)


def test_a_flag_with_a_value_in_one_run_alone_is_compared(tmp_path, capsys):
    path = tmp_path / "step-000000007.pt"
    for old, new in ((None, 1.0), (1.0, None)):
        make(tmp_path, clip_grad=old).save(7, SUMS)
        with pytest.raises(SystemExit, match="^2$"):
            make(tmp_path, clip_grad=new).load(path)
        words = f"was written with --clip-grad {old}, not {new}; use the same flags"
        assert words in error_line(capsys)


def test_another_data_set_or_torch_version_is_a_warning(tmp_path, capsys):
    saved = make(tmp_path)
    saved.save(7, SUMS)
    saved.circumstances = {"num_samples": 90, "torch_version": "2.0.0"}
    saved.save(8, SUMS)
    older, latest = reversed(saved.paths())
    assert make(tmp_path / "none").find_latest() is None
    for ckpt, path, differing in (
        (
            make(tmp_path),
            latest,
            {"num_samples": "90, not 100", "torch_version": "2.0"},
        ),
        (make(tmp_path, images=90), latest, {"torch_version": "2.0.0, not "}),
        (make(tmp_path), older, {}),
        (make(tmp_path, images=99), older, {"num_samples": "100, not 99"}),
    ):
        if path == older:
            latest.unlink(missing_ok=True)
        assert ckpt.find_latest() == path
        screen = capsys.readouterr().err
        assert len(screen.splitlines()) == len(differing)
        for name, words in differing.items():
            assert f"warning: {path} was written with {name} {words}" in screen
        assert ckpt.load(path)["step"] == step_of(path)
        assert capsys.readouterr().err == ""  # load runs on every rank


# ---- corrupt files and others --------------------------------------------------------
def truncated(path, good):
    content = good.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def with_a_byte_flipped(path, good):
    """The byte is one of the largest tensor's, which torch.load does not notice."""
    with zipfile.ZipFile(good) as file:
        largest = max(file.infolist(), key=lambda info: info.file_size)
    content = bytearray(good.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)
    assert checkpoint.load(path).keys() == checkpoint.load(good).keys()


def of_weights(path, good):  # noqa: ARG001 (all of these have the same parameters)
    torch.save(nn.Linear(3, 2).state_dict(), path)


def of_a_tensor(path, good):  # noqa: ARG001
    torch.save(torch.zeros(3), path)


def in_the_old_format(path, good):
    state = checkpoint.load(good)
    torch.save(state, path, _use_new_zipfile_serialization=False)


def of_text(path, good):  # noqa: ARG001
    path.write_text("not a checkpoint")


def empty(path, good):  # noqa: ARG001
    path.write_bytes(b"")


class Spy:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def that_runs_code(path, good):
    torch.save({**checkpoint.load(good), "step": Spy(path.parent / "was-run")}, path)


UNREADABLE = [
    truncated,
    with_a_byte_flipped,
    of_weights,
    of_a_tensor,
    in_the_old_format,
    of_text,
    empty,
    that_runs_code,
]


@pytest.mark.parametrize("damage", UNREADABLE)
def test_an_unreadable_file_is_a_value_error(damage, tmp_path):
    make(tmp_path / "good", size=100).save(98, SUMS)
    path = tmp_path / "step-000000099.pt"
    damage(path, tmp_path / "good/step-000000098.pt")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} \([^\n]+\)$"):
        checkpointer.read(path)
    assert not (tmp_path / "was-run").exists()


def test_a_pickle_that_would_run_code_runs_it_if_torch_lets_it(tmp_path):
    """Otherwise the test above would prove nothing."""
    make(tmp_path).save(1, SUMS)
    path = tmp_path / "spy.pt"
    that_runs_code(path, tmp_path / "step-000000001.pt")
    torch.load(path, weights_only=False)
    assert (tmp_path / "was-run").exists()


def test_unreadable_ones_are_skipped_and_then_removed(tmp_path, capsys):
    ckpt = make(tmp_path, size=100)
    ckpt.save(12, SUMS)
    (good,) = ckpt.paths()
    files = []
    for step, damage in enumerate(UNREADABLE, start=20):
        files.append(tmp_path / f"step-{step:09}.pt")
        damage(files[-1], good)
    assert ckpt.find_latest() == good
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(UNREADABLE)
    for path, line in zip(reversed(files), lines, strict=True):
        assert line.startswith(f"skipping corrupt checkpoint {path} (")
    ckpt.save(13, SUMS)
    assert steps_in(ckpt)[-2:] == [13, 12]
    assert len(steps_in(ckpt)) == 2 + len(UNREADABLE)
    ckpt.save(99, SUMS)
    assert steps_in(ckpt) == [99, 13]


def test_if_none_can_be_read_the_line_says_why(tmp_path, capsys):
    latest, older = tmp_path / "step-000000002.pt", tmp_path / "step-000000001.pt"
    of_text(older, None)
    empty(latest, None)
    ckpt = make(tmp_path)
    assert ckpt.find_latest() == latest
    assert capsys.readouterr().err.count("skipping corrupt checkpoint") == 2
    with pytest.raises(SystemExit, match="^2$"):
        ckpt.load(latest)
    assert f"no checkpoint can be read, not even {latest} (" in error_line(capsys)


def test_a_checkpoint_that_this_process_cannot_see(tmp_path, capsys):
    path = tmp_path / "step-000000002.pt"
    with pytest.raises(SystemExit, match="^2$"):
        make(tmp_path).load(path)
    assert f"{path} must be on a disk that every node sees" in error_line(capsys)


def test_sharded_checkpoints_are_refused(tmp_path, capsys):
    folder = tmp_path / "step-000000004"
    folder.mkdir()
    (folder / ".metadata").write_text("of a later stage")
    ckpt = make(tmp_path)
    with pytest.raises(SystemExit, match="^2$"):
        ckpt.load(ckpt.find_latest())
    assert f"{tmp_path} has sharded checkpoints" in error_line(capsys)
    assert [*folder.iterdir()] == [folder / ".metadata"]


# ---- writing -------------------------------------------------------------------------
def test_on_a_full_disk_the_earlier_checkpoint_survives(tmp_path, capsys):
    make(tmp_path).save(7, SUMS)
    content = (tmp_path / "step-000000007.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content), limits[1]))
        make(tmp_path, size=100).save(8, SUMS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"step 8: checkpoint not written \(.+\)", line)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [content]
    make(tmp_path).save(9, SUMS)
    assert [step_of(path) for path in make(tmp_path).paths()] == [9, 7]


def save_endlessly(ckpt, step):
    for number in itertools.count(step + 1):
        ckpt.save(number, SUMS)


def test_at_whatever_moment_a_save_is_killed_a_checkpoint_is_left(tmp_path):
    """Thirty kills; a checkpoint has three megabytes."""
    draw, latest, num_torn = random.Random(5), 0, 0
    ckpt = make(tmp_path, size=450)
    fork = multiprocessing.get_context("fork")
    for _ in range(30):
        child = fork.Process(target=save_endlessly, args=(ckpt, latest))
        child.start()
        time.sleep(delay := draw.uniform(0, 0.05))
        child.kill()
        child.join()
        found = [checkpointer.read(path)["step"] for path in ckpt.paths()]
        assert latest == 0 or found, delay
        if found:
            assert found[0] >= latest, delay
            assert found[:2] == [found[0], found[0] - 1][: len(found)], delay
            latest = found[0]
        num_torn += any(tmp_path.glob(".step-*.tmp"))
    assert latest > 5
    assert num_torn > 3
    ckpt.save(latest + 1, SUMS)
    names = {f"step-{step:09}.pt" for step in (latest, latest + 1)}
    assert {path.name for path in tmp_path.iterdir()} == names
