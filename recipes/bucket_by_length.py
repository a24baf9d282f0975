"""A batch sampler (buckets of similar lengths) with DDP: how do I divide its batches?

A loader with `batch_sampler=` takes neither a DistributedSampler nor `drop_last`: with
one of them it raises "batch_sampler option is mutually exclusive with ...". Let all
ranks make the same batches, and let each take every n-th sample of each batch, as
`SplitBatches` does. If the number of ranks divides the batches, a training takes the
steps of a single process, and in each step all ranks get samples of similar lengths.
(Do not deal out whole batches, every n-th to each rank: every rank would wait for the
one with the longest samples.)

$ torchrun --standalone --nproc-per-node=2 recipes/bucket_by_length.py
every batch is that of one process: True
padded tokens of the longest rank, beside the mean of all: 1.00
"""

import os

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


# ---- the lines to copy ---------------------------------------------------------------
class SplitBatches:
    """This rank's part of each batch of a batch sampler.

    The sampler has to give the same batches on all ranks, so `set_epoch` has to seed
    what it draws with.
    """

    def __init__(self, batches, rank, world_size):
        self.batches, self.rank, self.world_size = batches, rank, world_size

    def set_epoch(self, epoch):
        self.batches.set_epoch(epoch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            yield batch[self.rank :: self.world_size]


class Buckets:
    """Batches of samples of similar lengths, shuffled by epoch.

    The samples of ten batches at a time are sorted by length. What remains of an epoch,
    less than a batch, is dropped.
    """

    def __init__(self, lengths, batch_size, seed=0):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        order = order[: len(self) * self.batch_size]
        batches = []
        for some in order.split(10 * self.batch_size):
            by_length = some[self.lengths[some].argsort(stable=True)]
            batches += by_length.split(self.batch_size)
        for number in torch.randperm(len(batches), generator=generator):
            yield batches[number].tolist()


# ---- the proof -----------------------------------------------------------------------
def pad(samples):
    """Return [B, T], -1 where a sample has ended; a sample is its number, repeated."""
    return pad_sequence(samples, batch_first=True, padding_value=-1)


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
    torch.manual_seed(0)
    lengths = torch.randint(5, 200, (2000,))
    samples = [torch.full((n,), i) for i, n in enumerate(lengths.tolist())]
    try:
        DataLoader(samples, batch_sampler=Buckets(lengths, 48), drop_last=True)
    except ValueError as error:
        assert "batch_sampler option is mutually exclusive" in str(error)
    else:
        raise AssertionError("the loader took both")
    batches = SplitBatches(Buckets(lengths, 48), rank, world_size)
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=pad)
    batches.set_epoch(1)
    padded = list(loader)
    seen = from_all_ranks([batch[:, 0].tolist() for batch in padded])
    alone = Buckets(lengths, 48)
    alone.set_epoch(1)
    steps = zip(alone, zip(*seen, strict=True), strict=True)
    assert all(sorted(one) == sorted(sum(parts, [])) for one, parts in steps)
    # The longest of the ranks' paddings decides how long a step takes.
    sizes = torch.tensor(from_all_ranks([batch.numel() for batch in padded]))
    longest = (sizes.amax(0).sum() / sizes.double().mean(0).sum()).item()
    assert longest < 1.02
    if rank == 0:
        print("every batch is that of one process: True")
        text = "padded tokens of the longest rank, beside the mean of all"
        print(f"{text}: {longest:.2f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
