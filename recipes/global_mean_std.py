"""Advantages or inputs normalized by mean and std: how do I take them over all ranks?

Normalized with its own rank's mean and standard deviation, a value changes with the
number of ranks, and the mean of the ranks' deviations is not that of all values. All-
reduce the sum and the count, then the squares of the distances from the global mean:
the difference of two large sums would lose digits. For running statistics merge the
mean and variance of each global batch into them. If they are buffers, DDP copies rank
0's to all ranks before each forward pass: what the others counted alone is lost.

$ torchrun --standalone --nproc-per-node=2 recipes/global_mean_std.py
over all ranks: mean and std of one process: True
of each rank: mean and std of one process: False
running: mean and std of all batches, on every rank: True
"""

import os

import torch
import torch.distributed as dist


# ---- the lines to copy ---------------------------------------------------------------
def global_count_mean_variance(values):
    """Return them over the values of all ranks, which may have different numbers.

    values: [N, ...]; mean and variance have the shape of one value, in float64, and the
    variance is divided by the count.
    """
    values = values.double()
    count = torch.tensor(len(values), dtype=torch.float64, device=values.device)
    total = values.sum(0)
    dist.all_reduce(count)
    dist.all_reduce(total)
    mean = total / count
    squares = (values - mean).square().sum(0)
    dist.all_reduce(squares)
    return count, mean, squares / count


def normalize(values):
    _, mean, variance = global_count_mean_variance(values)
    return ((values - mean) / (variance.sqrt() + 1e-8)).to(values.dtype)


class RunningMeanStd:
    """The mean and variance of all batches of all ranks. Save them in checkpoints."""

    def __init__(self):
        self.count, self.mean, self.variance = 0, 0, 0

    def update(self, values):
        count, mean, variance = global_count_mean_variance(values)
        total, distance = self.count + count, mean - self.mean
        squares = self.variance * self.count + variance * count
        squares += distance**2 * self.count * count / total  # Chan, Golub, LeVeque 1983
        self.mean = self.mean + distance * count / total
        self.count, self.variance = total, squares / total


# ---- the proof -----------------------------------------------------------------------
def equal(found, values):
    """Return whether a mean and a variance are those of all values."""
    expected = values.mean(0), values.var(0, correction=0)
    return all(map(torch.allclose, found, expected))


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Four batches, and each rank has more values than the one before, and larger ones.
    generator = torch.Generator().manual_seed(0)
    draws = [
        torch.randn(20 + 5 * r, 4, 3, generator=generator, dtype=torch.float64) + r
        for r in range(world_size)
    ]
    draws = [values.to(device) for values in draws]
    own, batches = draws[rank], [torch.cat([v[:, n] for v in draws]) for n in range(4)]
    running = RunningMeanStd()
    for number in range(4):
        running.update(own[:, number])
    alone = own[:, 0].mean(0), own[:, 0].var(0, correction=0)
    for name, found, values, wrong in (
        ("over all ranks: mean and std of one process", None, batches[0], False),
        ("of each rank: mean and std of one process", alone, batches[0], True),
        (
            "running: mean and std of all batches, on every rank",
            (running.mean, running.variance),
            torch.cat(batches),
            False,
        ),
    ):
        found = found or global_count_mean_variance(own[:, 0])[1:]
        same = equal(found, values)
        assert same == (not wrong or world_size == 1)
        if rank == 0:
            print(f"{name}: {same}", flush=True)
    whole = normalize(own[:, 0])
    _, mean, variance = global_count_mean_variance(whole)
    assert mean.abs().max() < 1e-6 and (variance - 1).abs().max() < 1e-6


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
