"""A GAN under DDP: "RuntimeError: [...] has been modified by an inplace operation".

Before a forward pass, DDP copies rank 0's buffers (BatchNorm's) to all ranks, and if
the discriminator was called twice before one backward pass, torch raised this error
until PyTorch's PR #175851 of 2026. Call backward after each call, and put the first
call and its backward inside no_sync(): the gradient is still sent once. In the
generator's step, call the bare discriminator: DDP would all-reduce its gradients, too.

$ torchrun --standalone --nproc-per-node=2 recipes/two_networks.py
weights after 10 steps equal those of one process
29840 bytes sent: in each step both gradients, once
"""

import contextlib
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Inside `with`, count the bytes given to all-reduces, not those on the wire."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allreduce" in str(function):
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def make_networks():
    """Return a generator and a discriminator, with the same weights each time."""
    torch.manual_seed(0)
    pair = nn.ModuleList()
    for inputs, outputs in ((8, 4), (4, 1)):
        hidden = nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.SiLU()
        pair.append(nn.Sequential(*hidden, nn.Linear(16, outputs)))
    return pair


def train(generator, discriminator, ranks):
    """Take 10 steps on the samples of these ranks."""
    n = len(ranks)
    plain = getattr(discriminator, "module", discriminator)  # without DDP
    no_sync = getattr(discriminator, "no_sync", contextlib.nullcontext)
    g_optimizer = torch.optim.SGD(generator.parameters(), 0.1)
    d_optimizer = torch.optim.SGD(discriminator.parameters(), 0.1)
    for step in range(10):
        torch.manual_seed(step)
        real, noise = torch.randn(dist.get_world_size(), 8, 12).split((4, 8), dim=2)
        d_optimizer.zero_grad()
        for rank in ranks:
            with torch.no_grad():
                fake = generator(noise[rank])
            with no_sync():
                (softplus(-discriminator(real[rank])).mean() / n).backward()
            (softplus(discriminator(fake)).mean() / n).backward()  # sends the sum
        d_optimizer.step()
        g_optimizer.zero_grad()
        plain.requires_grad_(False)  # its own gradient is not needed here
        for rank in ranks:
            (softplus(-plain(generator(noise[rank]))).mean() / n).backward()
        plain.requires_grad_(True)
        g_optimizer.step()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    ours = make_networks()
    with Sent() as sent:
        train(*map(DistributedDataParallel, ours), [dist.get_rank()])
    # One process with all samples, which also normalizes each rank's separately.
    one = make_networks()
    train(*one, range(dist.get_world_size()))
    weights, expected = list(ours.parameters()), list(one.parameters())
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
    assert sent.bytes == 10 * sum(weight.nbytes for weight in weights)
    if dist.get_rank() == 0:
        print("weights after 10 steps equal those of one process")
        print(f"{sent.bytes} bytes sent: in each step both gradients, once")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
