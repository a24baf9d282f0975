"""The faults that docs/faults.md names: what a forked process does to itself first.

Each is a `prepare` of harness/commands.py.

Faults come in through hooks that torch and Python offer to everybody: an optimizer
step, a forward pass, or an audit event, such as that a file is opened, renamed or
removed. Where there is no such hook, a function of torch or of Python is replaced.
"""

import argparse
import errno
import fnmatch
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchvision import datasets

from common import checkpoint
from harness import commands

RANKS = ("0", "1", "2", "3")

commands.preloaded += ["tests.fault_injection"]


# ---- moments -------------------------------------------------------------------------
def at_step(number, register, act):
    """Have `act(optimizer)` called in the n-th optimizer step of this run.

    register: one of torch's, for before or after the update. A resumed run counts from
    1 again; a step that is skipped because a gradient is not finite does not count.
    """
    count = itertools.count(1)

    def hook(optimizer, *_):
        # torch takes one with learning rate 0 to make the optimizer's state
        if optimizer.param_groups[0]["lr"] and next(count) == number:
            act(optimizer)

    register(hook)


def at_file_event(event, pattern, call, act):
    """Have `act()` called just before the n-th event of files with such a path.

    event: one of Python's audit events: "open", "os.remove", "shutil.rmtree", or
    "os.rename", for which it is the new path that counts. A directory in which tempfile
    makes a file without a name, to see if it can, is opened for both, and not counted.
    """
    count = itertools.count(1)

    def hook(name, arguments):
        if name == event and not (name == "open" and arguments[2] & os.O_RDWR):
            path = str(arguments[name == "os.rename"])
            if fnmatch.fnmatch(path, pattern) and next(count) == call:
                act()

    sys.addaudithook(hook)


def at_forward_pass(number, rank, change):
    """Have `change(output)` called in a rank's n-th forward pass of training.

    What it returns replaces the model's output, unless it is None.
    """
    count, outermost = itertools.count(1), []

    def note(module, _):
        if module.training and not outermost:
            outermost.append(module)  # the first to be called: it calls the others

    def hook(module, _, output):
        if [module] == outermost and module.training and next(count) == number:
            return change(output) if dist.get_rank() == rank else None
        return None

    register_module_forward_pre_hook(note)
    register_module_forward_hook(hook)


# ---- signals -------------------------------------------------------------------------
def send(*names):
    """Send signals to this process."""
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


def signalled(step, *names, ranks=RANKS):
    """Have these ranks, and their children, get signals in a step of this run.

    That is after its backward pass, for which every rank has been there.
    """

    def send_to_all(_):
        for name in names:
            for child in psutil.Process().children():
                child.send_signal(getattr(signal, name))
            send(name)

    if os.environ["RANK"] in ranks:
        at_step(step, register_optimizer_step_pre_hook, send_to_all)


def signalled_at_file(event, pattern, name="SIGKILL", call=1, ranks=RANKS):
    """Have these ranks get a signal just before an event: see `at_file_event`."""
    if os.environ["RANK"] in ranks:
        at_file_event(event, pattern, call, lambda: send(name))


def signalled_while_evaluating(step, name, ranks=RANKS):
    """Have these ranks get a signal in the evaluation after a step of this run."""
    trained = []

    def hook(*_):
        if trained and not torch.is_grad_enabled():
            trained.clear()
            send(name)

    if os.environ["RANK"] in ranks:
        at_step(step, register_optimizer_step_post_hook, trained.append)
        register_module_forward_pre_hook(hook)


def signalled_from_outside(step, name):
    """Have another process send a signal to this one and its children in a step.

    So does Slurm, to every process of a job. The children are the loaders' workers,
    which can see who sent it.
    """

    def send_to_all(_):
        children = psutil.Process().children()
        for process in (*children, psutil.Process()):
            words = f"kill -{name.removeprefix('SIG')} {process.pid}"
            subprocess.run(["sh", "-c", words], check=True)

        def is_handled():
            live = commands.alive(children)
            return not any(commands.in_mask(each, "ShdPnd", name) for each in live)

        commands.wait_until(is_handled, commands.LIMIT)

    at_step(step, register_optimizer_step_pre_hook, send_to_all)


