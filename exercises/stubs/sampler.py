"""DistributedSampler: which samples each rank trains on, in which order.

The ranks agree without a message: each one makes the order of the whole epoch, and
takes its own part. You need dist.get_rank, dist.get_world_size, torch.randperm and
torch.Generator.
"""

from torch.utils.data import Sampler


class DistributedSampler(Sampler):
    """The indices of this rank's samples, for DataLoader(dataset, sampler=...).

    They are Python integers. All n ranks have the same number of them.
    """

    def __init__(self, dataset, shuffle=True, seed=0, drop_last=False):
        """Prepare epoch 0.

        dataset: only its length is used. shuffle: otherwise the order is 0, 1, 2, ...
        drop_last: if the length is not divisible by n, the last samples of the order
        are left out; otherwise the order goes on with its first samples again, and
        again from its first, until its length is divisible by n.
        """
        raise NotImplementedError

    def set_epoch(self, epoch):
        """Let the next iteration be that of an epoch, counted from 0."""
        raise NotImplementedError

    def __len__(self):
        """Return the number of samples of this rank in an epoch."""
        raise NotImplementedError

    def __iter__(self):
        """Return an iterator over the indices of this rank in the present epoch.

        With shuffle, the order is torch.randperm(length), from a generator with the
        seed `seed + epoch`. Torch's global generator stays as it is. Of the order,
        dropped or repeated, rank r takes those at r, r + n, r + 2 n, ...
        """
        raise NotImplementedError
