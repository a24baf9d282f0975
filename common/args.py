"""The flags that every stage has, checked as they are parsed."""

import argparse
import contextlib
import math
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch

from common.weights import read_metrics

DATA_SETS = ("digits", "cifar10", "imagefolder", "fake")


def fail(message):
    """End the program as a wrong flag does: one line on standard error, exit code 2."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    sys.exit(2)


@contextlib.contextmanager
def one_line_errors(prefix="", *others):
    """Turn an OSError or ValueError of this block into one line and exit code 2.

    For what raises only because of what the user asked for: a missing file, say.
    others: more types of errors.
    """
    try:
        yield
    except (OSError, ValueError, *others) as error:
        fail(" ".join(f"{prefix} {error}".split()))


def check_batch_size(batch_size, processes, samples, named="processes"):
    """End the program unless so many processes can take batches of so many samples.

    named: what they are, where it is not single processes that divide a batch.
    """
    if batch_size % processes:
        fits = max(1, round(batch_size / processes)) * processes
        fail(
            f"--batch-size {batch_size} is the global batch: it must be divisible by"
            f" the number of {named} ({processes}); try {fits}"
        )
    if batch_size > samples:
        fail(f"--batch-size {batch_size}: the training set has only {samples} samples")


def usable_cores():
    """Return how many CPU cores this process may use: Slurm can leave it a few."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def number(kind, ge=-math.inf, gt=-math.inf, le=math.inf):
    """Return an argparse type that accepts finite numbers within bounds.

    kind: int or float; ge, gt, le: greater than or equal to, greater than, less than or
    equal to.
    """
    bounds = f"greater than {gt}" if gt > -math.inf else f"{ge} or more"
    if le < math.inf:
        bounds += f" and at most {le}"
    name = {int: "an integer", float: "a number"}[kind]

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (ge <= value <= le and gt < value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}, {bounds}")
        return value

    return parse


positive_int = number(int, ge=1)
positive_float = number(float, gt=0)


def writable_dir(text):
    """Argparse type: a directory that exists or can be made. It is not made yet."""
    if not text or "://" in text:  # an unset variable, or an address in a bucket
        raise argparse.ArgumentTypeError(f"{text!r} is not the path of a directory")
    path = Path(text)
    parents = (path, *path.absolute().parents)
    existing = next(parent for parent in parents if os.path.lexists(parent))
    try:
        if not existing.is_dir():  # a file, or a link to nowhere
            raise argparse.ArgumentTypeError(f"{existing} is not a directory")
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # fails if the name is too long
        # Also a disk that is full, or a quota, is found now and not after an epoch.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{path} is not writable ({error.strerror})"
        ) from error
    return path


