"""The flags that every stage has, checked as they are read."""

import argparse
import functools
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torchvision

DATA_SETS = ("digits", "fashionmnist", "cifar10", "cifar100", "imagefolder", "fake")


def stop(message):
    """End the program as a wrong flag does: one line on standard error and exit code 2."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    sys.exit(2)


def explain(variables, *errors):
    """Return a decorator: where the function raises one of `errors`, the program ends as by `stop`.

    The line names `variables`, which the user should check, and quotes the error.
    """

    def decorate(function):
        @functools.wraps(function)
        def explained(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except errors as error:
                stop(f"check {variables}: {' '.join(str(error).split())}")

        return explained

    return decorate


def nth_device(args, n):
    """Return the CPU, or GPU number n of those that are visible, as --device asks."""
    if args.device.type == "cpu":
        return args.device
    gpus = torch.cuda.device_count()
    if n >= gpus:
        stop(f"--device cuda: process {n + 1} of this machine has no GPU, for {gpus} are visible;"
             " start one process per GPU, and let each see all of its machine")  # fmt: skip
    return torch.device("cuda", n)


def share(args, parts):
    """Stop unless `parts` equal parts make up the global batch."""
    if args.batch_size % parts:
        fits = max(1, round(args.batch_size / parts)) * parts
        stop(f"--batch-size {args.batch_size}: it counts the images of all processes together, and"
             f" {parts} processes cannot share it equally; {fits} they can")  # fmt: skip


def place(args, index, count, local_index):
    """Return this process's place, as a launcher wrote it into the environment.

    index, count, local_index: the names of the variables that hold the process's number, how many
    processes there are, and its number on this machine. Returns the three numbers. One that is
    missing, no number, or at odds with the others, or a batch that the processes cannot share
    equally, ends the program with one line.
    """
    values = {name: os.environ.get(name, "") for name in (index, count, local_index)}
    for name, value in values.items():
        if not value.isdecimal():
            commands = sys.modules["__main__"].__doc__.strip().splitlines()[2:]
            commands = " or ".join(command.partition("  # ")[0] for command in commands)
            stop(f"{name} is {value or 'not set'}: a launcher sets it; start with: {commands}")
    number, numbers, local_number = (int(value) for value in values.values())
    if not local_number <= number < numbers:
        stripped = " ".join(f"{name}={value}" for name, value in values.items())
        stop(f"{stripped} contradict each other: leave them to the launcher")
    share(args, numbers)
    return number, numbers, local_number


def number(kind, least=-math.inf, above=-math.inf, most=math.inf):
    """Return an argparse type: an int or a float (`kind`), from `least` or `above` to `most`."""
    low = f"greater than {above}" if above > -math.inf else f"{least} or more"
    high = f" and at most {most}" if most < math.inf else ""
    name = {int: "a whole number", float: "a number"}[kind]

    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and above < value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}, {low}{high}")
        return value

    return read


def new_folder(text):
    """Argparse type: a folder that is there or can be made. It is not made yet."""
    path = Path(text)
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file, not a folder")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{existing} is not writable")
    return path


def new_file(text):
    """Argparse type: a file that can be made, or written anew. It is not made yet."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder that is there and writable")
    return path


def existing_file(text):
    """Argparse type: a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


class Flags(argparse.ArgumentParser):
    """An argument parser that already holds the flags of every stage.

    A wrong flag is reported in one line, without the usage text, and ends the program with
    exit code 2. Abbreviations are off: a flag added by a later stage must not change what a
    command of an earlier one means.
    """

    def __init__(self, doc):
        super().__init__(
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add = self.add_argument
        positive = number(int, least=1)
        add("--data", choices=DATA_SETS, default="digits", help="data set (default: digits)")
        add("--data-dir", type=Path, default=Path("data"), help="its folder (default: data)")
        add("--download", action="store_true", help="download the data set if it is missing")
        add("--image-size", type=number(int, least=8), default=224, help="of imagefolder and fake")
        add("--images", type=positive, default=1000, help="number of training images of fake")
        add("--arch", default="small", help="'small' or a torchvision model, such as resnet18")
        add("--pretrained", action="store_true", help="start from torchvision's weights")
        add("--epochs", type=positive, default=5, help="passes over the training set (default: 5)")
        add(
            "--batch-size",
            type=positive,
            default=60,
            help="of all processes together (default: 60)",
        )
        add("--lr", type=number(float, above=0), default=0.05, help="peak value (default: 0.05)")
        add("--weight-decay", type=number(float, least=0), default=5e-4, help="(default: 0.0005)")
        add("--workers", type=number(int, least=0), default=0, help="of each loader (default: 0)")
        add("--seed", type=number(int, least=0, most=2**31), default=0, help="(default: 0)")
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
        add("--dtype", choices=("float32", "float64"), default="float32", help="of the weights")
        add("--timeout", type=number(float, least=1, most=10**6), default=300.0,
            help="seconds that a process waits for the others (default: 300)")  # fmt: skip
        add("--out-dir", type=new_folder, help="folder for metrics.jsonl, last.pt and best.pt")
        add("--evaluate", type=existing_file, metavar="FILE", help="only evaluate these weights")

    def error(self, message):
        stop(message.removeprefix("argument "))

    def parse_args(self, *args, **kwargs):
        """Read and check the flags.

        Returns a namespace in which `device` is a torch.device, `dtype` a torch.dtype and
        `timeout` a timedelta.
        """
        args = super().parse_args(*args, **kwargs)
        if args.device == "cuda" and not torch.cuda.is_available():
            self.error("--device cuda: no GPU is visible here; use --device cpu")
        if args.device == "auto":
            args.device = "cuda" if torch.cuda.is_available() else "cpu"
        args.device = torch.device(args.device)
        args.dtype = getattr(torch, args.dtype)
        args.timeout = timedelta(seconds=args.timeout)
        archs = torchvision.models.list_models(module=torchvision.models)
        if args.arch not in ("small", *archs):
            self.error(f"--arch {args.arch}: neither 'small' nor one of torchvision's classifiers")
        if args.pretrained and args.arch == "small":
            self.error("--pretrained: the small model has no published weights; choose an --arch")
        needs_folder = args.data not in ("digits", "fake") and not args.download
        if needs_folder and not args.data_dir.is_dir():
            self.error(f"--data-dir {args.data_dir}: there is no such folder; name the one that"
                       f" holds {args.data}, or give --download")  # fmt: skip
        return args
