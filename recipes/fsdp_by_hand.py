"""What does fully_shard do? FSDP in fifty lines, and the same weights.

Each rank keeps one piece of a block's weights, in one flat vector. Before the block's
forward pass all pieces are gathered, and afterwards freed; before its backward pass
they are gathered again. When the gradients of all its weights are there, they are
averaged over the ranks and cut up in one step (a reduce-scatter), so that each rank
gets the gradient of its own piece, which is all that its optimizer sees. fully_shard
does this with one piece of each weight instead of a flat vector, gathers the next block
while the current one computes, and takes care of names, precisions and checkpoints.

$ torchrun --standalone --nproc-per-node=2 recipes/fsdp_by_hand.py
by hand: after five steps within 1e-12 of one process's weights
fully_shard: after five steps within 1e-12 of one process's weights
between two steps, a rank holds 1/2 of the weights
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


# ---- the lines to copy ---------------------------------------------------------------
class Sharded(nn.Module):
    """A block whose weights are gathered while it computes."""

    def __init__(self, block):
        super().__init__()
        self.block = [block]  # in a list: the piece is this module's only parameter
        self.weights = [*block.parameters()]
        self.ranks, self.waiting = dist.get_world_size(), 0
        flat = nn.utils.parameters_to_vector(self.weights).detach()
        self.size = len(flat)
        padding = flat.new_zeros(-self.size % self.ranks)  # for pieces of one size
        pieces = torch.cat([flat, padding]).chunk(self.ranks)
        self.piece = nn.Parameter(pieces[dist.get_rank()].clone())
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.reduce)
        self.free()

    def gather(self, *_):
        whole = self.piece.new_empty(len(self.piece) * self.ranks)
        dist.all_gather_into_tensor(whole, self.piece.detach())
        sizes = [shape.numel() for shape in self.shapes]
        for weight, part, shape in zip(
            self.weights, whole[: self.size].split(sizes), self.shapes, strict=True
        ):
            weight.untyped_storage().resize_(part.numel() * part.element_size())
            weight.data.copy_(part.view(shape))

    def free(self):
        """Give the memory back; a weight keeps its shape, without a storage."""
        self.shapes = [weight.shape for weight in self.weights]
        for weight in self.weights:
            weight.untyped_storage().resize_(0)

    def reduce(self, _):
        """When all gradients are there: average them, and keep this rank's piece."""
        self.waiting += 1
        if self.waiting < len(self.weights):
            return
        self.waiting = 0
        flat = torch.cat([weight.grad.flatten() for weight in self.weights])
        flat = nn.functional.pad(flat, (0, -self.size % self.ranks)) / self.ranks
        self.piece.grad = torch.empty_like(self.piece)
        dist.reduce_scatter_tensor(self.piece.grad, flat)
        for weight in self.weights:
            weight.grad = None
        self.free()

    def forward(self, inputs):
        self.gather()
        outputs = self.block[0](inputs)
        outputs.register_hook(self.gather)  # before its backward pass
        self.free()
        return outputs


# ---- the proof -----------------------------------------------------------------------
def make_model(device):
    """Return three blocks, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(15, 15), nn.SiLU(), nn.Linear(15, 15)) for _ in "123")
    ).to(device)


def train(model, rank=0, world_size=1):
    """Train for five steps on this rank's part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(12, 15, generator=generator)[rank::world_size]
        inputs = inputs.to(next(model.parameters()).device)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = make_model(device)
    train(alone)
    expected = nn.utils.parameters_to_vector(alone.parameters())
    number = expected.numel()

    by_hand = nn.Sequential(*(Sharded(block) for block in make_model(device)))
    train(by_hand, rank, world_size)
    held = sum(w.untyped_storage().size() for b in by_hand for w in b.weights)
    pieces = sum(piece.numel() for piece in by_hand.parameters())
    assert held == 0 and number <= pieces * world_size < number + 3 * world_size
    for block in by_hand:
        block.gather()
    found = [weight for block in by_hand for weight in block.weights]
    found = nn.utils.parameters_to_vector(found).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    sharded = make_model(device)
    for block in sharded:
        fully_shard(block)
    fully_shard(sharded)
    train(sharded, rank, world_size)
    found = [parameter.full_tensor() for parameter in sharded.parameters()]
    found = nn.utils.parameters_to_vector(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if rank == 0:
        for way in ("by hand", "fully_shard"):
            print(f"{way}: after five steps within 1e-12 of one process's weights")
        print(f"between two steps, a rank holds 1/{world_size} of the weights")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
