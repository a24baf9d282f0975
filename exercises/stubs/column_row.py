"""Write tensor parallelism: two linear layers whose units are divided among the ranks.

    y = Row(second)(gelu(Column(first)(x)))  # is second(gelu(first(x))), on all ranks

All ranks have the same x and the same layers. Rank r gets the r-th of
tensor_split(RANKS) of the units between the two layers; they need not be divisible.

What is counted: one dist.all_reduce of the size of y in the forward pass, one of the
size of x in the backward pass, and no other collective. Also the numbers that a rank
holds of the weights.
"""

import torch
from torch import nn


class Copy(torch.autograd.Function):
    """Forward: return the input. Backward: return the sum over the ranks' gradients.

    Neither changes the tensor that it is given.
    """

    @staticmethod
    def forward(ctx, inputs):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


class Sum(torch.autograd.Function):
    """Forward: return the sum over the ranks' inputs. Backward: return the gradient.

    Neither changes the tensor that it is given.
    """

    @staticmethod
    def forward(ctx, part):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


class Column(nn.Module):
    """An nn.Linear of which this rank has some output features.

    Its parameters are `weight` [this rank's outputs, inputs] and `bias` [this rank's
    outputs], copied from the layer.
    """

    def __init__(self, linear):
        super().__init__()
        raise NotImplementedError

    def forward(self, inputs):
        """inputs: [batch, inputs], the same on all ranks; return this rank's units."""
        raise NotImplementedError


class Row(nn.Module):
    """An nn.Linear of which this rank has some input features.

    Its parameters are `weight` [outputs, this rank's inputs] and `bias` [outputs],
    copied from the layer.
    """

    def __init__(self, linear):
        super().__init__()
        raise NotImplementedError

    def forward(self, units):
        """units: [batch, this rank's inputs]; return what the layer returns."""
        raise NotImplementedError
