"""The DataLoader's plumbing: options that every loader gets, resuming, and signals."""

import multiprocessing
import os
import signal
import threading

from torch.utils.data import DataLoader
from torch.utils.data import default_collate


def collate(batch):
    """Return a batch from `__getitems__` as it is; collate a list of samples."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def num_workers(args):
    """Return --workers, or as many as the data set needs to keep a GPU busy.

    One core gathers images or text in memory faster than a GPU trains on them. Files
    are decoded by all cores that this process can have, up to 8, except one.
    """
    if args.workers is not None:
        return args.workers
    # A text has no --data.
    in_files = getattr(args, "data", "") == "imagefolder"
    if not in_files or args.device.type == "cpu":
        return 0
    if hasattr(os, "sched_getaffinity"):  # on Linux: what Slurm leaves to this process
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    # torchrun sets the variable; where the script starts the processes, it has --nproc.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", getattr(args, "nproc", 1)))
    return max(1, min(8, cores // processes - 1))


def loader_options(args):
    """Return the keyword arguments that every DataLoader gets."""
    workers = num_workers(args)
    return {
        "collate_fn": collate,
        "num_workers": workers,
        # Otherwise every epoch starts new workers, and the first batches are late.
        "persistent_workers": workers > 0,
        "prefetch_factor": 4 if workers else None,
        # From pinned memory a copy to the GPU does not make Python wait.
        "pin_memory": args.device.type == "cuda",
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

    To be given as `worker_init_fn`. Launchers and Slurm send SIGTERM to every process
    of a run. The one that trains decides what to do about it, and without its workers
    it could not even finish the step that it has begun.
    """
    parent = multiprocessing.parent_process().pid  # os.getppid() may be a fork server

    def wait():
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=wait, daemon=True).start()
