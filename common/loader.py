"""The DataLoader's plumbing: options that every loader gets, resuming, and signals."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import default_collate

from common.args import fail


class SampleError(ValueError):
    """A sample that cannot be read; the message names its file and says why."""

    def __str__(self):
        # a DataLoader's worker sends its traceback, which ends with the message
        *_, last = super().__str__().splitlines()
        return last.rpartition(f"{type(self).__name__}: ")[2]


def readable(loader):
    """Yield a loader's batches; a SampleError ends the program with its message."""
    try:
        yield from loader
    except SampleError as error:
        fail(f"--data: {error}")


def collate(batch):
    """Return a batch from `__getitems__` as it is; collate a list of samples."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def derive_seed(*key):
    """Return a seed, 0 to 2**32 - 1, that depends on all the integers of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def shared_epoch():
    """Return a number in shared memory: int64 [], which all of a set's workers see."""
    return torch.zeros((), dtype=torch.int64).share_memory_()


def loader_options(device, num_workers):
    """Return the keyword arguments that every DataLoader gets."""
    return {
        "collate_fn": collate,
        "num_workers": num_workers,
        # Otherwise every epoch starts new workers, and the first batches are late.
        "persistent_workers": num_workers > 0,
        "prefetch_factor": 4 if num_workers else None,
        # From pinned memory a copy to the GPU does not make Python wait.
        "pin_memory": device.type == "cuda",
    }


def skip_first_batches(loader, num_batches):
    """Return a loader of the rest of the epoch; the skipped batches are not read."""
    if num_batches == 0:
        return loader
    indices = list(loader.sampler)
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        sampler=indices[num_batches * loader.batch_size :],
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        pin_memory=loader.pin_memory,
    )


def ignore_launcher_sigterm(worker_id):  # noqa: ARG001 (DataLoader passes it)
    """Have a DataLoader's worker end on a SIGTERM from its own process only.

    To be given as `worker_init_fn`. Slurm with proctrack/linuxproc sends SIGTERM to
    every process of a run; torchrun sends it to the process group of each rank, in
    which its workers are. The process that trains decides what to do about it, and
    without its workers it could not even finish the step that it has begun. Ignoring
    the signal is not enough: at exit, multiprocessing ends its workers by a SIGTERM,
    and waits for them without a limit.
    """
    parent = multiprocessing.parent_process().pid  # os.getppid() may be a fork server

    def wait():
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=wait, daemon=True).start()
