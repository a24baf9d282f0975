"""FSDP2 trains, another process generates (GRPO): how does that get the weights?

One weight at a time: all trainers call `full_tensor()`, which gathers it, and the first
one sends it on, in a group of its own with the generator. So besides its shards, a
trainer holds one whole weight at a time. If the first trainer alone calls
`full_tensor()`, it waits for the others until the timeout. Send the number of the
version with the weights, and keep it with each sample: the trainers may be some
versions ahead by the time they learn from it. With vLLM or SGLang the weights go the
same way, into the engine's own names and layout. Buffers are sent, too, as the first
trainer has them, except those that are not persistent: the generator makes its own.

$ torchrun --standalone --nproc-per-node=3 recipes/weights_to_a_generator.py
version 1: the generator has the trainers' weights and buffers, bit by bit
version 2: the generator has the trainers' weights and buffers, bit by bit
version 3: the generator has the trainers' weights and buffers, bit by bit
one process's training: within 1e-10
most bytes on the way at once: 8192 of 33792
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


# ---- the lines to copy ---------------------------------------------------------------
def send_weights(model, version, first, link):
    """Send a sharded model's weights and buffers; all trainers call this.

    first: the rank of the first trainer; link: the group of it and the generators.
    """
    sends = dist.get_rank() == first
    device = next(model.parameters()).device
    if sends:
        dist.broadcast(torch.tensor([version], device=device), first, group=link)
    for tensor in model.state_dict().values():
        if isinstance(tensor, DTensor):  # a buffer is a whole tensor already
            tensor = tensor.full_tensor()  # a collective of all trainers
        if sends:
            dist.broadcast(tensor, first, group=link)


def get_weights(model, first, link):
    """Fill a model, which is not sharded, with what was sent; return the version."""
    version = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
    dist.broadcast(version, first, group=link)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, first, group=link)
    return version.item()


# ---- the proof -----------------------------------------------------------------------
def make_model(device):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    model.register_buffer("steps", torch.zeros(1))
    return model.to(device)


def step(model, optimizer, number, rank, trainers):
    """Train on this trainer's part of a batch of 12."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(12, 32, generator=generator)[rank::trainers]
    inputs = inputs.to(next(model.parameters()).device)
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.steps += 1


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
    trainers, generator = range(world_size - 1), world_size - 1
    # All ranks make all groups, in the same order.
    training = dist.new_group([*trainers])
    link = dist.new_group([0, generator])
    model = make_model(device)
    largest = max(parameter.nbytes for parameter in model.parameters())
    total = sum(parameter.nbytes for parameter in model.parameters())
    if rank in trainers:
        mesh = DeviceMesh.from_group(training, device.type)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = make_model(device)
    its_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for version in range(1, 4):
        step(alone, its_optimizer, version, 0, 1)
        if rank in trainers:
            step(model, optimizer, version, rank, len(trainers))
            send_weights(model, version, 0, link)
        else:
            assert get_weights(model, 0, link) == version
        assert model.steps == version
        own = [p.full_tensor() if rank in trainers else p for p in model.parameters()]
        own = nn.utils.parameters_to_vector(own).detach()
        trained = own.clone()
        dist.broadcast(trained, 0)
        assert torch.equal(own, trained)
        if rank == 0:
            words = "the generator has the trainers' weights and buffers, bit by bit"
            print(f"version {version}: {words}", flush=True)
    expected = nn.utils.parameters_to_vector(alone.parameters())
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
    if rank == 0:
        print("one process's training: within 1e-10")
        print(f"most bytes on the way at once: {largest} of {total}")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
