"""Saves the training state in shards, one folder per step, and resumes from them.

A folder has what torch.distributed.checkpoint writes: the shards in `__0_0.distcp`,
`__1_0.distcp` and so on, and in `.metadata` which tensor is where. The checksums of
these files, the states of the scheduler and the scaler, the number of steps and the
flags are in `rest.pt`. The folder is written as `.step-N.tmp`, and renamed when all
processes have written their shards.

torch reads `.metadata`, and what is not a tensor in the other files, with pickle, which
runs any code that is in it: resume only from checkpoints of your own.
"""

import contextlib
import gc
import shutil
import sys
import time
import zlib
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from common import checkpoint
from common.args import fail
from common.checkpointer import Checkpointer
from common.checkpointer import read

REST = "rest.pt"


def checksum(path):
    """Return the CRC-32 of a file, in hexadecimal digits."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            value = zlib.crc32(part, value)
    return f"{value:08x}"


def checksum_file(path):
    """Return where the checksum of a file stands while its folder is being written."""
    return path.with_name(f"{path.name}.crc32")


def check(path, checksums):
    """Raise ValueError if a file is not as it was written, OSError if it is missing.

    checksums: those of the files in its folder, by their names.
    """
    if checksum(path) != checksums.get(path.name):
        raise ValueError(f"{path.name}: the checksum does not match")


def remove(path):
    """Remove a file, or a folder, of which no part stays under its name."""
    if path.is_dir() and not path.name.endswith(".removed.tmp"):
        path = path.rename(path.with_name(f".{path.name.strip('.')}.removed.tmp"))
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def reason(error):
    """Return why a save or a load failed, in one line, from a CheckpointException."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(cause).split()) or type(cause).__name__}"


class Writer(FileSystemWriter):
    """Writes a folder for torch.distributed.checkpoint, complete or under another name.

    folder: its path in the end; rest: what goes to rest.pt; prune: called with the
    path when the folder is there. torch calls prepare_global_plan, before anything is
    written, and finish, after it, in rank 0 alone.
    """

    def __init__(self, folder, rest, prune):
        super().__init__(folder.with_name(f".{folder.name}.tmp"))
        self.folder = folder
        self.rest = rest
        self.prune = prune

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        """Note whether this is rank 0."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan):
        """Make the folder, since not every disk shows at once what rank 0 makes."""
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def write_data(self, plan, planner):
        """Write this process's shards, and the checksums that `finish` collects."""
        written = super().write_data(plan, planner)
        for path in {self.path_of(result) for result in written.wait()}:
            checksum_file(path).write_text(checksum(path))
        return written

    def prepare_global_plan(self, plans):
        """Remove what a save that was killed has left there."""
        for leftover in self.path.iterdir():
            leftover.unlink()
        return super().prepare_global_plan(plans)

    def path_of(self, result):
        """Return the path of the file in which a tensor has been written."""
        return self.path / result.storage_data.relative_path

    def finish(self, metadata, results):
        """Write what is written once, and give the folder its name.

        Raises OSError if what another process has written is not there.
        """
        super().finish(metadata, results)
        checksums = {".metadata": checksum(self.path / ".metadata")}
        for path in {self.path_of(each) for ranks in results for each in ranks}:
            if not path.exists():
                raise OSError(f"{path} must be on a disk that every node sees")
            checksums[path.name] = checksum_file(path).read_text()
            checksum_file(path).unlink()
        checkpoint.save(self.rest | {"checksums": checksums}, self.path / REST)
        if self.folder.exists():  # one that could not be read
            remove(self.folder)
        self.path.rename(self.folder)
        checkpoint.sync_directory(self.folder.parent)
        self.prune(self.folder)


class Reader(FileSystemReader):
    """Reads the shards in a folder; a file that is not as written is a ValueError.

    Each process checks some of the files, before any process reads one.
    checksums: as in `check`; group: a process group of all processes.
    """

    def __init__(self, folder, checksums, group):
        super().__init__(folder)
        self.checksums = checksums
        self.group = group

    def prepare_local_plan(self, plan):
        """Check this process's part of the files; an error in one reaches all."""
        for name in sorted(self.checksums)[self.group.rank() :: self.group.size()]:
            check(Path(self.path) / name, self.checksums)
        return super().prepare_local_plan(plan)


