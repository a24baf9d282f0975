"""How do I compute a contrastive loss (SimCLR, CLIP) over the samples of all GPUs?

Gather the embeddings of all ranks, and compare the own ones with all of them. But what
`dist.all_gather` returns has no graph, so the gradients lack what the samples of one
rank contribute to the losses of the others: `Gather` sends it back. If you only put the
own embeddings back among the gathered ones, compute the loss of all samples on every
rank and multiply it by the number of ranks, by which DDP divides the gradients.

$ torchrun --standalone --nproc-per-node=2 recipes/contrastive_loss.py
the gradient, compared with one process's that has all samples:
dist.all_gather, the loss of the own samples: wrong
Gather, the loss of the own samples: equal
own put back, the loss of all samples: 1/2 of it
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import normalize


class Gather(torch.autograd.Function):
    """Concatenate the tensors of all ranks; the gradients find their way back."""

    @staticmethod
    def forward(ctx, tensor):  # noqa: ARG004
        return gather(tensor)

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)  # what all ranks' losses say of all embeddings
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def gather(tensor):
    """Concatenate the tensors of all ranks, without a graph."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def put_back(tensor):
    """Concatenate the tensors of all ranks, of which the own one has a graph."""
    parts = list(gather(tensor.detach()).chunk(dist.get_world_size()))
    parts[dist.get_rank()] = tensor
    return torch.cat(parts)


def contrast(a, b, all_a, all_b, first=0):
    """Sample i of `a` belongs to sample i of `b`: the loss of finding each other."""
    target = torch.arange(first, first + len(a), device=a.device)
    found_b = cross_entropy(10 * a @ all_b.T, target)
    return (found_b + cross_entropy(10 * b @ all_a.T, target)) / 2


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank uses GPU 0, too
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(16, 4, dtype=torch.float64).to(device)
    pairs = torch.randn(2, 12, 16, dtype=torch.float64).to(device)
    own = slice(first := 12 // world_size * rank, first + 12 // world_size)

    def gradient(network, inputs, loss):
        model.zero_grad()
        loss(*normalize(network(inputs), dim=-1)).backward()
        return model.weight.grad.clone()

    right = gradient(model, pairs, lambda a, b: contrast(a, b, a, b))
    wrapped = nn.parallel.DistributedDataParallel(model)

    def off(loss, factor=1):
        """Return how far DDP's gradient, multiplied, is from one process's."""
        difference = factor * gradient(wrapped, pairs[:, own], loss) - right
        return difference.abs().max().item()

    def of_own(a, b, together):
        return contrast(a, b, together(a), together(b), first)

    def of_all(a, b):
        a, b = put_back(a), put_back(b)
        return contrast(a, b, a, b)

    log("the gradient, compared with one process's that has all samples:")
    assert off(lambda a, b: of_own(a, b, gather)) > 1e-3 or world_size == 1
    log("dist.all_gather, the loss of the own samples: wrong")
    assert off(lambda a, b: of_own(a, b, Gather.apply)) < 1e-12
    log("Gather, the loss of the own samples: equal")
    assert off(of_all, factor=world_size) < 1e-12
    log(f"own put back, the loss of all samples: 1/{world_size} of it")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
