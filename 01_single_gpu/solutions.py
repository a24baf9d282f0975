"""Solutions of the exercises in 01_single_gpu.ipynb."""

import torch


# ---- exercise 1 ----------------------------------------------------------------------
def mean_loss(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(
        sizes
    )


# ---- exercise 2 ----------------------------------------------------------------------
def first_batch(n, seed, e, batch_size):
    generator = torch.Generator().manual_seed(seed + e)
    return torch.randperm(n, generator=generator)[:batch_size].tolist()
