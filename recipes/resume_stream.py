"""How do I resume a training in the middle of a stream (an IterableDataset)?

There is no sampler that could skip. Save the epoch and the number of batches that each
rank has taken, and on every rank the state of its generators. To resume, seed them as
at the beginning of that epoch, read as many batches and throw them away, and only then
load the states, because the reading may draw random numbers, too. The workers get their
seeds from the loader's `generator`, so seed that by epoch and rank. Resume with as many
ranks and workers: the number counts the batches of one rank. What is thrown away has to
be read again, which takes its time.

$ torchrun --standalone --nproc-per-node=2 recipes/resume_stream.py
0 workers, resumed after 7 of 12 batches: equal to the uninterrupted run: True
2 workers, resumed after 7 of 12 batches: equal to the uninterrupted run: True
2 workers, without the generators' states: equal to the uninterrupted run: False
"""

import gc
import itertools
import os
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset
from torch.utils.data import get_worker_info


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


# ---- the proof -----------------------------------------------------------------------
EPOCHS, SAMPLES, LOCAL_BATCH, STOP = 2, 24, 2, 7


class Stream(IterableDataset):
    """Numbers in another order in each epoch, each with noise."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = list(range(SAMPLES * self.world_size))
        random.Random(self.epoch).shuffle(numbers)  # the same in all processes
        reader = self.rank * workers + worker
        readers = self.world_size * workers
        for number in itertools.islice(numbers, reader, None, readers):
            noise = torch.randn(1) + random.random()
            yield torch.tensor([number / SAMPLES]) + 0.1 * noise


def train(folder, device, workers, stop=None, resume=False, with_states=True):
    """Train, or until a batch of the last epoch, or from there; return the weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = Stream(rank, world_size)
    options = {"batch_size": LOCAL_BATCH, "num_workers": workers}
    torch.manual_seed(0)
    layers = nn.Linear(1, 16), nn.Dropout(0.2), nn.SiLU(), nn.Linear(16, 1)
    model = nn.Sequential(*layers).to(device)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, done = 0, 0
    if resume:
        saved = torch.load(folder / "model.pt", map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        first, done = saved["epoch"], saved["done"]
    for epoch in range(first, EPOCHS):
        batches = start_epoch(stream, epoch, rank, skip=done, **options)
        if resume and with_states and epoch == first:
            states = torch.load(folder / f"states-{rank}.pt", weights_only=True)
            load_generator_states(states)
        for batch in batches:
            inputs = batch.to(device)
            optimizer.zero_grad()
            loss = (wrapped(inputs) - (3 * inputs).sin()).square().mean()
            loss.backward()
            optimizer.step()
            done += 1
            if epoch == EPOCHS - 1 and done == stop:
                if rank == 0:
                    state = {"model": model.state_dict(), "epoch": epoch, "done": done}
                    torch.save(state, folder / "model.pt")
                torch.save(generator_states(device), folder / f"states-{rank}.pt")
                dist.barrier()
                return None
        done = 0
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names, src=0)  # rank 0's, for all
        folder = Path(names[0])
        for workers, with_states in ((0, True), (2, True), (2, False)):
            whole = train(folder, device, workers)
            train(folder, device, workers, stop=STOP)
            options = {"resume": True, "with_states": with_states}
            resumed = train(folder, device, workers, **options)
            equal = torch.equal(resumed, whole)
            assert equal == with_states
            says = "without the generators' states"
            if with_states:
                says = f"resumed after {STOP} of {SAMPLES // LOCAL_BATCH} batches"
            says = f"{workers} workers, {says}: equal to the uninterrupted run"
            if rank == 0:
                print(f"{says}: {equal}", flush=True)
        dist.barrier()  # rank 0's folder ends here


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
