"""What a DataLoader's workers do, with samples that each take 20 ms to load.

python 01_single_gpu/demos/loading.py
"""

import os
import time

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset


class SlowSamples(Dataset):
    """Each sample sleeps, and says which process loaded it, and in which epoch."""

    def __init__(self, n):
        self.loaded = torch.zeros(n, dtype=torch.bool).share_memory_()
        self.epoch = 0

    def __len__(self):
        return len(self.loaded)

    def __getitem__(self, index):
        time.sleep(0.02)  # it reads a file, say, and decodes an image
        self.loaded[index] = True
        return os.getpid(), self.epoch


def seconds(workers):
    """Return how long 12 batches take after the first, with 100 ms of training each."""
    loader = DataLoader(SlowSamples(104), batch_size=8, num_workers=workers)
    batches = iter(loader)
    next(batches)  # workers take a moment to start
    start = time.perf_counter()
    for _ in batches:
        time.sleep(0.1)
    return time.perf_counter() - start


def three_epochs(persistent):
    """Return how many workers there were, and the epoch that the last one saw."""
    samples = SlowSamples(8)
    loader = DataLoader(samples, num_workers=2, persistent_workers=persistent)
    workers = set()
    for epoch in (1, 2, 3):
        samples.epoch = epoch
        for pid, seen in loader:
            workers.add(pid.item())
            epoch_seen = seen.item()
    return len(workers), epoch_seen


def batches_ahead(factor):
    """Return how many batches have been loaded when the first is being trained on."""
    samples = SlowSamples(160)
    batches = iter(DataLoader(samples, 8, num_workers=2, prefetch_factor=factor))
    next(batches)
    time.sleep(2)
    return samples.loaded.sum().item() // 8 - 1


if __name__ == "__main__":
    ratio = seconds(workers=0) / seconds(workers=2)
    assert ratio > 1.5, ratio
    print("2 workers instead of 0: more than 1.5 times as fast")
    for persistent in (False, True):
        workers, epoch = three_epochs(persistent)
        print(f"persistent_workers={persistent}: {workers} processes in 3 epochs,")
        print(f"    which see samples.epoch = {epoch} in the third")
    print(f"2 workers, prefetch_factor=2: {batches_ahead(2)} more batches are loaded")
