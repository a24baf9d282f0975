"""StatefulDataLoader: how do I resume a stream without reading it again?

Give the data set `state_dict` and `load_state_dict`, and use torchdata's DataLoader
(`pip install torchdata`). The loader's state has that of the data set in each worker,
as of the last batch that you got: what the workers have read ahead does not count. Each
rank saves its own. A state that was taken in the loop after the last batch is of an
epoch with nothing left: it resumes with no batch, and nothing says so. So save the
number of the epoch with it, as `position` does, and that is right: 0 batches are the
rest of that epoch. Counted as the next epoch, they are an epoch without a step. The
numbers of ranks and workers must stay as they are. For another number of ranks, save
how many samples all have taken, and begin the stream there: that is exact if the ranks
take turns (without workers, which read in batches). resume_stream.py does without
torchdata, but reads again what was taken; it also shows how to save the generators that
augmentations draw from.

$ torchrun --standalone --nproc-per-node=2 recipes/stateful_loader.py
0 workers, resumed after 3 batches: the uninterrupted run's batches: True
2 workers, resumed after 3 batches: the uninterrupted run's batches: True
state taken in the loop, after an epoch's last batch: the other epochs follow: True
the same, and counted as the next epoch: the other epochs follow: False
state taken after the loop: the other epochs follow: True
one rank more, each loads the state of another rank: every sample once: False
one rank more, begun at the number of samples taken: every sample once: True
"""

import os

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


# ---- the lines to copy ---------------------------------------------------------------
class Stream(IterableDataset):
    """Samples `begin` to `end`, of which each reader takes every n-th."""

    def __init__(self, begin, end, rank, world_size):
        self.begin, self.end = begin, end
        self.rank, self.world_size = rank, world_size
        self.taken = 0  # by this reader

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = self.begin + self.rank * workers + worker
        step = self.world_size * workers
        for number in range(first + self.taken * step, self.end, step):
            self.taken += 1  # before the yield: the sample is taken
            yield number
        self.taken = 0  # the next epoch begins at the beginning

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def position(batches, epoch, ended=False):
    """Return what a checkpoint needs. ended: the loop over the epoch has ended."""
    return {"epoch": epoch + ended, "loader": batches.state_dict()}


def epochs_from(batches, epochs, saved=None):
    """Yield the number of each epoch that is left, from the position that was saved."""
    first = 0
    if saved:
        first = saved["epoch"]
        batches.load_state_dict(saved["loader"])
    yield from range(first, epochs)


# ---- the proof -----------------------------------------------------------------------
SAMPLES, LOCAL_BATCH, STOP, EPOCHS = 120, 4, 3, 3


def loader(rank, world_size, workers=0, begin=0):
    stream = Stream(begin, SAMPLES, rank, world_size)
    return StatefulDataLoader(stream, batch_size=LOCAL_BATCH, num_workers=workers)


def numbers(batches):
    return [number for batch in batches for number in batch.tolist()]


def stopped(rank, world_size, workers=0):
    """Return what a rank reads before it stops, and its loader's state then."""
    batches = loader(rank, world_size, workers)
    iterator = iter(batches)
    taken = numbers(next(iterator) for _ in range(STOP))
    return taken, batches.state_dict()


def at_an_epochs_end(rank, world_size):
    """Return the position in the loop after the first epoch's last batch, and after."""
    batches = loader(rank, world_size)
    for _ in batches:
        in_the_loop = position(batches, epoch=0)
    return in_the_loop, position(batches, epoch=0, ended=True)


def follow(saved, rank, world_size):
    """Return {epoch: what a rank reads in it} of a resumed run."""
    batches = loader(rank, world_size)
    return {e: numbers(batches) for e in epochs_from(batches, EPOCHS, saved)}


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    says = {}
    for workers in (0, 2):
        taken, state = stopped(rank, world_size, workers)
        resumed = loader(rank, world_size, workers)
        resumed.load_state_dict(state)
        whole = numbers(loader(rank, world_size, workers))
        equal = torch.tensor(int(taken + numbers(resumed) == whole), device=device)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        what = (
            f"{workers} workers, resumed after {STOP} batches: the uninterrupted run's"
        )
        says[f"{what} batches"] = bool(equal.item())
    in_the_loop, after_it = at_an_epochs_end(rank, world_size)
    whole = numbers(loader(rank, world_size))
    for when, saved in (
        ("state taken in the loop, after an epoch's last batch", in_the_loop),
        ("the same, and counted as the next epoch", in_the_loop | {"epoch": 1}),
        ("state taken after the loop", after_it),
    ):
        taken = follow(saved, rank, world_size)
        nothing_left = not taken.pop(0, [])  # of the first epoch
        others = taken == dict.fromkeys(range(1, EPOCHS), whole)
        says[f"{when}: the other epochs follow"] = nothing_left and others
    # The ranks of the run that stopped, and one more: here all on each rank.
    states = [stopped(each, world_size) for each in range(world_size)]
    before = [number for taken, _ in states for number in taken]
    more = world_size + 1
    loaders = [loader(each, more) for each in range(more)]
    for each, one in enumerate(loaders):
        one.load_state_dict(states[each % world_size][1])
    every = sorted(before + [n for one in loaders for n in numbers(one)])
    what = "one rank more, each loads the state of another rank: every sample once"
    says[what] = every == [*range(SAMPLES)]
    loaders = [loader(each, more, begin=len(before)) for each in range(more)]
    every = sorted(before + [n for one in loaders for n in numbers(one)])
    what = "one rank more, begun at the number of samples taken: every sample once"
    says[what] = every == [*range(SAMPLES)]
    assert [*says.values()] == [True, True, True, False, True, False, True], says
    if rank == 0:
        for what, value in says.items():
            print(f"{what}: {value}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
