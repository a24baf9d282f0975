"""DistributedDataParallel, with buckets and hooks.

In its first backward pass, torch's also finds out in which order the gradients really
come, and each .grad is a view of its bucket, so that nothing is copied: see
torch/csrc/distributed/c10d/reducer.cpp.
"""

import torch
import torch.distributed as dist
from torch import nn


class DDP(nn.Module):
    def __init__(self, module, bucket_size):
        super().__init__()
        self.module = module
        for weight in module.parameters():
            dist.broadcast(weight.data, src=0)

        # Backward begins with the last layer. Its weights come first, so that their
        # bucket is on its way while the gradients of the earlier layers are computed.
        # A frozen weight gets no gradient, and its bucket would never be complete.
        buckets = [[]]
        for weight in reversed([w for w in module.parameters() if w.requires_grad]):
            if sum(each.numel() for each in buckets[-1]) >= bucket_size:
                buckets.append([])
            buckets[-1].append(weight)
        for bucket in buckets:
            hook = self.hook_of(bucket)
            for weight in bucket:
                weight.register_post_accumulate_grad_hook(hook)
        self.pending = []  # the all-reduces of this step: (work, numbers, bucket)

    def hook_of(self, bucket):
        """Return a function to call whenever a gradient of the bucket is there."""
        missing = len(bucket)

        def gradient_is_there(_):
            nonlocal missing
            missing -= 1
            if missing == 0:
                missing = len(bucket)  # for the next step
                # One message of many numbers takes less time than many small ones.
                numbers = torch.cat([weight.grad.flatten() for weight in bucket])
                work = dist.all_reduce(numbers, async_op=True)
                self.pending.append((work, numbers, bucket))

        return gradient_is_there

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        for work, numbers, bucket in self.pending:
            work.wait()
            numbers /= dist.get_world_size()  # the sum becomes the mean
            parts = numbers.split([weight.numel() for weight in bucket])
            for weight, part in zip(bucket, parts, strict=True):
                weight.grad.copy_(part.view_as(weight))
        self.pending.clear()
