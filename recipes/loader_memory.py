"""Why does the memory of my DataLoader's workers grow during the epoch?

The data set holds a list of Python objects, such as file names. A forked worker shares
the memory of its parent until one of them writes to it, and reading a Python object
writes to it: its reference count changes. So each worker copies the list while it reads
it, and with 8 GPUs and 8 workers each there are 64 copies. Keep the names in one NumPy
array or tensor, which has one reference count. Workers that are not forked, as by
default since Python 3.14, receive a whole copy at their start; an array is smaller.

$ python recipes/loader_memory.py
300000 names in a list: a worker copied most of the list's memory: True
300000 names in an array: a worker copied most of the list's memory: False
"""

import sys
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data import Dataset


# ---- the lines to copy ---------------------------------------------------------------
class NamesInArray(Dataset):
    def __init__(self, names):
        # Each takes as many bytes as the longest one.
        self.names = np.array([name.encode() for name in names])

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.names[index].decode()


# ---- the proof -----------------------------------------------------------------------
class NamesInList(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.names[index]


def private_bytes():
    """Return the memory that only this process has; Linux says it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024


class Measured(Dataset):
    """Reads another data set; the last sample is how much memory that has taken."""

    def __init__(self, data_set):
        self.data_set = data_set

    def __len__(self):
        return len(self.data_set)

    def __getitem__(self, index):
        if index == 0:
            self.before = private_bytes()
        assert self.data_set[index].endswith(".jpg")
        return private_bytes() - self.before if index == len(self) - 1 else 0


def make_names():
    return [f"train/class_{i % 1000:04}/image_{i:08}.jpg" for i in range(300_000)]


def main():
    names = make_names()
    size = sum(map(sys.getsizeof, names))
    for kind, data_set in (("a list", NamesInList), ("an array", NamesInArray)):
        measured = Measured(data_set(names))
        loader = DataLoader(
            measured, batch_size=1000, num_workers=1, multiprocessing_context="fork"
        )
        copied = max(batch.max().item() for batch in loader)
        most = copied > size / 2
        assert most == (data_set is NamesInList)
        text = "a worker copied most of the list's memory"
        print(f"{len(names)} names in {kind}: {text}: {most}", flush=True)
        print(f"{copied / 2**20:.0f} of {size / 2**20:.0f} MiB", file=sys.stderr)


if __name__ == "__main__":
    main()
