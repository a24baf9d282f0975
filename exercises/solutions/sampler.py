"""DistributedSampler: which samples each rank trains on, in which order.

Torch's also takes the number of ranks and the rank as arguments, so that it can be made
for a process group other than the default one. What it repeats is counted twice in an
evaluation.
"""

import itertools

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler):
    def __init__(self, dataset, shuffle=True, seed=0, drop_last=False):
        self.length = len(dataset)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        # The same number on all ranks. Otherwise one rank would have a batch more, and
        # would wait for the others' gradients in vain.
        rounded_up = self.length + self.n - 1
        self.size = (self.length if drop_last else rounded_up) // self.n

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        order = range(self.length)
        if self.shuffle:
            # A generator of its own: the seed is the same on all ranks, and the global
            # one, from which dropout takes its numbers, can be different.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        # cycle() repeats the first ones, islice() leaves out the last ones. A stride in
        # place of a block keeps what is repeated on different ranks.
        whole = itertools.islice(itertools.cycle(order), self.size * self.n)
        return itertools.islice(whole, self.rank, None, self.n)
