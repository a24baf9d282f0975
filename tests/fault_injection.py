"""What a forked process does to itself before it runs a script: a `prepare` of
tests/harness.py.

These functions are in a file of their own because every fork imports it, and a file of
tests would take seconds. Where torch has a public hook, the fault comes through it.
"""

import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import psutil
import torch
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler
from torchvision import datasets

from common import data


def signalled(step, *names, ranks=("0", "1", "2", "3")):
    """Have these ranks send signals to themselves and their children in step `step`.

    It is the step that the script counts, also in a run that was resumed, where some
    steps may have been skipped. No hook of torch knows that number, but the scripts
    derive a seed from it once per step, before the forward pass.
    """
    derive_seed = data.derive_seed

    def watched(*key):
        if key[1] == step and os.environ["RANK"] in ranks:
            for name in names:
                number = getattr(signal, name)
                for child in psutil.Process().children():
                    child.send_signal(number)
                os.kill(os.getpid(), number)
        return derive_seed(*key)

    data.derive_seed = watched


def killed_at(call, name):
    """Have the process kill itself just before a function's n-th call."""
    owners = {"fsync": os, "replace": Path, "unlink": Path, "rename": Path}
    owner = {**owners, "rmtree": shutil}[name]
    original, calls = getattr(owner, name), itertools.count(1)

    def counted(*args, **options):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(owner, name, counted)


def no_large_files(most):
    """Limit the size of a file, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def slow_to_write(seconds):
    """Have every file take so long to be written, as a large one does."""
    fsync = os.fsync

    def slow(descriptor):
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


def signalled_and_slow_to_write(step, seconds):
    """Have all ranks get SIGTERM in the middle of a step, and write slowly."""
    signalled(step, "SIGTERM")
    slow_to_write(seconds)


def no_step(start_method=None):
    """Have every optimizer step fail; start the loaders' workers by this method."""

    def fail(*_):
        raise RuntimeError("an optimizer step")

    register_optimizer_step_pre_hook(fail)
    multiprocessing.set_start_method(start_method, force=True)


def at_forward_pass(number, rank, register, change):
    """Register a hook that acts in a rank's n-th forward pass of training.

    It is one of DDP's wrapper, or of a whole model that FSDP2 has sharded.
    """
    count = itertools.count(1)

    def hook(module, *values):
        outermost = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        outermost |= type(module).__name__ == "FSDPGPT"
        if outermost and module.training and next(count) == number:
            return change(*values) if dist.get_rank() == rank else None
        return None

    register(hook)


def nan_logits(step, rank=1):
    """Have a rank's logits be nan in a step of this run, and so its loss."""
    register = torch.nn.modules.module.register_module_forward_hook
    at_forward_pass(step, rank, register, lambda _, output: output * torch.nan)


def infinite_gradient(step, rank=1):
    """Have a rank's gradient be infinite in a step of this run; its loss is finite."""
    register = torch.nn.modules.module.register_module_forward_hook

    def change(_, output):
        output.register_hook(lambda gradient: gradient + torch.inf)

    at_forward_pass(step, rank, register, change)


def weights_kept(step, folder):
    """Have every rank save its weights, folder/RANK.pt, after an optimizer step."""
    count = itertools.count(1)

    def save(optimizer, *_):
        # torch takes one with learning rate 0 to make the optimizer's state
        if optimizer.param_groups[0]["lr"] and next(count) == step:
            groups = [group["params"] for group in optimizer.param_groups]
            weights = [each.detach() for group in groups for each in group]
            # FSDP2's are shards, and the other ranks are here, too.
            weights = [
                each.full_tensor() if hasattr(each, "full_tensor") else each
                for each in weights
            ]
            torch.save(weights, Path(folder) / f"{dist.get_rank()}.pt")

    register_optimizer_step_post_hook(save)


def without_ddp():
    """Have the script train the bare model, as if the wrapper had been forgotten."""
    torch.nn.parallel.DistributedDataParallel = lambda model: model


def without_set_epoch():
    """Have the sampler ignore the number of the epoch."""
    DistributedSampler.set_epoch = lambda *_: None


def not_writable():
    """Have no folder be writable, as for a user who is not root."""
    os.access = lambda *_: False


def use_mirror(url):
    """Have torchvision download FashionMNIST from `url`, and not check the MD5."""
    kind = datasets.FashionMNIST
    kind.mirrors = [url]
    kind.resources = [(name, None) for name, _ in kind.resources]
