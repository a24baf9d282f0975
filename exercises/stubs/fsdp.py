"""Write FSDP: a block whose weights are divided among the ranks while it rests.

You need dist.all_gather_into_tensor and dist.reduce_scatter_tensor, and two hooks.
outputs.register_hook(function) has backward() call function(gradient) when the gradient
of `outputs` is there: before the backward pass of what has computed them.
weight.register_post_accumulate_grad_hook(function) has it call function(weight) as soon
as weight.grad is there.

Autograd and others keep the tensors with which a block has computed. So a tensor's
memory is freed, and the tensor stays: tensor.untyped_storage().resize_(0) frees it, and
resize_(BYTES) gives it memory again, without the old numbers. Autograd does not notice
what is written into tensor.data.

It helps to do it in two steps: first without freeing anything, until the gradients are
right; then with.
"""

from torch import nn


class Sharded(nn.Module):
    """A block of which a rank keeps one piece, except while the block computes.

    Put all weights of the block into one vector, in the order of parameters(), and add
    zeros until its length is divisible by the number of ranks. The r-th piece of it is
    this module's only parameter on rank r, and gets its gradient: the mean over the
    ranks. To the block, its weights become plain tensors: delattr(module, name), and
    then setattr(module, name, tensor). It remains a module of this one, so that eval()
    reaches it, and its buffers are in state_dict().

    What is counted, for each block: one all-gather in the forward pass, one in the
    backward pass, then one reduce-scatter, and no other collective; and one call of the
    block. Also what a rank holds of whole weights and gradients: those of one block,
    while it computes, and none before the first forward pass, between the two passes
    and after them, also of the parameters with which the block came.

    Gradients add up in .grad as usual, and the module also works under no_grad().
    """

    def __init__(self, block):
        """block: an nn.Module, which has the same weights on all ranks."""
        super().__init__()
        raise NotImplementedError

    def forward(self, inputs):
        """Return block(inputs), a tensor."""
        raise NotImplementedError
