"""Write FSDP: a block whose weights are divided among the ranks while it rests."""

from torch import nn


class Sharded(nn.Module):
    """A block of which a rank keeps one piece, except while the block computes.

    Put all weights of the block into one vector, in the order of parameters(), and add
    zeros until its length is divisible by the number of ranks. The r-th piece of it is
    this module's only parameter on rank r, and gets its gradient: the mean over the
    ranks.

    What is counted, for each block: one dist.all_gather_into_tensor in the forward
    pass, one in the backward pass, then one dist.reduce_scatter_tensor, and no other
    collective. Also what a rank holds of whole weights and gradients: in memory are
    those of one block, once, while it computes. There are none before the first forward
    pass, between the two passes and after them, also of the parameters with which the
    block came. Autograd and others keep such tensors, so free their memory:
    tensor.untyped_storage().resize_(0) does, and resize_(BYTES) gives them memory
    again.

    Gradients add up in .grad as usual, and the module also works under no_grad().
    """

    def __init__(self, block):
        """block: an nn.Module, which has the same weights on all ranks."""
        super().__init__()
        raise NotImplementedError

    def forward(self, inputs):
        """Return block(inputs), a tensor."""
        raise NotImplementedError
