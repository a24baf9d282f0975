"""Each rank splits the data into a training and a validation set by itself.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/different_data.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import random_split

dist.init_process_group("gloo")
rank = dist.get_rank()


def count_leaks(**options):
    """Return how many of rank 0's 100 validation samples rank 1 trains on."""
    torch.manual_seed(1 + rank)  # an unseeded process has a seed of its own, too
    train_set, val_set = random_split(range(1000), [900, 100], **options)
    splits = [None, None]
    dist.all_gather_object(splits, (list(train_set), list(val_set)))
    (_, validated), (trained, _) = splits
    return len(set(validated) & set(trained))


ways = {
    "random_split(data, sizes)": {},
    "random_split(data, sizes, a seeded generator)": {
        "generator": torch.Generator().manual_seed(0)
    },
}
for way, options in ways.items():
    leaks = count_leaks(**options)
    if rank == 0:
        print(f"{way:46} rank 1 trains on {leaks:2} of rank 0's 100", flush=True)
dist.destroy_process_group()
