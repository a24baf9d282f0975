"""DistributedDataParallel, with buckets and hooks.

You need dist.broadcast; dist.all_reduce(..., async_op=True), which returns an object
with wait(); and weight.register_post_accumulate_grad_hook(function), which has
backward() call function(weight) as soon as the gradient is in weight.grad.
"""

from torch import nn


class DDP(nn.Module):
    """A model whose gradients are averaged over the ranks while backward() runs.

    All ranks have batches of the same size. A training step is

        optimizer.zero_grad()
        loss_function(wrapped(inputs), targets).backward()
        wrapped.finish()
        optimizer.step()
    """

    def __init__(self, module, bucket_size):
        """Give each rank the weights of rank 0, and prepare the buckets.

        module: the model, with other weights on each rank until now, and without
        buffers. A weight with requires_grad=False gets those of rank 0, too, but is in
        no bucket. Each other weight gets a gradient in each step.

        bucket_size: in numbers. Take the weights in the reverse of the order of
        module.parameters(), which is about the order of their gradients in backward().
        As soon as a bucket has at least so many numbers, the next one begins. A weight
        is not split, and the last bucket can be smaller.
        """
        raise NotImplementedError

    def forward(self, *inputs):
        """Return what the module returns."""
        raise NotImplementedError

    def finish(self):
        """Wait until .grad of each weight is the mean over all ranks.

        One all-reduce for each bucket has begun before, in backward(): when the last
        gradient of the bucket was there. Nothing waits for it before finish().
        """
        raise NotImplementedError
