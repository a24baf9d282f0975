"""common/checkpoint.py loads what it saved, and nothing damaged or incomplete."""

import os
import re
import resource
import shutil
import types
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from common import checkpoint
from common import weights
from tests.resume_harness import step_of


def state_of(step, size=10):
    """Return what stands for the state of a run after a step."""
    return {"model": {"weight": torch.full((size, size), float(step))}, "step": step}


def save(folder, *steps, keep=2, size=10):
    """Save a checkpoint of each of these steps; return the path of the last."""
    for step in steps:
        checkpoint.save(folder, step, state_of(step, size), keep)
    return folder / f"{checkpoint.name(steps[-1])}.pt"


def save_folder(folder, step, keep=2):
    """Save a checkpoint that is a folder, as a script with shards does."""
    path = folder / checkpoint.name(step)
    unfinished = path.with_name(f".{path.name}.tmp")
    dcp.save(state_of(step), checkpoint_id=unfinished, no_dist=True)
    checkpoint.publish(unfinished, path, keep)
    return path


def steps_in(folder, sharded=False):
    """Return the steps of the checkpoints, the latest first."""
    return [step_of(path) for path in checkpoint.paths(folder, sharded)]


def names(folder):
    return {path.name for path in folder.iterdir()}


# ---- one file each -------------------------------------------------------------------
def test_what_was_saved_is_loaded(tmp_path):
    folder = tmp_path / "new/folder"
    path = save(folder, 6, 7)
    assert checkpoint.paths(folder)[0] == path
    state, problem = checkpoint.load(path)
    assert problem is None and state["step"] == 7
    assert torch.equal(state["model"]["weight"], torch.full((10, 10), 7.0))


def test_in_an_empty_folder_or_none_there_is_no_checkpoint(tmp_path):
    assert checkpoint.find(tmp_path, {}) == ([], None)
    assert checkpoint.find(tmp_path / "missing", {}) == ([], None)


def test_a_path_that_this_node_does_not_see(tmp_path):
    path = tmp_path / "step-000000007.pt"
    why = "it must be on a disk that every node sees"
    assert checkpoint.load(path) == (None, why)


def test_a_file_is_read_once(tmp_path):
    """The others wait for a process that reads, and a large file takes long."""
    path = save(tmp_path, 1, size=2000)  # 16 MB
    characters = Path("/proc/self/io").read_text
    before = int(re.search(r"rchar: (\d+)", characters())[1])
    _, problem = checkpoint.load(path)
    read = int(re.search(r"rchar: (\d+)", characters())[1]) - before
    assert problem is None
    assert 1 <= read / path.stat().st_size < 1.1


def test_the_optimizers_state_must_name_the_weights_if_asked_for(tmp_path):
    for step, key in ((1, 0), (2, "weight")):
        state = {"optimizer": {"state": {key: {"step": 3}}}}
        checkpoint.save(tmp_path, step, state, keep=2)
    by_name, by_number = checkpoint.paths(tmp_path)
    assert checkpoint.load(by_number)[1] is None
    assert checkpoint.load(by_name, by_name=True)[1] is None
    refused = "it is of a model that is not sharded"
    assert checkpoint.load(by_number, by_name=True) == (None, refused)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("sharded", [False, True], ids=["files", "folders"])
def test_the_latest_are_kept(sharded, keep, tmp_path):
    steps = (1, 2, 9, 10, 100, 99999)
    for number, step in enumerate(steps, start=1):
        if sharded:
            save_folder(tmp_path, step, keep)
        else:
            save(tmp_path, step, keep=keep)
        latest = sorted(steps[:number], reverse=True)
        assert steps_in(tmp_path, sharded) == latest[:keep]
    assert len(names(tmp_path)) == keep


@pytest.mark.parametrize("sharded", [False, True], ids=["files", "folders"])
def test_what_killed_saves_have_left_is_removed(sharded, tmp_path):
    (tmp_path / ".step-000000004.pt.1.tmp").touch()
    (tmp_path / ".step-000000003.tmp").mkdir()
    (tmp_path / ".step-000000003.tmp/__3_0.distcp").touch()
    if sharded:
        save_folder(tmp_path, 5)
    else:
        save(tmp_path, 5)
    assert steps_in(tmp_path, sharded) == [5]
    assert len(names(tmp_path)) == 1


def test_one_that_was_skipped_stays_until_a_later_step_is_saved(tmp_path):
    """It may be valid: perhaps only a read failed."""
    save(tmp_path, 40, 50, 60)
    latest, _ = checkpoint.paths(tmp_path)
    latest.write_bytes(b"")
    save(tmp_path, 55)
    assert steps_in(tmp_path) == [60, 55, 50]
    save(tmp_path, 65)
    assert steps_in(tmp_path) == [65, 60]