# ---- files ---------------------------------------------------------------------------
def no_large_files(most, ranks=RANKS):
    """Limit the size of a file for these ranks, as a full disk would."""
    if os.environ.get("RANK") in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def full_at_file(event, pattern, call=1):
    """Have the disk be full just at one event: see `at_file_event`."""

    def refuse():
        raise OSError(errno.ENOSPC, "No space left on device")

    at_file_event(event, pattern, call, refuse)


def read_only_from(step, disk):
    """Have a disk become read-only in a step of this run, as after an error of it.

    It is mounted a second time, over itself: `mount` does not change the first one
    while a file there, the lock, is open.
    """

    def remount(_):
        for words in (["--bind", str(disk)], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *words, str(disk)], check=True)

    if os.environ["RANK"] == "0":
        at_step(step, register_optimizer_step_pre_hook, remount)


def slow_to_write(seconds):
    """Have every file take so long to be complete and get its name."""

    def hook(name, _):
        if name == "os.rename":
            time.sleep(seconds)

    sys.addaudithook(hook)


def late_to_clean(seen):
    """Have rank 0 come late to its first save, and write what the others began."""
    original = checkpoint.remove_unfinished

    def remove(folder):
        if not seen.exists():
            time.sleep(1)
            seen.write_text(" ".join(path.name for path in folder.glob(".step-*")))
        original(folder)

    if os.environ["RANK"] == "0":
        checkpoint.remove_unfinished = remove


def with_flags(*flags, ranks=("1",)):
    """Have these ranks get more flags than the others."""
    original = argparse.ArgumentParser.parse_known_args

    def parse(self, args=None, namespace=None):
        return original(self, args or [*sys.argv[1:], *flags], namespace)

    if os.environ["RANK"] in ranks:
        argparse.ArgumentParser.parse_known_args = parse


def in_folder(folder, *ranks):
    """Have these ranks work in another folder, as if it were another disk."""
    if os.environ["RANK"] in ranks:
        os.chdir(folder)


def on_two_machines(folders, url):
    """Have ranks 0 and 1 be on one machine, and 2 and 3 on another.

    folders: where each works. torchvision downloads the CIFAR-10 of a test from `url`.
    """
    machine, local_rank = divmod(int(os.environ["RANK"]), 2)
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.chdir(folders[machine])
    datasets.CIFAR10.url = url + datasets.CIFAR10.filename
    for name, value in files_of_cifar().items():
        setattr(datasets.CIFAR10, name, value)


def files_of_cifar():
    """Return {attribute: value} of torchvision's class, for files of any content."""
    kind = datasets.CIFAR10
    return {
        "train_list": [["train", None]],
        "test_list": [["test", None]],
        "meta": {**kind.meta, "md5": None},
        "tgz_md5": None,
    }


# ---- training ------------------------------------------------------------------------
def no_step(after):
    """Have every optimizer step fail, after it has waited for a file to be there."""

    def fail(*_):
        print("an optimizer step", flush=True)
        commands.wait_until(after.exists, commands.LIMIT)
        raise RuntimeError("an optimizer step")

    register_optimizer_step_pre_hook(fail)


def nan_logits(step, rank=1):
    """Have a rank's logits be nan in a step of this run, and so its loss."""
    at_forward_pass(step, rank, lambda output: output * torch.nan)


def infinite_gradient(step, rank=1):
    """Have a rank's gradient be infinite in a step of this run; its loss is finite."""

    def change(output):
        output.register_hook(lambda gradient: gradient + torch.inf)

    at_forward_pass(step, rank, change)


def weights_kept(step, folder):
    """Have every rank save its weights, folder/RANK.pt, after an optimizer step."""

    def save(optimizer):
        groups = [group["params"] for group in optimizer.param_groups]
        weights = [each.detach() for group in groups for each in group]
        # FSDP2's are shards, and the other ranks are here, too.
        weights = [
            each.full_tensor() if hasattr(each, "full_tensor") else each
            for each in weights
        ]
        torch.save(weights, Path(folder) / f"{dist.get_rank()}.pt")

    at_step(step, register_optimizer_step_post_hook, save)
