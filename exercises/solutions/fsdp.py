"""FSDP by hand: a rank has all weights of a block only while the block computes.

Between two steps a rank keeps one piece of each block: of its weights, of their
gradients and of what the optimizer keeps. That is all that is left of a model on n
ranks, 1/n. The price is paid in bytes: the weights are gathered twice, for the forward
and for the backward pass, and the gradients are reduce-scattered once, which makes
three halves where DDP's all-reduce has two.

Torch's fully_shard gathers the next block while one computes, and keeps a piece of each
weight as a DTensor, so that names and checkpoints stay those of the model: see
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

import torch
import torch.distributed as dist
from torch import nn


class Sharded(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
        self.weights = []
        for module in block.modules():
            for name, weight in [*module.named_parameters(recurse=False)]:
                # A plain tensor: the piece is this module's only parameter.
                self.weights.append(weight.detach().requires_grad_())
                delattr(module, name)
                setattr(module, name, self.weights[-1])
        self.ranks, self.waiting = dist.get_world_size(), len(self.weights)
        pieces = self.flat(self.weights).chunk(self.ranks)
        self.piece = nn.Parameter(pieces[dist.get_rank()].clone())
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.reduce)
        self.free()

    def flat(self, tensors):
        """Return tensors as one vector, with zeros up to a multiple of the ranks."""
        vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return nn.functional.pad(vector, (0, -len(vector) % self.ranks))

    def forward(self, inputs):
        self.gather()
        outputs = self.block(inputs)
        self.free()
        if outputs.requires_grad:  # not under no_grad()
            # called with the gradient of the outputs, before the block's backward pass
            outputs.register_hook(self.gather)
        return outputs

    @torch.no_grad()
    def gather(self, *_):
        whole = self.piece.new_empty(len(self.piece) * self.ranks)
        dist.all_gather_into_tensor(whole, self.piece)
        for weight in self.weights:
            values, whole = whole.tensor_split([weight.numel()])
            weight.untyped_storage().resize_(weight.numel() * weight.element_size())
            weight.data.copy_(values.view_as(weight))  # .data: autograd need not know

    def free(self):
        # Autograd has noted the weights for the backward pass, so to forget them frees
        # nothing. Their memory goes, and the tensors stay.
        for weight in self.weights:
            weight.untyped_storage().resize_(0)

    def reduce(self, _):
        """Called after the gradient of each weight: the last one starts the sum."""
        self.waiting -= 1
        if self.waiting:
            return
        self.waiting = len(self.weights)
        gradients = self.flat([weight.grad for weight in self.weights]) / self.ranks
        mine = torch.empty_like(self.piece)
        dist.reduce_scatter_tensor(mine, gradients)
        self.piece.grad = mine if self.piece.grad is None else self.piece.grad + mine
        for weight in self.weights:
            weight.grad = None
        self.free()
