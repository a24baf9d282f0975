"""Checkpoints in a folder, named after their steps: which is the latest, which go.

What a checkpoint holds, and which processes write it, is up to the script. Either each
is one file, step-000000100.pt, or each is a folder that torch.distributed.checkpoint
wrote, step-000000100. While it is being written, its name begins with a dot.
"""

import io
import json
import shutil
import sys
import zipfile
from pathlib import Path

import torch

from common import weights

FLAGS = "flags.json"


def name(step):
    """Return the name of the checkpoint of a step, without a file's suffix."""
    return f"step-{step:09}"


def paths(folder, sharded=False):
    """Return the complete checkpoints in a folder, the latest first.

    sharded: whether to look for folders instead of files. torch writes .metadata last,
    so a folder that has it is complete. Raises ValueError if there are only checkpoints
    of the other kind, since a run would start from scratch beside them.
    """
    files = list(Path(folder).glob("step-[0-9]*.pt"))
    folders = [each.parent for each in Path(folder).glob("step-[0-9]*/.metadata")]
    found, others = (folders, files) if sharded else (files, folders)
    if others and not found:
        kinds = ("one file each", "folders")
        raise ValueError(
            f"the checkpoints in {folder} are {kinds[not sharded]}, and this script's"
            f" are {kinds[sharded]}; name another directory"
        )
    return sorted(found, reverse=True)


def check_flags(folder, flags, sharded=False):
    """Raise ValueError if a folder's checkpoints were written with different flags.

    flags: {name: value}; of two runs, those are compared that both have. If the folder
    has no checkpoint yet, the flags are noted there, for the next run.
    """
    folder = Path(folder)
    file = folder / FLAGS
    flags = {key: str(value) for key, value in flags.items()}
    if not paths(folder, sharded):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(flags, indent=1)
        weights.write_atomically(file, lambda opened: opened.write(text.encode()))
    elif file.exists():
        noted = json.loads(file.read_text())
        for key in sorted(noted.keys() & flags.keys()):
            if noted[key] != flags[key]:
                flag = f"--{key.replace('_', '-')}"
                raise ValueError(
                    f"the checkpoints in {folder} were written with {flag}"
                    f" {noted[key]}, not {flags[key]}; use the same flags, or another"
                    " directory"
                )


def find(folder, flags, sharded=False):
    """Return (paths of the checkpoints, None), the latest first, or ([], why not).

    flags, sharded: as for `check_flags` and `paths`, whose errors are the reasons. So
    one process can look, and tell the others all that they need.
    """
    try:
        check_flags(folder, flags, sharded)
        return paths(folder, sharded), None
    except (OSError, ValueError) as error:
        return [], " ".join(str(error).split())


# ---- one file each -------------------------------------------------------------------
def save(folder, step, state, keep):
    """Write `state` as the checkpoint of a step, and remove all but the `keep` latest.

    state: tensors, numbers, strings, lists and dicts of them. If the disk is full, say,
    the earlier checkpoints stay, and a line on standard error says why.
    """
    path = Path(folder, f"{name(step)}.pt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights.save(state, path)
        remove_others(path, keep)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the second
        reason = str(error).partition("\n")[0]
        sys.stderr.write(f"step {step}: checkpoint not written ({reason})\n")


def load(path, by_name=False):
    """Return (what `save` wrote, its tensors on the CPU, None), or (None, why not).

    It is refused if it is truncated, or damaged in any bit. The file is read once, into
    memory, which for a moment holds it twice. Runs no code from it (weights_only=True).
    by_name: whether the optimizer's state must name the weights, as a sharded model's
    does; a plain optimizer numbers them.
    """
    if not Path(path).exists():
        return None, "it must be on a disk that every node sees"
    try:
        content = io.BytesIO(Path(path).read_bytes())
        with zipfile.ZipFile(content) as file:
            damaged = file.testzip()  # torch.load does not look at the checksums
        content.seek(0)
        state = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a flipped bit can raise anything, even KeyError
        why = " ".join(str(error).split()).partition(". ")[0]
        return None, why or type(error).__name__
    if damaged:
        return None, f"the checksum of {damaged} does not match"
    if by_name and 0 in state["optimizer"]["state"]:
        return None, "it is of a model that is not sharded"
    return state, None


# ---- folders -------------------------------------------------------------------------
def publish(unfinished, path, keep):
    """Give a folder that is complete its name, and remove all but the `keep` latest."""
    try:
        shutil.rmtree(path, ignore_errors=True)  # one that could not be read
        unfinished.rename(path)
        remove_others(path, keep)
    except OSError as error:
        sys.stderr.write(f"{path}: {error}\n")


def reason(error):
    """Return in one line why dcp.save or dcp.load failed, from a CheckpointException.

    torch makes the same exception of an interrupt, which is raised again.
    """
    for cause, _ in error.failures.values():
        if not isinstance(cause, Exception):
            raise error
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(cause).split()) or type(cause).__name__}"


# ---- both ----------------------------------------------------------------------------
def remove(path):
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_others(latest, keep):
    """Remove the checkpoints before `latest` except keep - 1, and unfinished ones."""
    folder = latest.parent
    older = [each for each in paths(folder, latest.is_dir()) if each < latest]
    for path in folder.glob(".step-*.tmp"):
        remove(path)
    for path in older[keep - 1 :]:
        if path.is_dir():
            # otherwise what a crash leaves of it stays forever: it has no .metadata
            path = path.rename(path.with_name(f".{path.name}.tmp"))
        remove(path)
