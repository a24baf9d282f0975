"""What a loader's workers see of their data set, and which random numbers they draw.

python 01_single_gpu/demos/loading.py epochs|draws
"""

import sys

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset


class Samples(Dataset):
    """A sample is: two epochs as the process that loads it sees them, and a draw."""

    def __init__(self):
        self.epoch = 0
        self.shared_epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self):
        return 160

    def __getitem__(self, index):
        return self.epoch, self.shared_epoch.item(), torch.rand(())


def columns(loader):
    """Return the samples of an epoch, column by column."""
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


def epochs():
    for persistent in (False, True):
        samples = Samples()
        options = {"num_workers": 2, "persistent_workers": persistent}
        loader = DataLoader(samples, batch_size=8, **options)
        for epoch in (1, 2, 3):
            samples.epoch = epoch
            samples.shared_epoch.fill_(epoch)
            seen, shared, _ = columns(loader)
        print(f"persistent_workers={persistent}: in the third epoch, the workers see")
        print(f"    epoch={seen[0]}, shared_epoch={shared[0]}")


def drawn(workers):
    """Return what an epoch's samples draw from torch's generator, after seed 0."""
    torch.manual_seed(0)
    *_, draws = columns(DataLoader(Samples(), batch_size=8, num_workers=workers))
    return draws


def draws():
    for first, second in ((2, 2), (1, 2)):
        same = drawn(first).equal(drawn(second))
        print(f"{first} and {second} workers, the same seed: the same draws: {same}")


if __name__ == "__main__":
    {"epochs": epochs, "draws": draws}[sys.argv[1]]()
