"""docs/faults.md: a checkpoint that is corrupt or not of the run is not loaded.

Nor is anything removed or overwritten that is not the run's own. These are the promises
of common/checkpoint.py, without a run; test_resume.py has the runs.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import stat
import time
import zipfile

import psutil
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from common import checkpoint
from common import weights
from common.text import TextWindows
from harness import commands
from tests.resume_harness import step_of

IDENTITY = {"flags": {"lr": "0.1", "seed": "0"}, "data": "f7"}


def state_of(step, size=10):
    """Return what stands for the state of a run after a step."""
    weight = torch.full((size, size), float(step))
    return {"model": {"weight": weight}, "identity": IDENTITY, "step": step}


def save(folder, *steps, keep=2, size=10):
    """Save a checkpoint of each of these steps; return the path of the last."""
    for step in steps:
        checkpoint.save(folder, step, state_of(step, size), keep)
    return folder / f"{checkpoint.name(steps[-1])}.pt"


def save_folder(folder, step, keep=2):
    """Save a checkpoint that is a folder, as a script with shards does."""
    path = folder / checkpoint.name(step)
    unfinished = path.with_name(f".{path.name}.tmp")
    checkpoint.remove_unfinished(folder)
    dcp.save(state_of(step), checkpoint_id=unfinished, no_dist=True)
    checkpoint.publish(unfinished, path, IDENTITY, keep)
    return path


def steps_in(folder, sharded=False):
    """Return the steps of the checkpoints, the latest first."""
    return [step_of(path) for path in checkpoint.find(folder, sharded)]


def names(folder):
    return {path.name for path in folder.iterdir()}


# ---- one file each -------------------------------------------------------------------
each_kind = pytest.mark.parametrize("sharded", [False, True], ids=["files", "folders"])


@each_kind
def test_the_latest_are_kept(sharded, tmp_path):
    keep, steps = 3, (1, 2, 9, 10, 100, 99999)
    for number, step in enumerate(steps, start=1):
        if sharded:
            save_folder(tmp_path, step, keep)
        else:
            save(tmp_path, step, keep=keep)
        latest = sorted(steps[:number], reverse=True)
        assert steps_in(tmp_path, sharded) == latest[:keep]
    assert len(names(tmp_path)) == keep


@each_kind
def test_what_killed_saves_have_left_is_removed(sharded, tmp_path):
    (tmp_path / ".step-000000004.pt.1.tmp").touch()
    (tmp_path / ".step-000000003.tmp").mkdir()
    (tmp_path / ".step-000000003.tmp/__3_0.distcp").touch()
    if sharded:
        save_folder(tmp_path, 5)
    else:
        save(tmp_path, 5)
    assert steps_in(tmp_path, sharded) == [5]
    assert not list(tmp_path.glob(".*"))


def test_one_that_was_skipped_stays_until_a_later_step_is_saved(tmp_path):
    """It may be valid: perhaps only a read failed."""
    save(tmp_path, 40, 50, 60)
    latest, _ = checkpoint.find(tmp_path)
    latest.write_bytes(b"")
    save(tmp_path, 55)
    assert steps_in(tmp_path) == [60, 55, 50]
    save(tmp_path, 65)
    assert steps_in(tmp_path) == [65, 60]


# ---- corrupt ones --------------------------------------------------------------------
def truncated(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def with_a_bit_flipped(path):
    """The bit is one of the largest tensor's, which torch.load does not notice."""
    with zipfile.ZipFile(path) as file:
        largest = max(file.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)


