"""Checkpoints in a folder, named after their steps: which is the latest, which go.

What a checkpoint holds, and which processes write it, is up to the script. Either each
is one file, step-000000100.pt, or each is a folder that torch.distributed.checkpoint
wrote, step-000000100. While it is being written, its name begins with a dot.

Each also holds the identity of its run, the flags and a fingerprint of the data: the
files under that name, the folders in run.json. So a run never resumes from another's,
and never removes it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from pathlib import Path

import torch

from common import weights
from common.args import fail

MANIFEST = "run.json"
# Flags that say what a machine has, or where: they may differ from rank to rank.
OF_A_MACHINE = {"data_dir", "device", "download", "text_file", "workers"}
NAME = re.compile(r"step-\d{9}(\.pt)?")


def name(step):
    """Return the name of the checkpoint of a step, without a file's suffix."""
    return f"step-{step:09}"


def lock(folder):
    """Keep other runs out of a folder until this process ends; return why it cannot.

    The kernel releases the lock, also if the process is killed. A file system without
    locks lets everybody in. Makes the folder, and .lock in it.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = os.open(Path(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        return str(error)
    try:
        # not flock, which a DataLoader's workers would inherit, and hold after a kill
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = f"another run is using {folder}"
        return f"{what}; wait for its end, or name another directory"
    except OSError:
        pass
    return None


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
    known = {flag: str(value) for flag, value in flags.items()}
    return {"flags": known, "data": data_set.fingerprint()}


def has_identity(state):
    """Return whether a checkpoint, or a manifest, says of which run it is."""
    found = state.get("identity") if isinstance(state, dict) else None
    names = found.get("flags") if isinstance(found, dict) else None
    return isinstance(names, dict) and "data" in found


def check(found, wanted):
    """Raise ValueError if a checkpoint's identity is not that of this run.

    Flags that only one of the two scripts has are not compared.
    """
    before, now = found["flags"], wanted["flags"]
    for flag in sorted(before.keys() & now.keys()):
        if before[flag] != now[flag]:
            raise ValueError(
                f"written with --{flag.replace('_', '-')} {before[flag]}, not"
                f" {now[flag]}; use the same flags, or another directory"
            )
    if found["data"] != wanted["data"]:
        raise ValueError(
            "written by a run on other data; use the same data, or another directory"
        )


def check_ranks(runs):
    """End the program unless all ranks have the same flags and the same training data.

    runs: of each rank, ({name: value} of all its flags, its identity).
    """
    flags, ours = runs[0]
    for rank, (others, theirs) in enumerate(runs):
        for flag in sorted(flags.keys() - OF_A_MACHINE):
            one, other = str(flags[flag]), str(others[flag])
            if one != other:
                flag = f"--{flag.replace('_', '-')}"
                both = f"{flag} is {one} on rank 0, and {other} on rank {rank}"
                fail(f"{both}; start all ranks with the same flags")
        if ours["data"] != theirs["data"]:
            fail(
                f"the training data of rank {rank} is not that of rank 0; give all"
                " ranks the same files"
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
        remove_unfinished(path.parent)
        set_aside(path)
        weights.save(state, path)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the second
        why = weights.reason(error)
        sys.stderr.write(f"step {step}: checkpoint not written ({why})\n")
    else:
        remove_others(path, state["identity"], keep)


def load(path):
    """Return (what `save` wrote, its checksum, None), or (None, None, why not).

    Tensors are on the CPU. The file is refused if it is truncated, damaged in any bit,
    or nothing that `save` wrote. Runs no code from it (weights_only=True).
    """
    if not Path(path).exists():
        return None, None, "it must be on a disk that every node sees"
    try:
        state, checksum = weights.read(path)
    except ValueError as error:
        return None, None, f"it {error}"
    if not has_identity(state):
        return None, None, "it does not say of which run it is"
    return state, checksum, None


# ---- folders -------------------------------------------------------------------------
def publish(unfinished, path, identity, keep):
    """Give a folder that is complete its name, and remove all but the `keep` latest.

    Beside what torch wrote, it gets run.json: the run's identity, a digest of torch's
    .metadata, a number that no other folder has, and a digest of all this.
    """
    try:
        metadata = hashlib.sha256((unfinished / ".metadata").read_bytes()).hexdigest()
        manifest = {"identity": identity, "metadata": metadata, "id": uuid.uuid4().hex}
        manifest["digest"] = digest(manifest)
        text = json.dumps(manifest, indent=1).encode()
        weights.write_atomically(unfinished / MANIFEST, lambda file: file.write(text))
        set_aside(path)
        unfinished.rename(path)
        weights.sync_directory(path.parent)
    except OSError as error:
        remove(unfinished)  # otherwise a full disk stays full
        why = weights.reason(error)
        step = int(path.name.removeprefix("step-"))
        sys.stderr.write(f"step {step}: checkpoint not written ({why})\n")
    else:
        remove_others(path, identity, keep)


def read_manifest(path):
    """Return (a folder's identity, run.json's digest, None), or (None, None, why not).

    To be called before torch reads the folder, since .metadata is a pickle, which can
    run any code. It is refused if it is not the one beside which run.json was written.
    That finds a foreign or damaged folder, but not what somebody made on purpose.
    """
    if not path.exists():
        return None, None, "it must be on a disk that every node sees"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        metadata = (path / ".metadata").read_bytes()
        written = manifest.pop("digest")
    except FileNotFoundError as error:
        return None, None, f"it has no {Path(error.filename).name}"
    except Exception as error:  # a damaged file can raise anything, even RecursionError
        return None, None, f"its {MANIFEST} cannot be read ({weights.reason(error)})"
    if written != digest(manifest) or not has_identity(manifest):
        return None, None, f"its {MANIFEST} is damaged, or of another program"
    if manifest.get("metadata") != hashlib.sha256(metadata).hexdigest():
        return None, None, f"its .metadata is not the one that {MANIFEST} describes"
    return manifest["identity"], written, None


def digest(manifest):
    """Return the SHA-256 of what a run.json says, as text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def reason(error):
    """Return in one line why dcp.save or dcp.load failed, from a CheckpointException.

    torch makes the same exception of an interrupt, which is raised again.
    """
    for cause, _ in error.failures.values():
        if not isinstance(cause, Exception):
            raise error
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {weights.reason(cause)}"


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


