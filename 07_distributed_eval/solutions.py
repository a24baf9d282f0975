"""Solutions of the exercises in 07_distributed_eval.ipynb."""

import torch

# ---- exercise 1 ----------------------------------------------------------------------
# 10,000 / 8 is 1,250. 10,000 / 48 is 208.3: each gets 209. 10,000 / 64 is 156.25.
repeated = {8: 0, 48: 48 * 209 - 10_000, 64: 64 * 157 - 10_000}


# ---- exercise 2 ----------------------------------------------------------------------
def local_sums(errors):
    return torch.tensor([errors.square().sum(), len(errors)], dtype=torch.float64)


def combine(sums):
    squares, count = sums.tolist()
    return (squares / count) ** 0.5