def with_a_folder_for_a_tensor(path):
    """One bit in the zip archive's directory: torch loads whatever the memory holds."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"archive/data/0") - 8] ^= 0x10  # an attribute of that part
    path.write_bytes(content)
    torch.load(path, weights_only=True)


def of_text(path):
    path.write_text("not a checkpoint")


class Spy:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def that_runs_code(path):
    torch.save({"step": Spy(path.parent / "was-run")}, path)


def of_weights(path):
    torch.save(nn.Linear(3, 2).state_dict(), path)


DAMAGES = [truncated, with_a_bit_flipped, with_a_folder_for_a_tensor]
DAMAGES += [of_text, that_runs_code, of_weights]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_file_is_not_loaded_and_one_line_says_why(damage, tmp_path):
    path = save(tmp_path, 1, size=100)
    damage(path)
    files = names(tmp_path)
    state, checksum, problem = checkpoint.load(path)
    assert state is checksum is None
    assert 5 < len(problem) < 120 and "\n" not in problem
    assert names(tmp_path) == files
    assert not (tmp_path / "was-run").exists()


def test_no_flipped_bit_loads_other_values(tmp_path, capsys):
    """It is noticed, or it is one that changes nothing, such as a date."""
    path = save(tmp_path, 1)
    good, (expected, *_) = path.read_bytes(), checkpoint.load(path)
    noticed = 0
    for place in range(0, len(good), 7):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        state, _, problem = checkpoint.load(path)
        if problem:
            noticed += 1
            continue
        assert state["step"] == 1, place
        weight = expected["model"]["weight"]
        assert torch.equal(state["model"]["weight"], weight), place
    assert noticed > len(good) / 7 / 4
    assert not capsys.readouterr().err


# ---- folders -------------------------------------------------------------------------
def test_an_unfinished_folder_is_no_checkpoint(tmp_path):
    path = save_folder(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".step-000000002.tmp")
    shutil.copytree(path, tmp_path / "step-000000003")
    (tmp_path / "step-000000003/.metadata").unlink()
    assert checkpoint.find(tmp_path, sharded=True) == [path]


def test_without_room_for_the_manifest_nothing_is_left(tmp_path, monkeypatch, capsys):
    """Otherwise a complete folder keeps its room, and blocks all later saves."""
    kept = save_folder(tmp_path, 1)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(weights, "write_atomically", refuse)
        save_folder(tmp_path, 2)
    line = "step 2: checkpoint not written ([Errno 28] No space left on device)\n"
    assert capsys.readouterr().err == line
    assert [*tmp_path.iterdir()] == [kept]
    save_folder(tmp_path, 3)
    assert steps_in(tmp_path, sharded=True) == [3, 1]


def test_an_interrupt_is_no_failure_of_a_checkpoint():
    """Otherwise Ctrl-C would make a run resume from an older one."""
    error = dcp.CheckpointException("load", {0: (KeyboardInterrupt(), None)})
    with pytest.raises(dcp.CheckpointException):
        checkpoint.reason(error)


# ---- whose it is ---------------------------------------------------------------------
def identity(text="0123456789", **flags):
    """Return the identity of a run on this text."""
    tokens = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return checkpoint.identity(flags, TextWindows(tokens, 2))


def test_checkpoints_stay_valid_when_a_script_gains_or_loses_a_flag():
    checkpoint.check(identity(lr=0.1, removed=1), identity(lr=0.1, added=2))


def without_manifest(path):
    (path / checkpoint.MANIFEST).unlink()


def without_metadata(path):
    (path / ".metadata").unlink()


def with_metadata_that_runs_code(path):
    spy = pickle.dumps(Spy(path.parent / "was-run"))
    (path / ".metadata").write_bytes(spy)


def with_flags_in_a_list(path):
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["digest"]
    manifest["identity"]["flags"] = ["lr"]
    manifest["digest"] = checkpoint.digest(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def with_a_deep_manifest(path):
    (path / checkpoint.MANIFEST).write_text("[" * 100_000)


@pytest.mark.parametrize(
    "damage, why",
    [
        (without_manifest, "it has no run.json"),
        (without_metadata, "it has no .metadata"),
        (with_metadata_that_runs_code, "its .metadata is not the one that run.json"),
        (with_a_deep_manifest, "its run.json cannot be read"),
        (with_flags_in_a_list, "its run.json is damaged, or of another program"),
    ],
)
def test_a_folder_that_is_not_of_a_run_is_not_read(damage, why, tmp_path):
    path = save_folder(tmp_path, 1)
    damage(path)
    found, digest, problem = checkpoint.read_manifest(path)
    assert found is digest is None
    assert problem.startswith(why) and "\n" not in problem
    assert not (tmp_path / "was-run").exists()


def test_no_flipped_bit_of_a_manifest_is_believed(tmp_path):
    """Otherwise a run is refused that could resume from an older checkpoint."""
    path = save_folder(tmp_path, 1)
    manifest = path / checkpoint.MANIFEST
    good = manifest.read_bytes()
    for place in range(len(good)):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        manifest.write_bytes(content)
        found, _, problem = checkpoint.read_manifest(path)
        assert problem or found == IDENTITY, place


# ---- one run in a folder -------------------------------------------------------------
def lock_and_wait(folder, answers):
    """Be rank 0 of a run: lock a folder, have a loader's worker, and wait."""
    problem = checkpoint.lock(folder)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,))
    worker.start()
    answers.send((problem, worker.pid))
    time.sleep(999)


