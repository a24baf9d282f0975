"""How do I use a WeightedRandomSampler with DistributedDataParallel?

A DataLoader takes one sampler, and a WeightedRandomSampler ignores the ranks: each one
draws a whole epoch for itself, and with the same seed all of them draw the same. Let
all ranks make the same draws, with the same weights and from generators with the same
seed, and let each take every n-th of them, as `DistributedSamplerWrapper` does for any
sampler with a generator. If the number of ranks divides the global batch, each global
batch is the one of a single process.

$ torchrun --standalone --nproc-per-node=2 recipes/weighted_sampler.py
data set: 900, 90 and 10 samples of the classes 0, 1 and 2
not dealt out: 1200 draws per rank, the same on all ranks: True
dealt out: 600 draws per rank
every global batch is that of one process: True
classes drawn in epoch 1: [0.33, 0.32, 0.35]
classes drawn in epoch 2: [0.36, 0.33, 0.31]
"""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import Sampler
from torch.utils.data import WeightedRandomSampler


# ---- the lines to copy ---------------------------------------------------------------
class DistributedSamplerWrapper(Sampler):
    """The draws of another sampler, dealt out to the ranks one by one."""

    def __init__(self, sampler, rank, world_size, seed=0):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):  # the same on all ranks: otherwise some have one batch more
        return len(self.sampler) // self.world_size

    def __iter__(self):
        # Otherwise every rank makes draws of its own, or every epoch has the same ones.
        self.sampler.generator.manual_seed(self.seed + self.epoch)
        draws = list(self.sampler)
        return iter(draws[self.rank :: self.world_size][: len(self)])


# ---- the proof -----------------------------------------------------------------------
GLOBAL_BATCH, DRAWS, SEED = 60, 1200, 0
LABELS = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
WEIGHTS = 1 / LABELS.bincount()[LABELS]  # every class is drawn equally often


def weighted():
    generator = torch.Generator()  # its own: others may use the default one in between
    return WeightedRandomSampler(WEIGHTS, DRAWS, generator=generator)


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log("data set: 900, 90 and 10 samples of the classes 0, 1 and 2")
    everybody = [None] * world_size
    torch.manual_seed(SEED)
    dist.all_gather_object(everybody, list(WeightedRandomSampler(WEIGHTS, DRAWS)))
    assert all(draws == everybody[0] for draws in everybody)
    log(f"not dealt out: {DRAWS} draws per rank, the same on all ranks: True")

    sampler = DistributedSamplerWrapper(weighted(), rank, world_size, SEED)
    log(f"dealt out: {len(sampler)} draws per rank")
    loader = DataLoader(range(1000), GLOBAL_BATCH // world_size, sampler=sampler)
    drawn = {}
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        dist.all_gather_object(everybody, [batch.tolist() for batch in loader])
        alone = weighted()
        alone.generator.manual_seed(SEED + epoch)
        one_process = torch.tensor(list(alone)).view(-1, GLOBAL_BATCH)
        # In rank r's batches, the columns r, r + n, r + 2 n ... of the global ones.
        drawn[epoch] = torch.tensor(everybody).permute(1, 2, 0).flatten(1)
        assert torch.equal(drawn[epoch], one_process)
    assert not torch.equal(drawn[1], drawn[2])
    log("every global batch is that of one process: True")
    for epoch, indices in drawn.items():
        shares = LABELS[indices.flatten()].bincount() / DRAWS
        assert (shares - 1 / 3).abs().max() < 0.05
        log(f"classes drawn in epoch {epoch}: {[round(x, 2) for x in shares.tolist()]}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
