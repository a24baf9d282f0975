"""Compute an accuracy from the shards of 1 to 8 processes, in wrong ways, too.

python 07_distributed_eval/demos/wrong_averages.py FILE
"""

import sys

import digits_model
import torch
from torch.utils.data import DistributedSampler

PROCESSES = range(1, 9)
BATCH_SIZE = 48


# ---- what each process evaluates -----------------------------------------------------
def exact_shards(hits, n):
    return [hits[rank::n] for rank in range(n)]


def padded_shards(hits, n):
    samplers = [DistributedSampler(hits, n, rank, shuffle=False) for rank in range(n)]
    return [hits[list(sampler)] for sampler in samplers]


# ---- how the results are combined ----------------------------------------------------
def mean_of_means(parts):
    return torch.stack([part.mean() for part in parts]).mean()


def sums_and_counts(shards):
    return sum(shard.sum() for shard in shards) / sum(len(shard) for shard in shards)


def mean_of_batches(shards):
    """Average each shard's batches as equals, and the shards as equals."""
    means = [mean_of_means(shard.split(BATCH_SIZE)) for shard in shards]
    return torch.stack(means).mean()


def local_over_global(shards):
    """Divide rank 0's correct images by the size of the whole set."""
    return shards[0].sum() / sum(len(shard) for shard in shards)


# ---- the table -----------------------------------------------------------------------
def results(hits, shards, combine):
    """Return the accuracy on each number of processes, in percent."""
    return torch.stack([combine(shards(hits, n)) for n in PROCESSES])


def print_row(name, numbers, digits):
    print(f"{name:17}", *[f"{number:7.{digits}f}" for number in numbers])


def main(path):
    logits, targets = digits_model.predict_all(path)
    hits = 100 * (logits.argmax(1) == targets).double()  # 100 % or 0 % for each image
    rows = {
        "sums and counts": (exact_shards, sums_and_counts),
        "mean of batches": (exact_shards, mean_of_batches),
        "mean of shards": (exact_shards, mean_of_means),
        "repeated images": (padded_shards, sums_and_counts),
    }
    print_row("processes", PROCESSES, 0)
    for name, (shards, combine) in rows.items():
        errors = (results(hits, shards, combine) - hits.mean()).abs()
        print_row(name, errors, 4)
        assert (errors.max() < 1e-9) == (name == "sums and counts")
    print()
    wrong = results(hits, exact_shards, local_over_global)
    print_row("local / global, %", wrong, 1)


if __name__ == "__main__":
    main(sys.argv[1])
