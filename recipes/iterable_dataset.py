"""Why does my IterableDataset return duplicated data with DDP and several workers?

A plain IterableDataset is not sharded: every worker of every rank reads all of it, and
a DataLoader accepts no sampler for it. Let each worker skip the others' samples, in an
order that is the same in all processes. Remove what your stream divides by itself, with
`get_worker_info` say: it would be divided twice. Libraries have this built in: Hugging
Face's `split_dataset_by_node`, WebDataset's `split_by_node`. The ranks can then have
different numbers of batches. Stop the training of all of them together: the extra
batches are lost, and a small all-reduce per step tells every rank whether all have a
batch. An evaluation needs no such stop: there each rank takes all its batches, with the
model without the wrapper, and at the end sums and counts are all-reduced.

$ torchrun --standalone --nproc-per-node=2 recipes/iterable_dataset.py
Stream: every sample is read 4 time(s)
Sharded: every sample is read 1 time(s)
read by rank 0: [0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24]
batches per rank: [7, 6]
trained together: 6 batches on every rank, the same weights on all
evaluated: every sample once
"""

import gc
import itertools
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset
from torch.utils.data import get_worker_info


# ---- the lines to copy ---------------------------------------------------------------
class Sharded(IterableDataset):
    """Another IterableDataset's samples, each in one worker of one rank only."""

    def __init__(self, dataset, rank, world_size):
        # Kept here: a worker is a process of its own, outside the process group.
        self.dataset, self.rank, self.world_size = dataset, rank, world_size

    def __iter__(self):
        info = get_worker_info()  # None with num_workers=0
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = self.rank * workers + worker, self.world_size * workers
        # This reads what it skips. If there are many files: files[reader::readers].
        return itertools.islice(self.dataset, reader, None, readers)


def batches_that_all_have(loader, device):
    """Yield a loader's batches for as long as every rank has one."""
    iterator = iter(loader)
    while True:
        batch = next(iterator, None)
        everybody = torch.tensor(batch is not None, dtype=torch.int32, device=device)
        dist.all_reduce(everybody, dist.ReduceOp.MIN)
        if not everybody:
            return
        yield batch


# ---- the proof -----------------------------------------------------------------------
class Stream(IterableDataset):
    """A stand-in for data of unknown length, such as lines read from files."""

    def __iter__(self):
        for number in range(25):
            yield torch.tensor([number], dtype=torch.float64)


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def from_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded = Sharded(Stream(), rank, world_size)
    for dataset, times in ((Stream(), 2 * world_size), (sharded, 1)):
        batches = list(DataLoader(dataset, batch_size=2, num_workers=2))
        own = [sample.item() for batch in batches for sample in batch]
        reads = Counter(itertools.chain.from_iterable(from_all_ranks(own)))
        assert reads == dict.fromkeys(range(25), times)
        log(f"{type(dataset).__name__}: every sample is read {times} time(s)")
    log(f"read by rank 0: {[int(sample) for sample in own]}")
    batches_per_rank = from_all_ranks(len(batches))
    log(f"batches per rank: {batches_per_rank}")

    model = nn.Linear(1, 1, dtype=torch.float64, device=device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = 0
    loader = DataLoader(sharded, batch_size=2, num_workers=2)
    for batch in batches_that_all_have(loader, device):
        optimizer.zero_grad()
        wrapped(batch.to(device)).square().mean().backward()
        optimizer.step()
        steps += 1
    assert set(from_all_ranks(steps)) == {min(batches_per_rank)}
    weights = from_all_ranks([weight.tolist() for weight in model.parameters()])
    assert all(weight == weights[0] for weight in weights)
    log(f"trained together: {steps} batches on every rank, the same weights on all")

    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in loader:  # not batches_that_all_have, which would leave some out
            sums[0] += model(batch.to(device)).sum()
            sums[1] += len(batch)
    dist.all_reduce(sums)
    assert sums[1] == 25
    whole = model(torch.arange(25, dtype=torch.float64, device=device)[:, None]).sum()
    assert sums[0].allclose(whole)
    log("evaluated: every sample once")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
