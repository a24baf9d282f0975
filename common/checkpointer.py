"""Checkpoints: all that the rest of a run depends on, in files that are whole or not there."""

import signal
import sys
import zipfile
from pathlib import Path

from common import checkpoint
from common.flags import stop

# The flags that decide what the weights become. A run goes on from checkpoints of the same ones only.
DECISIVE = (
    "data", "image_size", "images", "arch", "pretrained", "epochs", "batch_size", "lr",
    "weight_decay", "seed", "dtype", "amp", "clip_grad", "sync_bn",
)  # fmt: skip
PARTS = ("model", "optimizer", "scheduler", "scaler")


def watch(args, *names):
    """Note these signals from now on instead of ending; return the list of those that have come.

    names: such as "SIGTERM". The list holds their numbers. Launchers may send a signal to a process
    twice, in the middle of the first call: appending to a list is safe then. With --evaluate there
    is nothing to lose, and the signals keep their meaning.
    """
    came = []
    for name in () if args.evaluate else names:
        signal.signal(getattr(signal, name), lambda number, frame: came.append(number))
    return came


def rehearse(args, model, loader):
    """Pass an image forward and backward through a wrapped model, which leaves no trace in it.

    After its first backward pass a wrapper may arrange its buffers anew. Where the gradients lie in
    them decides in which order three or more processes add them up, and so their last bits. With
    this it has done so before the first step, in a run that begins and in one that goes on.
    """
    image = loader.dataset[0][0][None].to(args.device, args.dtype)
    model.eval()(image).sum().backward()
    model.zero_grad()


def decisive(args):
    """Return the flags that decide what the weights become, as text: {"--lr": "0.05", ...}."""
    return {f"--{name.replace('_', '-')}": str(getattr(args, name)) for name in DECISIVE}


def paths(folder):
    """Return the paths of the checkpoints in `folder`, the newest first."""
    return sorted(Path(folder).glob("step-*.pt"), reverse=True)


def read(path):
    """Return what a checkpoint holds. Raises ValueError if it is damaged, or some other file."""
    try:
        with zipfile.ZipFile(path) as file:
            whole = file.testzip() is None  # torch.load takes a changed byte as it is
        state = checkpoint.load(path) if whole else None
    except Exception as error:  # what a changed byte raises: KeyError, NotImplementedError and more
        raise ValueError(f"{path} is damaged") from error
    if (
        not isinstance(state, dict)
        or not {"flags", "step", "skipped", "sums", *PARTS} <= state.keys()
    ):
        raise ValueError(f"{path} is damaged, or no checkpoint")
    return state


def newest(args):
    """Return the newest checkpoint in --checkpoint-dir, its tensors on the CPU; None where there is none.

    One that cannot be read is passed over, with a line on standard error. If that is true of all
    of them, or if they are those of a run with other flags, return what is wrong, as text.
    """
    found = paths(args.checkpoints) if args.checkpoints else []
    for path in found:
        try:
            state = read(path)
        except ValueError as error:
            why = " ".join(str(error.__cause__ or error).split())
            sys.stderr.write(f"{path} is damaged or no checkpoint, and passed over ({why})\n")
            continue
        for flag, value in decisive(args).items():
            if value != state["flags"].get(flag):
                was = state["flags"].get(flag)
                return f"{path} is of a run with {flag} {was}, not {value}; name another folder"
        print(f"goes on after step {state['step']}", flush=True)
        return state
    return f"{args.checkpoints} holds no checkpoint that can be read; name another" if found else None


class Checkpointer:
    """Where a run goes on, and where it keeps what it needs to go on another time.

    step: how many steps were taken before, 0 where a run begins; sums: float64 [processes, 4], what
    the Meter of each process held then; skipped: how many steps were skipped last, in a row.
    """

    def __init__(self, args, state, *parts):
        """Load what `newest` returned into `parts`: model, optimizer, scheduler and scaler.

        If that is text, saying what is wrong, the program ends with it, on every process alike.
        """
        if isinstance(state, str):
            stop(f"--checkpoint-dir: {state}")
        self.folder = args.checkpoints
        self.flags = decisive(args)
        self.parts = dict(zip(PARTS, parts, strict=True))
        self.step = state["step"] if state else 0
        self.skipped = state["skipped"] if state else 0
        self.sums = state["sums"].to(args.device) if state else None
        for name, part in self.parts.items() if state else ():
            part.load_state_dict(state[name])
        self.buffers = [buffer.clone() for buffer in self.parts["model"].buffers()]

    def epoch(self, steps):
        """Return the epoch to go on with, if it has so many steps. Its steps may all be done."""
        return max(self.step - 1, 0) // steps + 1

    def take_up(self, epoch, steps, meter, part):
        """Return how many of an epoch's `steps` were done before, and give `meter` their figures.

        part: a slice of the processes of that time, whose sums the meter gets. There may have been
        more of them than now: all of them have to be dealt out.
        """
        done = max(self.step - (epoch - 1) * steps, 0)
        if done:
            meter.sums += self.sums[part].sum(0)
        return done

    def judge(self, step, norm, scale, model):
        """Count the steps in a row whose gradient is not finite; FloatingPointError at the fifth.

        norm: the gradient's; scale: the loss scale. As long as it is above 1 it may be the cause,
        and is going to be lowered: such a step does not count. The buffers of `model`, such as the
        averages of batch norm, are put back to what they were after the last good step.
        """
        if norm.isfinite():
            self.skipped = 0
            self.buffers = [buffer.clone() for buffer in model.buffers()]
            return
        for buffer, good in zip(model.buffers(), self.buffers, strict=True):
            buffer.copy_(good)
        self.skipped += scale <= 1
        if self.skipped == 5:
            raise FloatingPointError(f"step {step}: 5 in a row skipped; {self.last()}")

    def save(self, step, sums, write=True):
        """Write the checkpoint of a step, and keep the one before; nothing without --checkpoint-dir.

        write: whether this process is the one that does. If it cannot be written, what is there
        stays as it is, and a line on standard error says so.
        """
        if self.folder is None or not write:
            return
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"flags": self.flags, "step": step, "skipped": self.skipped, "sums": sums}
        path = self.folder / f"step-{step:09}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save(state, path)
            # Those after this step could not be read: a run goes on from the newest that can be.
            before = [old for old in paths(self.folder) if old < path]
            useless = {*paths(self.folder), *self.folder.glob(".step-*.tmp")} - {path, *before[:1]}
            for old in useless:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            sys.stderr.write(f"step {step}: no checkpoint written ({reason}); {self.last()}\n")

    def last(self):
        """Say which checkpoint is the newest."""
        found = paths(self.folder) if self.folder else []
        return f"the last checkpoint is {found[0]}" if found else "there is no checkpoint"
