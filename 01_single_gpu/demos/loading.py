"""Who loads the batches, how far ahead, and what a worker sees of the data set.

python 01_single_gpu/demos/loading.py workers|epochs|ahead|draws
"""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset


class Samples(Dataset):
    """A sample is: the process that loads it, two epochs that it sees, and a draw."""

    def __init__(self):
        self.epoch = 0
        self.shared_epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.loaded = torch.zeros(160, dtype=torch.bool).share_memory_()

    def __len__(self):
        return len(self.loaded)

    def __getitem__(self, index):
        self.loaded[index] = True
        return os.getpid(), self.epoch, self.shared_epoch.item(), torch.rand(())


def columns(loader):
    """Return the samples of an epoch, column by column."""
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


def who_loads():
    for workers in (0, 2):
        pids, *_ = columns(DataLoader(Samples(), batch_size=8, num_workers=workers))
        pids = set(pids.tolist())
        ours = os.getpid() in pids
        name = "the training process" if ours else f"{len(pids)} other processes"
        print(f"num_workers={workers}: the batches are loaded by {name}")


def three_epochs():
    for persistent in (False, True):
        samples = Samples()
        options = {"num_workers": 2, "persistent_workers": persistent}
        loader = DataLoader(samples, batch_size=8, **options)
        all_pids = set()
        for epoch in (1, 2, 3):
            samples.epoch = epoch
            samples.shared_epoch.fill_(epoch)
            pids, epochs, shared_epochs, _ = columns(loader)
            all_pids.update(pids.tolist())
        print(f"persistent_workers={persistent}: {len(all_pids)} workers in 3 epochs;")
        print(f"    in the third they see epoch={epochs[0]}", end=", ")
        print(f"shared_epoch={shared_epochs[0]}")


def batches_ahead():
    for factor in (2, 4):
        samples = Samples()
        loader = DataLoader(samples, 8, num_workers=2, prefetch_factor=factor)
        batches = iter(loader)
        next(batches)  # the batch that is being trained on
        ahead = 2 * factor
        while samples.loaded.sum() < 8 * (1 + ahead):
            time.sleep(0.1)
        time.sleep(1)  # enough to load more, if the workers did
        assert samples.loaded.sum() == 8 * (1 + ahead)
        print(f"num_workers=2, prefetch_factor={factor}: {ahead} batches are waiting")


def draws(workers):
    """Return what an epoch's samples draw from torch's generator, after seed 0."""
    torch.manual_seed(0)
    *_, drawn = columns(DataLoader(Samples(), batch_size=8, num_workers=workers))
    return drawn


def random_numbers():
    for first, second in ((2, 2), (1, 2)):
        same = draws(first).equal(draws(second))
        print(f"{first} and {second} workers, the same seed: the same draws: {same}")


SHOW = {
    "workers": who_loads,
    "epochs": three_epochs,
    "ahead": batches_ahead,
    "draws": random_numbers,
}

if __name__ == "__main__":
    SHOW[sys.argv[1]]()
