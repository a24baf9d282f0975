"""Tensor parallelism: two layers whose weights are divided, and two sums over ranks.

The units between the two layers are divided among the ranks. A rank computes its units
from the whole input, and what they contribute to the outputs. The outputs are the sum
of these contributions, which is the one all-reduce of the forward pass. In the backward
pass it is the other way around: every rank gets the whole gradient of the outputs, and
the gradient of the input is a sum over the units, so over the ranks.

Autograd knows nothing of the other ranks, so each of the two places is a function that
says what its derivative is.

Torch's ColwiseParallel and RowwiseParallel get the same sums from the placements of
DTensors, which also carry them through all other operations and into checkpoints.
"""

import torch
import torch.distributed as dist
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()  # another function may have been given it, too
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient  # total = part + parts of others: its derivative is 1


def mine(tensor, dim):
    """Return this rank's part of a tensor, in memory of its own."""
    parts = tensor.detach().tensor_split(dist.get_world_size(), dim)
    return parts[dist.get_rank()].clone()


class Column(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(mine(linear.weight, dim=0))
        self.bias = nn.Parameter(mine(linear.bias, dim=0))

    def forward(self, inputs):
        return nn.functional.linear(Copy.apply(inputs), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(mine(linear.weight, dim=1))
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, units):
        part = nn.functional.linear(units, self.weight)
        return Sum.apply(part) + self.bias  # after the sum, which would add it n times
