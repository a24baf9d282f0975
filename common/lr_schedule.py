"""The learning rate over a run."""

import math

from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer, total_steps):
    """Return a scheduler, to be stepped after each of the run's `total_steps` steps.

    The learning rate rises linearly to its peak over the first tenth of the steps
    (Goyal et al., 2017), then falls to zero along half a cosine (Loshchilov and Hutter,
    2017). It counts optimizer steps, one per global batch, so it is the same on any
    number of processes.
    """
    warmup = max(1, total_steps // 10)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
