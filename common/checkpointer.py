"""Saves the full training state, and resumes from it."""

import sys
import time
import zipfile

import torch

from common import checkpoint
from common.args import fail

# A run may resume with other values of these flags; all others must be the same, except
# one that the checkpoint or the run does not have: a script may gain a flag. Two of
# these can change the weights: --device and --grad-accum-steps do by rounding, and the
# latter, like the number of processes, by more in one with batch norm or dropout.
HARMLESS_FLAGS = {
    "activation_checkpointing",
    "async_save",
    "checkpoint_dir",
    "checkpoint_every",
    "checkpoint_minutes",
    "data_dir",
    "device",
    "download",
    "evaluate",
    "grad_accum_steps",
    "keep_checkpoints",
    "out_dir",
    "sample",
    "save_logits",
    "timeout",
    "workers",
}
PARTS = ("model", "optimizer", "scheduler", "scaler")
KEYS = {"step", "sums", "flags", "num_samples", "torch_version"}
SHARDED = f"step-{9 * '[0-9]'}/.metadata"  # what stage 13 writes


def read(path, parts=PARTS):
    """Return what a checkpoint with these parts holds, its tensors on the CPU.

    Raises ValueError if the file is corrupt or is something else.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():  # torch.load does not look at the checksums
                raise ValueError("a checksum does not match")
        state = checkpoint.load(path)
    except Exception as error:  # a flipped bit can raise anything, even KeyError
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{path} ({reason})") from error
    if not isinstance(state, dict) or not state.keys() >= {*parts, *KEYS}:
        raise ValueError(f"{path} (not a checkpoint)")
    return state


class Checkpointer:
    """Saves the full training state after a step, and resumes a later run from it.

    args: --checkpoint-dir, --keep-checkpoints, and the flags that a resumed run must
    share; without --checkpoint-dir nothing is saved or found. loader: the training
    loader, for the size of its data set. The other four are saved and restored by their
    state_dict.

    step: the optimizer steps taken before this run, 0 unless it was resumed; sums:
    float64 [processes, 4], what each rank's Meter held at that step, None unless
    resumed.
    """

    def __init__(self, args, loader, model, optimizer, scheduler, scaler):
        self.folder = args.checkpoint_dir
        self.keep = args.keep_checkpoints
        self.device = args.device
        self.flags = {
            f"--{name.replace('_', '-')}": str(value)
            for name, value in vars(args).items()
            if name not in HARMLESS_FLAGS
        }
        self.circumstances = {
            "num_samples": len(loader.dataset),
            "torch_version": str(torch.__version__),
        }
        parts = (model, optimizer, scheduler, scaler)
        self.parts = dict(zip(PARTS, parts, strict=True))
        self.step = 0
        self.sums = None
        self.latest = None  # in the process that has looked for it
        self.skipped = set()  # corrupt ones that a line on standard error has named
        self.last_save = time.monotonic()

    def paths(self):
        """Return the paths of the checkpoints, the latest first."""
        if self.folder is None:
            return []
        return sorted(self.folder.glob("step-[0-9]*.pt"), reverse=True)

    def read(self, path):
        """Return the state in a checkpoint; ValueError if it is corrupt."""
        return read(path)

    def find_latest(self):
        """Return the path of the latest readable checkpoint; None if there is none.

        A corrupt one is skipped, with a line on standard error. If all are corrupt, the
        latest is returned, and `load` says what is wrong with it. Another size of the
        training set or another version of torch is a warning.
        """
        for path in self.paths():
            try:
                state = self.read(path)
            except ValueError as error:
                if path not in self.skipped:
                    sys.stderr.write(f"skipping corrupt checkpoint {error}\n")
                self.skipped.add(path)
                continue
            for name, ours in self.circumstances.items():
                if state[name] != ours:
                    was = f"{path} was written with {name} {state[name]}, not {ours}"
                    sys.stderr.write(f"warning: {was}\n")
            self.latest = path
            return path
        return next(iter(self.paths()), None)

    def load(self, path):
        """Return the state in a checkpoint, its tensors on the CPU; None for None.

        A checkpoint that is corrupt, that another process cannot see, or that was
        written with another value of a flag ends the program with one line; so does a
        directory of sharded checkpoints, from which a run would silently start again.
        """
        if path is None:
            if self.folder and any(self.folder.glob(SHARDED)):
                fail(
                    f"--checkpoint-dir: {self.folder} has sharded checkpoints, and this"
                    " script's are one file each; name another directory"
                )
            return None
        if not path.exists():
            fail(f"--checkpoint-dir: {path} must be on a disk that every node sees")
        try:
            state = self.read(path)
        except ValueError as error:
            fail(f"--checkpoint-dir: no checkpoint can be read, not even {error}")
        # not those that only one of them has: the script has gained or lost them
        for flag in sorted(self.flags.keys() & state["flags"].keys()):
            saved, ours = state["flags"][flag], self.flags[flag]
            if saved != ours:
                fail(
                    f"--checkpoint-dir: {path} was written with {flag} {saved}, not"
                    f" {ours}; use the same flags, or another directory"
                )
        return state

    def restore(self, state):
        """Load what `load` returned into the model and the rest; None is ignored.

        The process that has called `find_latest` also removes what `save` would.
        """
        if state is None:
            return
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        self.sums = state["sums"].to(self.device)
        if self.latest is not None:
            # What a kill between a save and its pruning left; the run may be over, and
            # save nothing more.
            self.prune(self.latest)

    def first_epoch(self, steps_per_epoch):
        """Return the epoch to begin with. All of its steps may be done already."""
        return max(self.step - 1, 0) // steps_per_epoch + 1

    def steps_done(self, epoch, steps_per_epoch):
        """Return how many steps of an epoch were taken before this run."""
        return max(self.step - (epoch - 1) * steps_per_epoch, 0)

    def minutes_since_save(self):
        """Return the minutes since this process last saved, or since it started.

        Without --checkpoint-dir it is always 0.
        """
        if self.folder is None:
            return 0.0
        return (time.monotonic() - self.last_save) / 60

    def save(self, step, sums, write=True):
        """Write a checkpoint and remove all but the latest ones (--keep-checkpoints).

        step: optimizer steps taken; sums: the Meters' sums, float64 [processes, 4];
        write: whether this process writes it, since one has to. If it cannot be
        written, the earlier ones stay, and a line on standard error says why.
        """
        self.last_save = time.monotonic()
        if self.folder is None:
            return
        state = {name: part.state_dict() for name, part in self.parts.items()}
        if not write:
            return
        state |= {"step": step, "sums": sums.cpu(), "flags": self.flags}
        state |= self.circumstances
        path = self.folder / f"step-{step:09}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save(state, path)
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            sys.stderr.write(f"step {step}: checkpoint not written ({reason})\n")
        else:
            self.prune(path)

    def prune(self, latest):
        """Remove temporary files, and all but --keep-checkpoints checkpoints.

        One that could not be read is removed when `latest` is of a later step: another
        attempt may read it. What cannot be removed is named on standard error.
        """
        older = [path for path in self.paths() if path < latest]
        kept = [path for path in older if path not in self.skipped][: self.keep - 1]
        for path in {*older, *self.folder.glob(".step-*.tmp")} - {*kept}:
            try:
                self.remove(path)
            except OSError as error:
                sys.stderr.write(f"{path} cannot be removed ({error.strerror})\n")

    def remove(self, path):
        """Remove a checkpoint, or what is left of one."""
        path.unlink(missing_ok=True)
