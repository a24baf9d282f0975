"""The exact loss and accuracy of a model, over the shards of all ranks.

You need dist.all_reduce, and nn.functional.cross_entropy(..., reduction="sum").
"""


def evaluate(model, batches):
    """Return the mean loss and the accuracy over the samples of all ranks.

    model: the same on all ranks; its outputs are logits. It may be in training mode,
    and have dropout: evaluate it without, and give it back in the mode in which it
    came. batches: this rank's shard as a list of pairs (inputs, targets). The shards
    are of different lengths, so are the batches, and a shard can be empty. Each sample
    counts the same.

    Returns two Python floats, on all ranks the same: the mean cross-entropy, and the
    share of samples whose largest logit is that of their target.

    There is one all-reduce, of a few sums in float64, and nothing else is sent. No
    gradient is prepared: activations are not kept.
    """
    raise NotImplementedError
