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

DATA_SETS = ("digits", "fashionmnist", "cifar10", "cifar100", "imagefolder", "fake")


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


def default_workers(processes):
    """Return how many workers keep a GPU busy that trains on image files: 1 to 8.

    Files are decoded by all the cores that this process can have, except one.
    processes: how many this script starts; a launcher says it in LOCAL_WORLD_SIZE.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return max(1, min(8, usable_cores() // processes - 1))


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


def writable_file(text):
    """Argparse type: a file that can be written. It is not touched yet."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path.parent} is not a writable directory")
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


def memory_format(text):
    """Argparse type: channels_last or contiguous, as a torch.memory_format."""
    formats = {
        "channels_last": torch.channels_last,
        "contiguous": torch.contiguous_format,
    }
    if text not in formats:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {' '.join(formats)}")
    return formats[text]


def seconds(text):
    """Argparse type: a number of seconds, from 1 to a million, as a timedelta."""
    return timedelta(seconds=number(float, ge=1, le=10**6)(text))


class Flags(argparse.Namespace):
    """The values of the flags."""

    __slots__ = ("may_differ",)  # names; not in vars(), where the flags are

    def fixed(self):
        """Return {name: value} of the flags that a resumed run must have again."""
        return {k: v for k, v in vars(self).items() if k not in self.may_differ}


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

    def __init__(self, doc):
        super().__init__(
            description=doc,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.may_differ = set()
        self.add_data_arguments()
        add = self.add_argument
        add(
            "--epochs",
            type=positive_int,
            default=5,
            help="passes over the training set",
        )
        add(
            "--batch-size",
            type=positive_int,
            default=48,
            help="global batch size: samples of all processes together",
        )
        add(
            "--lr",
            type=positive_float,
            default=0.05,
            help="peak learning rate, after a warm-up; it then falls to zero",
        )
        add(
            "--weight-decay",
            type=number(float, ge=0),
            default=5e-4,
            help="pull of each step toward zero",
        )
        add(
            "--workers",
            may_differ=True,
            type=number(int, ge=0),
            help="processes of each DataLoader; None: 0, or by cores for image files",
        )
        add(
            "--seed",
            type=number(int, ge=0, le=2**31),
            default=0,
            help="of the initial weights, the order and the augmentation",
        )
        add(
            "--device",
            may_differ=True,
            choices=("auto", "cpu", "cuda"),
            default="auto",
            help="'auto' is cuda if a GPU is visible, otherwise cpu",
        )
        add(
            "--dtype",
            type=dtype,
            default="float32",
            metavar="{float32,float64}",
            help="type of the weights",
        )
        add(
            "--tf32",
            action="store_true",
            help="faster float32 products on a GPU, rounded to 10 bits",
        )
        add(
            "--deterministic",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="only algorithms of cuDNN that give the same bits every time",
        )
        add(
            "--timeout",
            may_differ=True,
            type=seconds,
            default="300",
            metavar="SECONDS",
            help="how long a process waits for the others",
        )
        add(
            "--out-dir",
            may_differ=True,
            type=metrics_dir,
            help="write metrics.jsonl, last.pt and best.pt here after every epoch; one"
            " directory per run",
        )
        add(
            "--evaluate",
            may_differ=True,
            type=existing_file,
            metavar="FILE",
            help="load these weights, evaluate them, and do not train",
        )

    def add_argument(self, *names, may_differ=False, **options):
        """Add a flag; may_differ: it does not decide what a run learns.

        So a run that resumes from a checkpoint may have another value of it.
        """
        action = super().add_argument(*names, **options)
        if may_differ:
            self.may_differ.add(action.dest)
        return action

    def add_data_arguments(self):
        """Add the flags of the data set and of the model."""
        add = self.add_argument
        add(
            "--data",
            choices=DATA_SETS,
            default="digits",
            help="data set; 'imagefolder' has ImageNet's layout, 'fake' is random",
        )
        add(
            "--data-dir",
            may_differ=True,
            type=Path,
            default=Path("data"),
            help="directory of the data set",
        )
        add(
            "--download",
            may_differ=True,
            action="store_true",
            help="download the data set into --data-dir",
        )
        add(
            "--image-size",
            type=number(int, ge=8),
            default=224,
            help="height and width of images of imagefolder and fake",
        )
        add(
            "--images",
            type=positive_int,
            default=1000,
            help="number of training images of fake",
        )
        add(
            "--arch",
            default="small",
            help="'small', or a torchvision classifier, such as resnet18",
        )
        add(
            "--pretrained",
            action="store_true",
            help="start from torchvision's weights, which are downloaded",
        )
        add(
            "--memory-format",
            type=memory_format,
            default="channels_last",
            metavar="{channels_last,contiguous}",
            help="order of images and features in memory",
        )

    def add_checkpoint_arguments(self):
        """Add the flags of checkpoints, for the stages that save them."""
        add = self.add_argument
        add(
            "--checkpoint-dir",
            may_differ=True,
            type=writable_dir,
            help="save here; resume from the latest; where no stranger can write",
        )
        add(
            "--checkpoint-every",
            may_differ=True,
            type=positive_int,
            default=100,
            help="steps between checkpoints; there is also one after every epoch",
        )
        add(
            "--keep-checkpoints",
            may_differ=True,
            type=positive_int,
            default=2,
            help="how many to keep",
        )

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
        """Check what `add_data_arguments` added, once all flags are parsed."""
        from torchvision import models  # a language model needs no torchvision

        archs = models.list_models(module=models)
        if args.arch not in ("small", *archs):
            self.error(
                f"--arch {args.arch}: neither 'small' nor a torchvision classifier"
            )
        if args.pretrained and args.arch == "small":
            self.error(
                "--pretrained: the small model has no pretrained weights;"
                " choose an --arch"
            )
        needs_dir = args.data not in ("digits", "fake") and not args.download
        with one_line_errors("--data-dir:"):
            if needs_dir and not args.data_dir.is_dir():
                self.error(
                    f"--data-dir {args.data_dir}: no such directory; name the one that"
                    f" holds {args.data}, or add --download"
                )
        if args.workers is None:
            in_files = args.data == "imagefolder" and args.device.type == "cuda"
            processes = getattr(args, "nproc", 1)  # where a launcher starts them
            args.workers = default_workers(processes) if in_files else 0


class TextArgumentParser(ArgumentParser):
    """The same for a language model: its flags of the data and of the model differ."""

    def add_data_arguments(self):
        add = self.add_argument
        add(
            "--text-file",
            may_differ=True,  # a checkpoint has a fingerprint of the text
            type=existing_file,
            metavar="FILE",
            help="train on its bytes, except the last tenth; None: common/text.txt",
        )
        add(
            "--context-length",
            type=positive_int,
            default=32,
            help="bytes in a window of the text",
        )
        add(
            "--width",
            type=positive_int,
            default=64,
            help="size of the vector of each byte",
        )
        add(
            "--depth",
            type=positive_int,
            default=2,
            help="number of transformer blocks",
        )
        add(
            "--heads",
            type=positive_int,
            default=4,
            help="attention heads of each block",
        )

    def check_data_arguments(self, args):
        args.workers = args.workers or 0
        if args.width % args.heads:
            self.error(
                f"--width {args.width} must be divisible by --heads ({args.heads})"
            )
