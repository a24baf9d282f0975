"""How do I resume a training in the middle of a stream (an IterableDataset)?

There is no sampler that could skip. There are two ways, and in both, each rank saves
its own state, and the numbers of ranks and workers stay as they are. **Without a
library**: save the epoch and the number of batches that were taken, and the state of
the rank's generators. To resume, seed them as at the beginning of that epoch, read as
many batches and throw them away, and only then load the states, because the reading may
draw random numbers, too. The workers get their seeds from the loader's `generator`, so
seed that by epoch and rank. What is thrown away has to be read again, which takes its
time. **With torchdata** (`pip install torchdata`), nothing is read again: give the data
set `state_dict` and `load_state_dict`, and use its StatefulDataLoader, whose state has
that of the data set in each worker, as of the last batch that you got.

$ torchrun --standalone --nproc-per-node=2 recipes/resume_stream.py
read again, 0 workers: the uninterrupted run's batches: True
read again, 2 workers: the uninterrupted run's batches: True
read again, without the generators' states: the uninterrupted run's batches: False
StatefulDataLoader, 2 workers: the uninterrupted run's batches: True
"""

import os
import random

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


# ---- the lines to copy ---------------------------------------------------------------
def start_epoch(dataset, epoch, rank, skip=0, **options):
    """Return the batches of an epoch of a stream after the first `skip`."""
    seed = 1000 * epoch + rank  # another for each epoch and rank
    torch.manual_seed(seed)
    random.seed(seed)
    dataset.epoch = epoch
    generator = torch.Generator().manual_seed(seed)
    batches = iter(DataLoader(dataset, generator=generator, **options))
    for _ in range(skip):
        next(batches)
    return batches


def generator_states(device):
    """Return the states of this rank's generators, to be saved by every rank."""
    states = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def load_generator_states(states):
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


class StatefulStream(IterableDataset):
    """Samples 0 to `end`, of which each reader takes every n-th."""

    def __init__(self, end, rank, world_size):
        self.end, self.rank, self.world_size = end, rank, world_size
        self.taken = 0  # by this reader

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first, step = self.rank * workers + worker, self.world_size * workers
        for number in range(first + self.taken * step, self.end, step):
            self.taken += 1  # before the yield: the sample is taken
            yield number
        self.taken = 0  # the next epoch begins at the beginning

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


# ---- the proof -----------------------------------------------------------------------
BATCHES, LOCAL_BATCH, STOP = 12, 2, 7


class Noisy(StatefulStream):
    """The same, in another order in each epoch, and with noise."""

    def __iter__(self):
        numbers = list(range(self.end))
        random.Random(self.epoch).shuffle(numbers)  # the same in all processes
        for place in super().__iter__():
            yield torch.tensor(numbers[place] + random.random()) + torch.rand(1)


def read_again(stream, rank, device, workers, with_states=True):
    """Return the batches of an epoch, and those of one that was resumed in it.

    The model's generators are used between them, as by dropout.
    """
    options = {"batch_size": LOCAL_BATCH, "num_workers": workers}
    whole = []
    for batch in start_epoch(stream, 1, rank, **options):
        whole.append((batch.tolist(), torch.rand(1).item(), random.random()))
        if len(whole) == STOP:
            states = generator_states(device)
    rest = start_epoch(stream, 1, rank, skip=STOP, **options)
    if with_states:
        load_generator_states(states)
    resumed = whole[:STOP]
    for batch in rest:
        resumed.append((batch.tolist(), torch.rand(1).item(), random.random()))
    return whole, resumed


def make_loader(rank, world_size, workers):
    stream = StatefulStream(BATCHES * LOCAL_BATCH * world_size, rank, world_size)
    return StatefulDataLoader(stream, batch_size=LOCAL_BATCH, num_workers=workers)


def stateful(*place):
    """Return the batches of an epoch, and those of one that was resumed in it."""
    whole, batches = list(make_loader(*place)), make_loader(*place)
    iterator = iter(batches)
    taken = [next(iterator) for _ in range(STOP)]
    resumed = make_loader(*place)
    resumed.load_state_dict(batches.state_dict())
    return torch.stack(whole).tolist(), torch.stack([*taken, *resumed]).tolist()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    noisy = Noisy(BATCHES * LOCAL_BATCH * world_size, rank, world_size)
    for name, (whole, resumed), expected in (
        ("read again, 0 workers", read_again(noisy, rank, device, 0), True),
        ("read again, 2 workers", read_again(noisy, rank, device, 2), True),
        (
            "read again, without the generators' states",
            read_again(noisy, rank, device, 2, with_states=False),
            False,
        ),
        ("StatefulDataLoader, 2 workers", stateful(rank, world_size, 2), True),
    ):
        assert len(whole) == BATCHES and (resumed == whole) == expected, name
        if rank == 0:
            print(f"{name}: the uninterrupted run's batches: {expected}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
