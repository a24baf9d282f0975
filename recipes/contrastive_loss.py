"""How do I compute a contrastive loss (SimCLR, CLIP) over the samples of all GPUs?

Let each rank compare its own samples with the embeddings of all (here with CLIP's
loss). `dist.all_gather` returns them without a gradient, so what a sample does as
another one's partner or negative is missing: gather with a function that has one, such
as `Gather`. torch's own, `torch.distributed.nn.functional.all_gather`, is deprecated in
2.15. All ranks need equally many samples. If you compute the loss of all samples on
every rank instead, with only the rank's own embeddings in the graph, multiply it by the
number of ranks, as DDP divides by it; a learned temperature's gradient is then too
large.

$ torchrun --standalone --nproc-per-node=2 recipes/contrastive_loss.py
dist.all_gather, local loss: not a multiple of one process's gradient
Gather, local loss: 1.000 times one process's gradient
put_back, global loss: 0.500 times one process's gradient
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn


# ---- the lines to copy ---------------------------------------------------------------
class Gather(torch.autograd.Function):
    """Concatenate the tensors of all ranks; gradients flow back to them."""

    @staticmethod
    def forward(ctx, tensor):  # noqa: ARG004
        return gather(tensor)

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)  # the sum over the losses of all ranks
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def gather(tensor):
    """Concatenate the tensors of all ranks, without a graph."""
    parts = list(tensor.new_empty(dist.get_world_size(), *tensor.shape))
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


# ---- the proof -----------------------------------------------------------------------
def put_back(tensor):
    """Concatenate the tensors of all ranks; this rank's keeps its graph."""
    together, first = gather(tensor), dist.get_rank() * len(tensor)
    together[first : first + len(tensor)] = tensor
    return together


def contrast(a, b, together, of_all):
    """Return the loss of finding the partners of all samples, or of this rank's."""
    all_a, all_b = together(a), together(b)
    a, b, first = (all_a, all_b, 0) if of_all else (a, b, dist.get_rank() * len(a))
    target = torch.arange(first, first + len(a), device=a.device)
    logits = torch.stack([10 * a @ all_b.T, 10 * b @ all_a.T], dim=2)
    return nn.functional.cross_entropy(logits, target[:, None].expand(-1, 2))


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(16, 4, dtype=torch.float64).to(device)
    pairs = torch.randn(2, 12, 16, dtype=torch.float64).to(device)
    own = pairs.chunk(world_size, dim=1)[rank]

    def gradient(network, inputs, together, of_all):
        model.zero_grad()
        a, b = nn.functional.normalize(network(inputs), dim=-1)
        contrast(a, b, together, of_all).backward()
        return model.weight.grad.clone()

    whole = gradient(model, pairs, lambda tensor: tensor, True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for name, together, of_all, factor in (
        ("dist.all_gather, local loss", gather, False, None),
        ("Gather, local loss", Gather.apply, False, 1),
        ("put_back, global loss", put_back, True, 1 / world_size),
    ):
        found = gradient(wrapped, own, together, of_all)
        ratio = ((found * whole).sum() / whole.square().sum()).item()
        multiple = (found - ratio * whole).abs().max() < 1e-12
        text = f"{ratio:.3f} times" if multiple else "not a multiple of"
        if rank == 0:
            print(f"{name}: {text} one process's gradient")
        assert multiple == (factor is not None)
        assert not multiple or abs(ratio - factor) < 1e-12


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
