"""Solutions of the exercises in 01_single_gpu.ipynb."""

import torch

# ---- exercise 1 ----------------------------------------------------------------------
# The stage's sampler has a generator of its own; shuffle=True uses the global one.
order_changes = {"this stage": False, "shuffle=True": True}


# ---- exercise 2 ----------------------------------------------------------------------
def first_batch(n, seed, epoch, batch_size, rank, world_size):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(n, generator=generator).tolist()
    return order[rank:batch_size:world_size]