def test_a_full_disk_leaves_the_earlier_ones(tmp_path, capsys):
    save(tmp_path, 1, 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        save(tmp_path, 3, size=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"step 3: checkpoint not written \(.+\)", line)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


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
    weights.load(path)


def in_the_old_format(path):
    torch.save(weights.load(path), path, _use_new_zipfile_serialization=False)


def of_text(path):
    path.write_text("not a checkpoint")


def empty(path):
    path.write_bytes(b"")


class Spy:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def that_runs_code(path):
    torch.save({"step": Spy(path.parent / "was-run")}, path)


DAMAGES = [
    truncated,
    with_a_bit_flipped,
    in_the_old_format,
    of_text,
    empty,
    that_runs_code,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_file_is_not_loaded_and_one_line_says_why(damage, tmp_path):
    path = save(tmp_path, 1, size=100)
    damage(path)
    files = names(tmp_path)
    state, problem = checkpoint.load(path)
    assert state is None
    assert 5 < len(problem) < 120 and "\n" not in problem
    assert names(tmp_path) == files
    assert not (tmp_path / "was-run").exists()


def test_a_pickle_that_would_run_code_runs_it_if_torch_lets_it(tmp_path):
    """Otherwise the test above would prove nothing."""
    that_runs_code(tmp_path / "spy.pt")
    torch.load(tmp_path / "spy.pt", weights_only=False)
    assert (tmp_path / "was-run").exists()


def test_no_flipped_bit_loads_other_values(tmp_path, capsys):
    """It is noticed, or it is one that changes nothing, such as a date."""
    path = save(tmp_path, 1)
    good, (expected, _) = path.read_bytes(), checkpoint.load(path)
    noticed = 0
    for place in range(0, len(good), 7):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        state, problem = checkpoint.load(path)
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
    assert checkpoint.paths(tmp_path, sharded=True) == [path]


def test_a_folder_replaces_one_of_the_same_step(tmp_path):
    """One that could not be read, when the run has come to that step again."""
    path = save_folder(tmp_path, 1)
    (path / "left over").touch()
    assert save_folder(tmp_path, 1) == path
    assert names(path) == {".metadata", "__0_0.distcp"}


def test_what_cannot_be_renamed_is_named(tmp_path, capsys):
    path = tmp_path / checkpoint.name(1)
    checkpoint.publish(tmp_path / ".missing.tmp", path, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: ")


def test_the_reason_for_a_failure_is_one_line():
    failures = {2: (OSError("of rank 2"), None), 1: (OSError("no\nspace"), None)}
    error = types.SimpleNamespace(failures=failures)
    assert checkpoint.reason(error) == "rank 1: no space"
    error.failures = {0: (EOFError(), None)}
    assert checkpoint.reason(error) == "rank 0: EOFError"


def test_an_interrupt_is_no_failure_of_a_checkpoint():
    """Otherwise Ctrl-C would make a run resume from an older one."""
    error = dcp.CheckpointException("load", {0: (KeyboardInterrupt(), None)})
    with pytest.raises(dcp.CheckpointException):
        checkpoint.reason(error)


# ---- of the other kind, and with other flags -----------------------------------------
def test_checkpoints_of_the_other_kind_are_refused(tmp_path):
    files, folders = tmp_path / "files", tmp_path / "folders"
    save(files, 1)
    save_folder(folders, 1)
    with pytest.raises(ValueError, match=r"are one file each, and .*are folders; name"):
        checkpoint.paths(files, sharded=True)
    with pytest.raises(ValueError, match=r"are folders, and .* one file each; name"):
        checkpoint.paths(folders)


def test_both_kinds_in_one_folder(tmp_path):
    """Each script finds its own."""
    file, folder = save(tmp_path, 1), save_folder(tmp_path, 2)
    assert checkpoint.paths(tmp_path) == [file]
    assert checkpoint.paths(tmp_path, sharded=True) == [folder]


def test_other_flags_are_refused_once_there_is_a_checkpoint(tmp_path):
    checkpoint.check_flags(tmp_path, {"lr": 0.1, "clip_grad": None})
    checkpoint.check_flags(tmp_path, {"lr": 0.2, "clip_grad": None})  # nothing saved
    save(tmp_path, 1)
    checkpoint.check_flags(tmp_path, {"lr": 0.2, "clip_grad": None})
    for flags, words in (
        ({"lr": 0.3}, "--lr 0.2, not 0.3; use the same flags, or another directory"),
        ({"clip_grad": 1.0, "lr": 0.2}, "--clip-grad None, not 1.0;"),
    ):
        with pytest.raises(ValueError, match=f"were written with {words}"):
            checkpoint.check_flags(tmp_path, flags)
    assert names(tmp_path) == {checkpoint.FLAGS, "step-000000001.pt"}


def test_checkpoints_stay_valid_when_a_script_gains_or_loses_a_flag(tmp_path):
    checkpoint.check_flags(tmp_path, {"lr": 0.1, "removed": 1})
    save(tmp_path, 1)
    checkpoint.check_flags(tmp_path, {"lr": 0.1, "added": 2})


def test_a_folder_without_noted_flags_is_taken_as_it_is(tmp_path):
    save(tmp_path, 1)
    checkpoint.check_flags(tmp_path, {"lr": 0.1})
    assert names(tmp_path) == {"step-000000001.pt"}


def test_what_a_folder_may_not_be_used_for_is_a_reason(tmp_path):
    """Which can be sent to other processes, and is one line."""
    folder = tmp_path / "files"
    assert checkpoint.find(folder, {"lr": 0.1}) == ([], None)
    path = save(folder, 1)
    assert checkpoint.find(folder, {"lr": 0.1}) == ([path], None)
    found, why = checkpoint.find(folder, {"lr": 0.2})
    assert found == [] and "were written with --lr 0.1, not 0.2" in why
    found, why = checkpoint.find(folder, {"lr": 0.1}, sharded=True)
    assert found == [] and "name another directory" in why
    found, why = checkpoint.find(path / "below a file", {})
    assert found == [] and "Not a directory" in why


def test_a_model_survives(tmp_path):
    """What a script saves: the state_dicts of a model and of its optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(tmp_path, 1, state, keep=1)
    loaded, _ = checkpoint.load(*checkpoint.paths(tmp_path))
    momentum = loaded["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, torch.ones(2, 3))
    assert torch.equal(loaded["model"]["bias"], model.bias.data)
