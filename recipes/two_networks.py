"""A GAN under DDP: "RuntimeError: [...] has been modified by an inplace operation".

The discriminator was called twice before one backward pass. Before each call DDP copies
rank 0's buffers (BatchNorm's) to all ranks, and older versions of torch then raise this
error; 2.15 does not. Three remedies work with every version: call the discriminator
once, with real and fake samples together; pass `broadcast_buffers=False` to DDP; or
call backward after each call, the first time inside `no_sync()`. With the first one
batch norm normalizes real and fake samples together. In the generator's step, call the
bare discriminator: otherwise DDP all-reduces its gradients, too.

$ torchrun --standalone --nproc-per-node=2 recipes/two_networks.py
one call: weights after 10 steps equal those of one process
broadcast_buffers=False: weights after 10 steps equal those of one process
backward twice: weights after 10 steps equal those of one process
29840 bytes sent each time: in each step both gradients, once
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


# ---- the lines to copy ---------------------------------------------------------------
def one_call(discriminator, real, fake):
    on_real, on_fake = discriminator(torch.cat([real, fake])).chunk(2)
    return softplus(-on_real).mean() + softplus(on_fake).mean()


def generator_loss(discriminator, fake):
    # the bare model, without DDP
    return softplus(-getattr(discriminator, "module", discriminator)(fake)).mean()


# ---- the other two remedies ----------------------------------------------------------
def two_calls(discriminator, real, fake):
    """With DDP(discriminator, broadcast_buffers=False).

    In newer versions, which still take that name, it is `forward_sync_buffers=False`.
    """
    return softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()


def backward_twice(discriminator, real, fake):
    with getattr(discriminator, "no_sync", contextlib.nullcontext)():
        softplus(-discriminator(real)).mean().backward()
    return softplus(discriminator(fake)).mean()  # its backward sends the sum


# ---- the proof -----------------------------------------------------------------------
REMEDIES = {
    "one call": (one_call, {}),
    "broadcast_buffers=False": (two_calls, {"broadcast_buffers": False}),
    "backward twice": (backward_twice, {}),
}


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


def train(discriminator_loss, generator, discriminator, ranks):
    """Take 10 steps on the samples of these ranks."""
    g_optimizer = torch.optim.SGD(generator.parameters(), 0.1)
    d_optimizer = torch.optim.SGD(discriminator.parameters(), 0.1)
    for step in range(10):
        torch.manual_seed(step)
        real, noise = torch.randn(dist.get_world_size(), 8, 12).split((4, 8), dim=2)
        d_optimizer.zero_grad()
        for rank in ranks:
            with torch.no_grad():
                fake = generator(noise[rank])
            discriminator_loss(discriminator, real[rank], fake).backward()
        average(discriminator, len(ranks))
        d_optimizer.step()
        g_optimizer.zero_grad()
        discriminator.requires_grad_(False)  # its own gradient is not needed here
        for rank in ranks:
            generator_loss(discriminator, generator(noise[rank])).backward()
        discriminator.requires_grad_(True)
        average(generator, len(ranks))
        g_optimizer.step()


def average(network, count):
    """Divide a gradient, which is the sum of so many, as DDP divides it."""
    for weight in network.parameters():
        weight.grad /= count


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
    for name, (discriminator_loss, options) in REMEDIES.items():
        generator, discriminator = ours = make_networks()
        with Sent() as sent:
            train(
                discriminator_loss,
                DistributedDataParallel(generator),
                DistributedDataParallel(discriminator, **options),
                [dist.get_rank()],
            )
        # One process with all samples, which also normalizes each rank's separately.
        one = make_networks()
        train(discriminator_loss, *one, range(dist.get_world_size()))
        weights, expected = list(ours.parameters()), list(one.parameters())
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert sent.bytes == 10 * sum(weight.nbytes for weight in weights)
        if dist.get_rank() == 0:
            equal = "weights after 10 steps equal those of one process"
            print(f"{name}: {equal}", flush=True)
    if dist.get_rank() == 0:
        print(f"{sent.bytes} bytes sent each time: in each step both gradients, once")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
