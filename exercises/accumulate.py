"""Gradient accumulation: many micro-batches, one average of the gradients.

You need ddp.no_sync(), a context in which torch's DistributedDataParallel sends
nothing, and nn.functional.cross_entropy(..., reduction="sum").
"""


def accumulate_gradients(ddp, micro_batches):
    """Run forward and backward on one micro-batch after the other.

    ddp: a DistributedDataParallel whose gradients are None. micro_batches: a list of
    pairs (inputs, targets), at least one on each rank. They are of different sizes, and
    the ranks have different numbers of them and of samples.

    Afterwards .grad of each weight, on all ranks, is the gradient of the mean
    cross-entropy over all samples of all ranks. Each sample counts the same.

    The activations of one micro-batch at most are in memory at a time. Each gradient is
    all-reduced once. In addition, one all-reduce of one number is allowed.
    """
    raise NotImplementedError