def remove_unfinished(folder):
    """Remove what killed saves have left: what is named .step-*.tmp."""
    for path in Path(folder).glob(".step-*.tmp"):
        remove(path)


def set_aside(path):
    """Rename what has the name of a new checkpoint: one that was skipped, say."""
    if os.path.lexists(path):
        path.rename(path.with_name(f"skipped-{uuid.uuid4().hex[:8]}-{path.name}"))


def is_of_run(path, identity):
    """Return whether a run of this identity wrote a checkpoint; reads no weights."""
    try:
        if path.is_dir():
            found, _, _ = read_manifest(path)
        else:
            options = {"map_location": "cpu", "mmap": True, "weights_only": True}
            found = torch.load(path, **options)["identity"]
        check(found, identity)
    except Exception:  # what cannot be read, or is of another program, raises anything
        return False
    return True


def remove_others(latest, identity, keep):
    """Remove this run's checkpoints before `latest`, except keep - 1, if it can.

    A name alone does not make a file one of this run.
    """
    with contextlib.suppress(OSError):
        older = [each for each in find(latest.parent, latest.is_dir()) if each < latest]
        for path in older[keep - 1 :]:
            if not is_of_run(path, identity):
                continue
            if path.is_dir() and not path.is_symlink():
                # otherwise what a crash leaves of it stays forever: it has no .metadata
                path = path.rename(path.with_name(f".{path.name}.tmp"))
            remove(path)
