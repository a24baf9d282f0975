"""Weights and metrics, in files that are written atomically and loaded safely."""

import errno
import json
import os
import re
import sys
import zipfile
import zlib
from pathlib import Path

import torch


def write_atomically(path, write):
    """Call `write(file)` on a temporary file beside `path`, then rename it to `path`.

    If the process dies or the disk fills up, the old file survives. The data is on the
    disk (fsync) before the name changes, and so is the new name when this returns.
    Temporary files that a killed process left for `path` are removed.
    """
    path = Path(path)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path):
    """Have the names in a directory on the disk (fsync), if its file system can."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)


def reason(error):
    """Return in one line why a file could not be written or read."""
    if isinstance(error.__context__, OSError):  # torch's zip writer hides it
        error = error.__context__
    text = " ".join(str(error).split())
    if "unexpected pos" in text or "file write failed" in text:
        return "not all of it could be written; is the disk full?"
    return text or type(error).__name__


def save(state, path):
    """Write tensors, numbers, strings, and lists and dicts of them, atomically."""
    write_atomically(path, lambda file: torch.save(state, file))


def read(path, mmap=False):
    """Return what `save` wrote, and a checksum of it.

    Its tensors are on the CPU. Runs no code from the file (weights_only=True). Raises
    ValueError, which says what is wrong with it, if it is missing, truncated, damaged
    in any bit, or not one that `save` wrote.
    """
    damaged = None
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch.load does not look at the checksums
            parts = file.infolist()
        for part in parts:
            if part.external_attr & 0x10:  # a folder, which torch would not read
                damaged = part.filename
        if not damaged:
            checksums = repr([(part.filename, part.CRC) for part in parts])
            options = {"map_location": "cpu", "mmap": mmap, "weights_only": True}
            return torch.load(path, **options), zlib.crc32(checksums.encode())
    except Exception as error:  # a damaged file can raise anything, even KeyError
        refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        if refused:
            raise ValueError(
                f"holds more than weights ({refused[1]}), and loading that could run"
                " code; save only the state_dict() of the model"
            ) from error
        raise ValueError("is missing, truncated or not of torch.save") from error
    raise ValueError(f"is damaged: the checksum of {damaged} does not match")


def load(path, mmap=False):
    """Return what `save` wrote; see `read`, but errors begin with the path.

    mmap: the tensors stay in the file, whose memory the processes of a machine share.
    """
    try:
        return read(path, mmap)[0]
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def misfit(weights):
    """Return why weights do not fit a model, as far as their names tell."""
    names = list(map(str, weights)) if isinstance(weights, dict) else []
    if any(name.startswith("module.") for name in names):
        return "was saved from a wrapped model: its names begin with 'module.'"
    if any("_orig_mod." in name for name in names):
        return "was saved from a compiled model: its names contain '_orig_mod.'"
    for name, entry in weights.items() if names else ():
        if isinstance(entry, dict) and any(map(torch.is_tensor, entry.values())):
            return f"holds more than weights: its entry {name!r} may be them; save that"
    return "holds another model's weights; use the flags with which they were trained"


def load_weights(model, path):
    """Load the weights in `path` into `model`.

    Raises ValueError if the file cannot be read or holds another model's weights.
    """
    weights = load(path, mmap=True)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} {misfit(weights)}") from error


def read_metrics(folder):
    """Return the rows of metrics.jsonl, one dict per epoch; [] if it is missing.

    Raises ValueError, with the file's name, if a line is not such a row.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append(
                {"epoch": row["epoch"], "train": row["train"], "val": row["val"]}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number}: not the metrics of an epoch"
            ) from error
    return rows


def save_epoch(folder, epoch, train, val, weights):
    """Write metrics.jsonl, last.pt, and best.pt if this epoch's acc@1 is the best.

    epoch: counted from 1; train, val: what Meter.compute returned; weights: a
    state_dict. Rows of this epoch and of later ones, left by an earlier run, are
    dropped. But if `train` counts nothing, since that run took all steps of the epoch,
    its metrics of the training stay.

    Returns whether that worked. If the disk is full, say, a line on standard error says
    why, and a file that could not be written keeps its old contents.
    """
    folder = Path(folder)
    weights = {name: tensor.cpu() for name, tensor in weights.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = read_metrics(folder)
        earlier = [row for row in found if row["epoch"] < epoch]
        if train["count"] == 0:
            train = next((r["train"] for r in found if r["epoch"] == epoch), train)
        rows = [*earlier, {"epoch": epoch, "train": train, "val": val}]
        save(weights, folder / "last.pt")
        if all(row["val"]["acc1"] < val["acc1"] for row in earlier):
            save(weights, folder / "best.pt")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(
            folder / "metrics.jsonl", lambda file: file.write(text.encode())
        )
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the second
        why = reason(error)
        sys.stderr.write(f"epoch {epoch}: {folder} not written ({why})\n")
        return False
    return True
