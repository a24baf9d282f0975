"""Checkpoints in a folder, named after their steps: which is the latest, which go.

What a checkpoint holds, and which processes write it, is up to the script. Either each
is one file, step-000000100.pt, or each is a folder that torch.distributed.checkpoint
wrote, step-000000100. While it is being written, its name begins with a dot.

Each also holds the identity of its run, the flags and a fingerprint of the data: the
files under that name, the folders in run.json. So a run never resumes from another's.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import uuid
import zipfile
import zlib
from pathlib import Path

import torch

from common import weights

MANIFEST = "run.json"
NAME = re.compile(r"step-\d{9}(\.pt)?")


def name(step):
    """Return the name of the checkpoint of a step, without a file's suffix."""
    return f"step-{step:09}"


def find(folder, sharded=False):
    """Return the complete checkpoints in a folder, the latest first.

    sharded: whether to look for folders instead of files. torch writes .metadata last,
    so a folder that has it is complete. Raises OSError, and ValueError if there are
    only checkpoints of the other kind, since a run would start from scratch beside
    them.
    """
    there = Path(folder).iterdir() if os.path.lexists(folder) else []
    ours = [path for path in there if NAME.fullmatch(path.name)]
    files = [path for path in ours if path.suffix]
    folders = [path for path in ours if (path / ".metadata").exists()]
    found, others = (folders, files) if sharded else (files, folders)
    if others and not found:
        kinds = ("one file each", "folders")
        raise ValueError(
            f"the checkpoints in {folder} are {kinds[not sharded]}, and this script's"
            f" are {kinds[sharded]}; name another directory"
        )
    return sorted(found, reverse=True)


# ---- whose it is ---------------------------------------------------------------------
def identity(flags, data_set):
    """Return what a run and the checkpoints that it may resume from have in common.

    flags: {name: value}, those that decide what is learned; data_set: of training.
    """
    known = {name: str(value) for name, value in flags.items()}
    return {"flags": known, "data": data_set.fingerprint()}


def has_identity(state):
    """Return whether a checkpoint, or a manifest, says of which run it is."""
    found = state.get("identity") if isinstance(state, dict) else None
    return isinstance(found, dict) and found.keys() == {"flags", "data"}


def check(found, wanted):
    """Raise ValueError if a checkpoint's identity is not that of this run.

    Flags that only one of the two scripts has are not compared.
    """
    before, now = found["flags"], wanted["flags"]
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise ValueError(
                f"written with --{name.replace('_', '-')} {before[name]}, not"
                f" {now[name]}; use the same flags, or another directory"
            )
    if found["data"] != wanted["data"]:
        raise ValueError(
            "written by a run on other data; use the same data, or another directory"
        )


def first_problem(answers):
    """Return why the ranks cannot all resume from a checkpoint; None if they can.

    answers: of each rank, (checksum, problem), as `load` and `read_manifest` say them.
    """
    for _, problem in answers:
        if problem:
            return problem
    if any(answer != answers[0] for answer in answers):
        return "the ranks read different files"
    return None


# ---- one file each -------------------------------------------------------------------
def save(folder, step, state, keep):
    """Write `state` as the checkpoint of a step, and remove all but the `keep` latest.

    state: tensors, numbers, strings, lists and dicts of them, among them `identity`. If
    the disk is full, say, the earlier checkpoints stay, and a line on standard error
    says why.
    """
    path = Path(folder, f"{name(step)}.pt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights.save(state, path)
        remove_others(path, keep)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the second
        reason = str(error).partition("\n")[0]
        sys.stderr.write(f"step {step}: checkpoint not written ({reason})\n")


def load(path):
    """Return (what `save` wrote, its checksum, None), or (None, None, why not).

    Tensors are on the CPU. The file is refused if it is truncated, damaged in any bit,
    or nothing that `save` wrote. It is read once, into memory, which for a moment holds
    it twice. Runs no code from it (weights_only=True).
    """
    if not Path(path).exists():
        return None, None, "it must be on a disk that every node sees"
    try:
        content = Path(path).read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            damaged = file.testzip()  # torch.load does not look at the checksums
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a flipped bit can raise anything, even KeyError
        why = " ".join(str(error).split()).partition(". ")[0]
        return None, None, why or type(error).__name__
    if damaged:
        return None, None, f"the checksum of {damaged} does not match"
    if not has_identity(state):
        return None, None, "it does not say of which run it is"
    return state, zlib.crc32(content), None


# ---- folders -------------------------------------------------------------------------
def publish(unfinished, path, identity, keep):
    """Give a folder that is complete its name, and remove all but the `keep` latest.

    Beside what torch wrote, it gets run.json: the run's identity, a digest of torch's
    .metadata, and a number that no other folder has.
    """
    try:
        metadata = digest((unfinished / ".metadata").read_bytes())
        manifest = {"identity": identity, "metadata": metadata, "id": uuid.uuid4().hex}
        text = json.dumps(manifest, indent=1).encode()
        weights.write_atomically(unfinished / MANIFEST, lambda file: file.write(text))
        remove(path)  # one that could not be read
        unfinished.rename(path)
        remove_others(path, keep)
    except OSError as error:
        sys.stderr.write(f"{path}: {error}\n")


def read_manifest(path):
    """Return (a folder's identity, run.json's digest, None), or (None, None, why not).

    To be called before torch reads the folder, since .metadata is a pickle, which can
    run any code. It is refused if it is not the one beside which run.json was written.
    That finds a foreign or damaged folder, but not what somebody made on purpose.
    """
    if not path.exists():
        return None, None, "it must be on a disk that every node sees"
    try:
        text = (path / MANIFEST).read_bytes()
        manifest, metadata = json.loads(text), (path / ".metadata").read_bytes()
    except FileNotFoundError as error:
        return None, None, f"it has no {Path(error.filename).name}"
    except (OSError, ValueError) as error:
        return None, None, f"its {MANIFEST} cannot be read ({error})"
    if not has_identity(manifest):
        return None, None, f"its {MANIFEST} does not say of which run it is"
    if manifest.get("metadata") != digest(metadata):
        return None, None, f"its .metadata is not the one that {MANIFEST} describes"
    return manifest["identity"], digest(text), None


def digest(content):
    """Return the SHA-256 of bytes, as text."""
    return hashlib.sha256(content).hexdigest()


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
    """Remove a file, a folder or a link, if it is there and can be removed.

    What a link leads to stays.
    """
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def remove_others(latest, keep):
    """Remove the checkpoints before `latest` except keep - 1, and unfinished ones."""
    folder = latest.parent
    for path in folder.glob(".step-*.tmp"):
        remove(path)
    older = [each for each in find(folder, latest.is_dir()) if each < latest]
    for path in older[keep - 1 :]:
        if path.is_dir() and not path.is_symlink():
            # otherwise what a crash leaves of it stays forever: it has no .metadata
            path = path.rename(path.with_name(f".{path.name}.tmp"))
        remove(path)