class ShardedCheckpointer(Checkpointer):
    """Keeps sharded checkpoints, which the script writes and reads with torch's calls.

    The arguments are those of Checkpointer, and a process group on the CPU that nothing
    but the saves may use.

    state: what has shards, for dcp.save and dcp.load; pending: the future of a save
    that runs while training continues, or None.
    """

    def __init__(self, args, loader, model, optimizer, scheduler, scaler, group):
        super().__init__(args, loader, model, optimizer, scheduler, scaler)
        self.state = {name: self.parts.pop(name) for name in ("model", "optimizer")}
        self.group = group
        self.pending = None
        self.writer = None
        self.corrupt = {}

    def paths(self):
        """Return the paths of the checkpoints, the latest first."""
        if self.folder is None:
            return []
        found = self.folder.glob(f"step-{9 * '[0-9]'}")  # no copy with a longer name
        return sorted((path for path in found if path.is_dir()), reverse=True)

    def read(self, path):
        """Return the rest of a state; ValueError if the checkpoint is corrupt."""
        if path in self.corrupt:
            raise ValueError(f"{path} ({self.corrupt[path]})")
        state = read(path / REST, {*self.parts, "checksums"})
        try:
            check(path / ".metadata", state["checksums"])
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} ({error})") from error
        return state

    def reader(self, path):
        """Return the storage_reader for a checkpoint, or end the program as `load`.

        Also ends it if another version of torch has written what this one cannot read.
        """
        state = self.load(path)
        reader = Reader(path, state["checksums"], self.group)
        try:
            reader.read_metadata()
        except Exception as error:  # whatever reading classes of that version raises
            if state["torch_version"] == torch.__version__:
                raise
            fail(
                f"--checkpoint-dir: {path} was written with torch"
                f" {state['torch_version']}, and torch {torch.__version__} cannot read"
                f" it ({type(error).__name__}: {error})"
            )
        return reader

    def set_aside(self, path, error):
        """Note, from a CheckpointException, that a checkpoint cannot be read.

        Raises what has another cause, an interrupt or a lack of memory for instance:
        otherwise a run resumes from an older checkpoint, and later removes this one.
        """
        for cause, _ in error.failures.values():
            if not isinstance(cause, (OSError, ValueError)):
                raise error
        self.corrupt[path] = reason(error)

    def load(self, path):
        """Return the rest of the state in a checkpoint; None for None.

        Ends the program as `Checkpointer.load` does, also in a directory with
        checkpoints in one file each, from which a run would silently start again.
        """
        if path is None and self.folder and any(self.folder.glob("step-*.pt")):
            fail(
                f"--checkpoint-dir: {self.folder} has checkpoints in one file each, and"
                " this script's are folders; name another directory"
            )
        return super().load(path)

    def save(self, step, sums, write=True):  # noqa: ARG002 (those of Checkpointer.save)
        """Raise TypeError: a Checkpointer's file would lack the model's weights."""
        raise TypeError(
            "torch writes sharded checkpoints; instead of save(), call"
            " dcp.save(ckpt.state, storage_writer=writer) or dcp.async_save in a block"
            " of `with ckpt.saving(step, sums) as writer:`"
        )

    @contextlib.contextmanager
    def saving(self, step, sums):
        """Yield the storage_writer for a checkpoint after `step`; report a failure.

        sums: as in `Checkpointer.save`. If a process cannot write, the earlier
        checkpoints stay, and a line on standard error says why. The failure of a
        save in the background is reported by `wait`.
        """
        self.last_save = time.monotonic()
        rest = {name: part.state_dict() for name, part in self.parts.items()}
        rest |= {"step": step, "sums": sums.cpu(), "flags": self.flags}
        rest |= self.circumstances
        path = self.folder / f"step-{step:09}"
        self.writer = Writer(path, rest, self.prune)
        with self.failure_reported():
            yield self.writer

    def wait(self):
        """Wait until the save in the background has ended, if there is one."""
        if self.pending is None:
            return
        with self.failure_reported():
            self.pending.result()
        failed = self.pending.exception() is not None
        self.pending = None
        if failed:
            gc.collect()  # a cycle of the exception keeps the copy of the state

    @contextlib.contextmanager
    def failure_reported(self):
        """Continue if the block cannot write; rank 0 says why on standard error."""
        try:
            yield
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if not isinstance(cause, (OSError, RuntimeError)):
                    raise
            if self.writer.is_coordinator:
                name = self.writer.folder.name
                sys.stderr.write(f"{name}: checkpoint not written ({reason(error)})\n")
            # in all processes, which may have written to disks of their own
            with contextlib.suppress(OSError):
                remove(Path(self.writer.path))

    def remove(self, path):
        """Remove a checkpoint, or what is left of one."""
        remove(path)
