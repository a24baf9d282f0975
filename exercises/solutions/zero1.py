"""ZeRO-1: the work of AdamW, and what it keeps, are divided among the ranks.

DDP leaves all ranks with the same gradients, and then all of them compute the same
update, from the same two averages for each weight. Here a rank computes the update of
one piece of the weights only. It needs the gradients of its piece alone, summed over
the ranks: a reduce-scatter. It then has new weights that the others lack: an
all-gather. Together the two send as many bytes as DDP's all-reduce, which consists of
just these two halves. So 8 of the 16 bytes that a float32 weight costs in training are
divided by the number of ranks, for nothing.

DeepSpeed and Megatron send buckets while backward() runs, and keep a float32 piece for
weights of 16 bits.
"""

import torch
import torch.distributed as dist
from torch import nn


class ZeRO1:
    def __init__(self, parameters, **options):
        self.weights = list(parameters)
        self.ranks = dist.get_world_size()
        # Pieces of one long vector have the same size on all ranks, whatever the
        # shapes of the weights are.
        piece = self.flat(self.weights).chunk(self.ranks)[dist.get_rank()]
        self.piece = nn.Parameter(piece.clone())  # a view would keep the whole vector
        self.optimizer = torch.optim.AdamW([self.piece], **options)

    def flat(self, tensors):
        """Return tensors as one vector, with zeros up to a multiple of the ranks."""
        vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return nn.functional.pad(vector, (0, -len(vector) % self.ranks))

    @torch.no_grad()
    def step(self):
        # divided before the sum, because the sum may be too large for 16 bits
        gradients = self.flat([weight.grad for weight in self.weights]) / self.ranks
        self.piece.grad = torch.empty_like(self.piece)
        dist.reduce_scatter_tensor(self.piece.grad, gradients)
        self.optimizer.step()
        self.piece.grad = None
        whole = gradients  # its numbers are no longer needed, its memory is
        dist.all_gather_into_tensor(whole, self.piece)
        for weight in self.weights:
            new, whole = whole.tensor_split([weight.numel()])
            weight.copy_(new.view_as(weight))

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None