def metrics_dir(text):
    """Argparse type: a directory as `writable_dir`, with no other tool's metrics."""
    path = writable_dir(text)
    try:
        read_metrics(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def existing_file(text):
    """Argparse type: a file that exists."""
    path = Path(text)
    try:
        if not path.is_file():
            raise argparse.ArgumentTypeError(f"there is no file {text}")
    except OSError as error:  # in a directory of another user, or too long a name
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return path


def dtype(text):
    """Argparse type: float32 or float64, as a torch.dtype."""
    if text not in ("float32", "float64"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither float32 nor float64")
    return getattr(torch, text)


def seconds(text):
    """Argparse type: a number of seconds, from 1 to a million, as a timedelta."""
    return timedelta(seconds=number(float, ge=1, le=10**6)(text))


class Flags(argparse.Namespace):
    """The values of the flags."""

    __slots__ = ("may_differ",)  # names; not in vars(), where the flags are

    def fixed(self):
        """Return {name: value} of the flags that a resumed run must have again."""
        return {k: v for k, v in vars(self).items() if k not in self.may_differ}


# Of each flag: its default, its type, and what --help says. A tuple in place of a type
# has the values that it may have, and bool makes a flag without a value.
IMAGES = {
    "--data": ("digits", DATA_SETS, "imagefolder: ImageNet's layout; fake: random"),
    "--data-dir": (Path("data"), Path, "directory of the data set"),
    "--download": (False, bool, "download the data set into --data-dir"),
    "--image-size": (224, number(int, ge=8), "in pixels, of imagefolder and fake"),
    "--images": (1000, positive_int, "number of training images of fake"),
    "--arch": ("small", str, "'small', or a torchvision classifier, such as resnet18"),
}
TEXT = {
    "--text-file": (None, existing_file, "train on its bytes; None: common/text.txt"),
    "--context-length": (32, positive_int, "bytes in a window of the text"),
    "--width": (64, positive_int, "size of the vector of each byte"),
    "--depth": (2, positive_int, "number of transformer blocks"),
    "--heads": (4, positive_int, "attention heads of each block"),
}
TRAINING = {
    "--epochs": (5, positive_int, "passes over the training set"),
    "--batch-size": (48, positive_int, "global batch: samples of all processes"),
    "--lr": (0.05, positive_float, "peak learning rate, after a warm-up"),
    "--weight-decay": (5e-4, number(float, ge=0), "pull of a step toward zero"),
    "--workers": (0, number(int, ge=0), "processes per DataLoader that read ahead"),
    "--seed": (0, number(int, ge=0, le=2**31), "of weights, order and augmentation"),
    "--device": ("auto", ("auto", "cpu", "cuda"), "auto: cuda if a GPU is visible"),
    "--dtype": ("float32", dtype, "of the weights: float32 or float64"),
    "--tf32": (False, bool, "faster float32 products on a GPU, rounded to 10 bits"),
    "--timeout": ("300", seconds, "how many seconds a process waits for the others"),
    "--out-dir": (None, metrics_dir, "write weights and metrics here, of one run only"),
    "--evaluate": (None, existing_file, "evaluate these weights, and do not train"),
}
CHECKPOINTS = {
    "--checkpoint-dir": (None, writable_dir, "save here, and resume from the latest"),
    "--checkpoint-every": (100, positive_int, "steps; there is also one per epoch"),
    "--keep-checkpoints": (2, positive_int, "how many to keep"),
}
# These do not decide what a run learns, so a resumed run may have other values.
MAY_DIFFER = {"--data-dir", "--download", "--text-file", "--workers", "--device"}
MAY_DIFFER |= {"--timeout", "--out-dir", "--evaluate", *CHECKPOINTS}


class HelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """Shows a flag's default value, and the description as it is."""


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that already holds the flags of every stage, for images.

    A wrong flag is reported in one line, without the usage text, and ends the program
    with exit code 2. Abbreviations are off: a flag that a later stage adds must not
    change what a command of an earlier stage means.
    """

    data_flags = IMAGES

    def __init__(self, doc):
        super().__init__(
            description=doc, formatter_class=HelpFormatter, allow_abbrev=False
        )
        self.may_differ = set()
        self.add_flags(self.data_flags | TRAINING)
        self.add_argument(
            "--deterministic",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="only algorithms of cuDNN that give the same bits every time",
        )

    def add_argument(self, *names, may_differ=False, **options):
        """Add a flag; may_differ: a run that resumes may have another value of it."""
        action = super().add_argument(*names, **options)
        if may_differ:
            self.may_differ.add(action.dest)
        return action

    def add_flags(self, table):
        """Add the flags of a table."""
        for flag, (default, kind, text) in table.items():
            options = {"type": kind, "default": default}
            if kind is bool:
                options = {"action": "store_true"}
            elif isinstance(kind, tuple):
                options = {"choices": kind, "default": default}
            may_differ = flag in MAY_DIFFER
            self.add_argument(flag, may_differ=may_differ, help=text, **options)

    def add_checkpoint_arguments(self):
        """Add the flags of checkpoints, for the stages that save them."""
        self.add_flags(CHECKPOINTS)

    def error(self, message):
        fail(message.removeprefix("argument "))

    def parse_args(self, *args, **kwargs):
        """Parse and check the flags; `device` is returned as a torch.device."""
        args = super().parse_args(*args, namespace=Flags(), **kwargs)
        args.may_differ = self.may_differ
        if args.device == "cuda" and not torch.cuda.is_available():
            self.error("--device cuda: no GPU is visible; use --device cpu")
        if args.device == "auto":
            args.device = "cuda" if torch.cuda.is_available() else "cpu"
        args.device = torch.device(args.device)
        self.check_data_arguments(args)
        return args

    def check_data_arguments(self, args):
        """Check the flags of the data set and of the model, once all are parsed."""
        from torchvision import models  # a language model needs no torchvision

        archs = models.list_models(module=models)
        if args.arch not in ("small", *archs):
            self.error(
                f"--arch {args.arch}: neither 'small' nor a torchvision classifier"
            )
        needs_dir = args.data not in ("digits", "fake") and not args.download
        with one_line_errors("--data-dir:"):
            if needs_dir and not args.data_dir.is_dir():
                self.error(
                    f"--data-dir {args.data_dir}: no such directory; name the one that"
                    f" holds {args.data}, or add --download"
                )


class TextArgumentParser(ArgumentParser):
    """The same for a language model: its flags of the data and of the model differ."""

    data_flags = TEXT

    def check_data_arguments(self, args):
        if args.width % args.heads:
            self.error(
                f"--width {args.width} must be divisible by --heads ({args.heads})"
            )
