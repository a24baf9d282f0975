"""Solutions of the exercises in 01_single_gpu.ipynb."""

import torch

# ---- exercise 1 ----------------------------------------------------------------------
# The weights and shuffle=True use the global generator, which is one number further.
# The sampler of this stage has a generator of its own, seeded in every epoch.
changes = {
    "initial weights": True,
    "order in this stage": False,
    "order with shuffle=True": True,
}


# ---- exercise 2 ----------------------------------------------------------------------
# Every rank shuffles all images in the same order, by seed + epoch, and takes every
# world_size-th of them from its own number on.
def first_batch(n, seed, epoch, batch_size, rank, world_size):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(n, generator=generator).tolist()
    return order[rank:batch_size:world_size]
