"""A GAN under DDP: what do I wrap, and in which order may I call the two networks?

Wrap both, and keep the order of your steps. In the discriminator's step, run a backward
pass after each of its calls, the first one inside `no_sync()`, so that the second sends
the sum. Freeze it for the generator's step, and call it there without its wrapper. If
it is not frozen, and the generator's backward pass comes between the discriminator's
forward and backward pass, DDP takes the wrong gradients for its own: those of the
discriminator are no longer averaged, and there is no error.

$ torchrun --standalone --nproc-per-node=2 recipes/two_networks.py
the discriminator's step first: equal to one process: True, ranks differ: False
both losses first: equal to one process: False, ranks differ: True
both losses first, frozen: equal to one process: True, ranks differ: False
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def discriminator_step(discriminator, optimizer, real, fake):
    """discriminator: DDP's wrapper; fake: samples of the generator."""
    optimizer.zero_grad()
    with discriminator.no_sync():
        softplus(-discriminator(real)).mean().backward()
    softplus(discriminator(fake.detach())).mean().backward()
    optimizer.step()


def generator_step(discriminator, optimizer, fake):
    """discriminator: without the wrapper; fake: from the generator's wrapper."""
    optimizer.zero_grad()
    discriminator.requires_grad_(False)
    softplus(-discriminator(fake)).mean().backward()
    discriminator.requires_grad_(True)
    optimizer.step()


# ---- the proof -----------------------------------------------------------------------
def step_first(discriminator, d_optimizer, g_optimizer, real, fake):
    discriminator_step(discriminator, d_optimizer, real, fake)
    generator_step(discriminator.module, g_optimizer, fake)


def losses_first(discriminator, d_optimizer, g_optimizer, real, fake, freeze=False):
    on_real, on_fake = discriminator(real), discriminator(fake.detach())
    loss = softplus(-on_real).mean() + softplus(on_fake).mean()
    discriminator.requires_grad_(not freeze)
    g_optimizer.zero_grad()
    softplus(-discriminator.module(fake)).mean().backward()
    discriminator.requires_grad_(True)
    d_optimizer.zero_grad()
    loss.backward()
    d_optimizer.step()
    g_optimizer.step()


def losses_first_frozen(*arguments):
    losses_first(*arguments, freeze=True)


def make_networks():
    """Return a generator and a discriminator, with the same weights each time."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(n, 16), nn.SiLU(), nn.Linear(16, outputs))
        for n, outputs in ((8, 4), (4, 1))
    ]


def train(take_steps, group):
    """Take 10 steps; return the weights of the discriminator, then of the generator.

    group: of all ranks, or of this one alone, which then takes all samples.
    """
    networks = make_networks()
    generator = DistributedDataParallel(networks[0], process_group=group)
    discriminator = DistributedDataParallel(networks[1], process_group=group)
    g_optimizer, d_optimizer = (torch.optim.SGD(n.parameters(), 0.1) for n in networks)
    for step in range(10):
        torch.manual_seed(step)
        samples = torch.randn(8 * dist.get_world_size(), 12)
        real, noise = samples[group.rank() :: group.size()].split((4, 8), dim=1)
        take_steps(discriminator, d_optimizer, g_optimizer, real, generator(noise))
    weights = [each for n in reversed(networks) for each in n.parameters()]
    return nn.utils.parameters_to_vector(weights).detach()


def ranks_differ(weights):
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    return any((other - weights).abs().max() > 1e-10 for other in others)


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
    together, (alone, _) = dist.group.WORLD, dist.new_subgroups(group_size=1)
    for name, take_steps in {
        "the discriminator's step first": step_first,
        "both losses first": losses_first,
        "both losses first, frozen": losses_first_frozen,
    }.items():
        weights = train(take_steps, together)
        differ = ranks_differ(weights)
        equal = (weights - train(take_steps, alone)).abs().max().item() < 1e-10
        wrong = take_steps is losses_first and dist.get_world_size() > 1
        assert (equal, differ) == (not wrong, wrong)
        if dist.get_rank() == 0:
            text = f"equal to one process: {equal}, ranks differ: {differ}"
            print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
