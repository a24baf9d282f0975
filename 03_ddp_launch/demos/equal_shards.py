"""Eleven images for four ranks, in local batches of two: repeat, or drop?

python 03_ddp_launch/demos/equal_shards.py
"""

from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

images = list(range(11))
for drop in (False, True):
    seen = []
    for rank in range(4):
        sampler = DistributedSampler(images, 4, rank, shuffle=False, drop_last=drop)
        loader = DataLoader(images, batch_size=2, sampler=sampler, drop_last=drop)
        batches = [batch.tolist() for batch in loader]
        seen += sum(batches, [])
        print(f"drop_last={drop}, rank {rank}:", *batches)
    print("  twice:", [n for n in images if seen.count(n) > 1], end=", ")
    print("never:", [n for n in images if n not in seen])