def test_a_folder_is_for_one_run_until_its_rank_0_ends(tmp_path):
    """Also if that is killed, and its workers have not noticed yet."""
    folder = tmp_path / "new"
    commands.set_preloads()  # otherwise every later fork of this worker imports torch
    here, there = commands.forkserver.Pipe()
    args = (folder, there)
    other = commands.forkserver.Process(target=lock_and_wait, args=args)
    other.start()
    problem, worker = here.recv()
    try:
        assert problem is None
        assert checkpoint.lock(folder).startswith(f"another run is using {folder}; ")
        other.kill()
        other.join()
        assert psutil.pid_exists(worker)
        assert checkpoint.lock(folder) is None
    finally:
        other.kill()
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_used_without_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert checkpoint.lock(tmp_path) is None


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And the name is there before the save returns: a power cut takes neither."""
    fsync, flushed = os.fsync, []

    def note(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append((is_folder, steps_in(tmp_path, sharded=False)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path, 1)
    assert flushed == [(False, []), (True, [1])]


@each_kind
def test_a_disk_that_cannot_flush_its_names_is_enough(sharded, tmp_path, monkeypatch):
    """As some that are mounted over a network: fsync of a folder is EINVAL."""
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    for step in (1, 2, 3):
        (save_folder if sharded else save)(tmp_path, step)
    assert steps_in(tmp_path, sharded) == [3, 2]
    assert len(names(tmp_path)) == 2


# ---- what else is in the folder ------------------------------------------------------
@each_kind
def test_a_name_alone_makes_nothing_one_of_this_run(sharded, tmp_path, monkeypatch):
    """It is neither removed nor overwritten: another run's, or a folder of notes."""
    one, suffix = (save_folder, "") if sharded else (save, ".pt")
    with monkeypatch.context() as another:
        another.setitem(globals(), "IDENTITY", {"flags": {"lr": "9"}, "data": "f7"})
        of_another = one(tmp_path, 1)
        taken = one(tmp_path, 5)
    notes = tmp_path / f"step-000000002{suffix}"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    copy = one(tmp_path, 3).rename(tmp_path / f"step-000000003-keep{suffix}")
    before = [contents(path) for path in (of_another, notes, copy)]
    kept = [*contents(taken).values()]
    for step in (4, 5, 6):
        one(tmp_path, step)
    assert before == [contents(path) for path in (of_another, notes, copy)]
    assert steps_in(tmp_path, sharded)[:2] == [6, 5]
    (aside,) = tmp_path.glob(f"skipped-????????-{taken.name}")
    assert [*contents(aside).values()] == kept


def contents(path):
    """Return the bytes of a file, or of the files in a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return {each: each.read_bytes() for each in files}
