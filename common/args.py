"""The flags that every stage has, checked as they are parsed."""

import argparse
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torchvision

DATA_SETS = ("digits", "fashionmnist", "cifar10", "cifar100", "imagefolder", "fake")


def fail(message):
    """End the program as a wrong flag does: one line on standard error, exit code 2."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    sys.exit(2)


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
    path = Path(text)
    parents = (path, *path.absolute().parents)
    existing = next(parent for parent in parents if parent.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file, not a directory")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{existing} is not writable")
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
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
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


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows a flag's default value after its help text."""

    def _get_help_string(self, action):
        hidden = action.default is None or action.default is False
        if hidden or action.default == argparse.SUPPRESS:
            return action.help
        return f"{action.help} (default: %(default)s)"


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
            default=60,
            help="global batch size, that is, of all processes together",
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
            help="how strongly each step pulls the weights toward zero",
        )
        add(
            "--workers",
            type=number(int, ge=0),
            help="worker processes of each DataLoader; 0 loads in the main process"
            " (default: 0; for imagefolder on a GPU 1 to 8, by cores and processes)",
        )
        add(
            "--seed",
            type=number(int, ge=0, le=2**31),
            default=0,
            help="seed of the initial weights, and of the order and the augmentation of"
            " the training set",
        )
        add(
            "--device",
            choices=("auto", "cpu", "cuda"),
            default="auto",
            help="'auto' is cuda if a GPU is visible, otherwise cpu",
        )
        add(
            "--dtype",
            type=dtype,
            default="float32",
            metavar="{float32,float64}",
            help="type of the weights and of what is computed with them",
        )
        add(
            "--tf32",
            action="store_true",
            help="let a GPU round the factors of float32 products to 10 bits: faster",
        )
        add(
            "--deterministic",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="use only algorithms of cuDNN that give the same bits every time",
        )
        add(
            "--timeout",
            type=seconds,
            default="300",
            metavar="SECONDS",
            help="how long a process waits for the others",
        )
        add(
            "--out-dir",
            type=writable_dir,
            help="write metrics.jsonl, last.pt and best.pt here after every epoch",
        )
        add(
            "--evaluate",
            type=existing_file,
            metavar="FILE",
            help="load these weights, evaluate them, and do not train",
        )

    def add_data_arguments(self):
        """Add the flags of the data set and of the model."""
        add = self.add_argument
        add(
            "--data",
            choices=DATA_SETS,
            default="digits",
            help="data set; 'digits' needs no download, 'fake' is random images, and"
            " 'imagefolder' has ImageNet's layout",
        )
        add(
            "--data-dir",
            type=Path,
            default=Path("data"),
            help="directory of the data set",
        )
        add(
            "--download",
            action="store_true",
            help="download the data set into --data-dir if it is missing",
        )
        add(
            "--image-size",
            type=number(int, ge=8),
            default=224,
            help="height and width of the images of imagefolder and fake",
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
            help="'small', or the name of a torchvision classifier, such as resnet18",
        )
        add(
            "--pretrained",
            action="store_true",
            help="start from torchvision's pretrained weights, which are downloaded",
        )
        add(
            "--memory-format",
            type=memory_format,
            default="channels_last",
            metavar="{channels_last,contiguous}",
            help="order of images and features in memory",
        )

    def error(self, message):
        fail(message.removeprefix("argument "))

    def parse_args(self, *args, **kwargs):
        """Parse and check the flags; `device` is returned as a torch.device."""
        args = super().parse_args(*args, **kwargs)
        if args.device == "cuda" and not torch.cuda.is_available():
            self.error("--device cuda: no GPU is visible; use --device cpu")
        if args.device == "auto":
            args.device = "cuda" if torch.cuda.is_available() else "cpu"
        args.device = torch.device(args.device)
        self.check_data_arguments(args)
        return args

    def check_data_arguments(self, args):
        """Check what `add_data_arguments` added, once all flags are parsed."""
        archs = torchvision.models.list_models(module=torchvision.models)
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
        if needs_dir and not args.data_dir.is_dir():
            self.error(
                f"--data-dir {args.data_dir}: no such directory; name the one that"
                f" holds {args.data}, or add --download"
            )


class TextArgumentParser(ArgumentParser):
    """The same for a language model: its flags of the data and of the model differ."""

    def add_data_arguments(self):
        add = self.add_argument
        add(
            "--text-file",
            type=existing_file,
            metavar="FILE",
            help="train on the bytes of this file, and validate on its last tenth"
            " (default: common/text.txt)",
        )
        add(
            "--context-length",
            type=positive_int,
            default=32,
            help="bytes in a window of the text, as far as the model can look back",
        )
        add(
            "--width",
            type=positive_int,
            default=64,
            help="size of the vector that the model keeps for each byte",
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
            help="attention heads in each block; they share --width equally",
        )

    def check_data_arguments(self, args):
        if args.width % args.heads:
            self.error(
                f"--width {args.width} must be divisible by --heads ({args.heads})"
            )
