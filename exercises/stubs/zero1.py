"""Write ZeRO-1: AdamW whose state is divided among the ranks."""


class ZeRO1:
    """AdamW for weights that are the same on all ranks; no DDP averages the gradients.

    Put all weights into one vector, in the order of `parameters`, and add zeros until
    its length is divisible by the number of ranks. Rank r updates the r-th piece of it,
    with a torch.optim.AdamW that knows this piece alone.

    What is counted in a step: one dist.reduce_scatter_tensor of the gradients, one
    dist.all_gather_into_tensor of the new weights, and no other collective. Also the
    numbers that the optimizer, and this object, keep on each rank from step to step,
    gradients included.
    """

    def __init__(self, parameters, **options):
        """parameters: what model.parameters() returns, which can be iterated over once;
        options: those of torch.optim.AdamW, all of which may be given."""
        raise NotImplementedError

    def step(self):
        """Update the weights on all ranks.

        Each weight has a gradient in .grad, of this rank's samples. The update is the
        one that AdamW computes from the mean over the ranks.
        """
        raise NotImplementedError

    def zero_grad(self):
        """Set the gradients of the model's weights to None."""
        raise NotImplementedError
