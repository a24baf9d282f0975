"""FSDP2, and parts that only some ranks use (experts, images): why is the model wrong?

FSDP2's calls are matched by their order. If each rank uses other experts, and these are
of equal size, the ranks exchange pieces of different experts, and nothing fails: with
all experts in one group their gradients are wrong, and with a group for each expert
everything is. If the sizes or the numbers differ, it is an error or a timeout. Either
keep such parts in the group of the model, and call `set_reduce_scatter_unused_params`
(torch 2.13 or later): then the gradient of an unused part is sent as zeros. Or let all
ranks call all parts, and multiply by 0 what they do not need; this is the only way if a
part has a group of its own. Experts stacked in one tensor have no such problem, because
every rank uses the tensor.

$ torchrun --standalone --nproc-per-node=2 recipes/parts_not_used_fsdp.py
equal to one process's gradients:
one group: router True, experts False
one group, set_reduce_scatter_unused_params: router True, experts True
a group for each expert: router False, experts False
a group for each expert, all are called: router True, experts True
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


# ---- the lines to copy ---------------------------------------------------------------
def shard(model):
    """Shard a model of which each rank may use other parts."""
    fully_shard(model)  # the parts in the group of the model
    model.set_reduce_scatter_unused_params(True)


def call_for_nothing(part, outputs, inputs):
    """Return the outputs unchanged, and yet call a part, as other ranks do."""
    return outputs + 0 * part(torch.zeros_like(inputs[:1])).sum()


# ---- the proof -----------------------------------------------------------------------
class Experts(nn.Module):
    """Each token goes to the best of its rank's experts. Maps [T, 8] to [T, 8]."""

    def __init__(self, number, call_all):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, number)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(number))
        self.call_all = call_all

    def forward(self, tokens, bonus):
        scores, chosen = (self.router(tokens).softmax(-1) + bonus).max(-1)
        outputs = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (places,) = (chosen == number).nonzero(as_tuple=True)
            if len(places):
                outputs = outputs.index_put((places,), expert(tokens[places]))
            elif self.call_all:
                outputs = call_for_nothing(expert, outputs, tokens)
        return outputs * scores[:, None]


def shard_each(model):
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)


# {what is printed: (what shards the model, whether all experts are called,
#  whether the gradients of the router and of the experts are right)}
WAYS = {
    "one group": (fully_shard, False, (True, False)),
    "one group, set_reduce_scatter_unused_params": (shard, False, (True, True)),
    "a group for each expert": (shard_each, False, (False, False)),
    "a group for each expert, all are called": (shard_each, True, (True, True)),
}


def batch(rank, world_size, device):
    """Return a rank's tokens, and what makes them choose its two experts."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(16, 8, generator=generator).to(device)
    bonus = torch.zeros(2 * world_size, device=device)
    bonus[2 * rank : 2 * rank + 2] = 5
    return tokens, bonus


def equal(parameters, expected):
    """Return whether all ranks have all gradients, and they are as expected."""
    parameters = list(parameters)
    missing = torch.tensor([int(p.grad is None) for p in parameters])
    missing = missing.to(expected[0].device)
    dist.all_reduce(missing)
    if missing.any():
        return False
    differences = [
        (parameter.grad.full_tensor() - gradient).abs().max().item()
        for parameter, gradient in zip(parameters, expected, strict=True)
    ]
    return max(differences) < 1e-10


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
    alone = Experts(2 * world_size, False).to(device)
    for other in range(world_size):
        loss = alone(*batch(other, world_size, device)).square().mean()
        (loss / world_size).backward()
    router = [parameter.grad for parameter in alone.router.parameters()]
    experts = [parameter.grad for parameter in alone.experts.parameters()]
    if rank == 0:
        print("equal to one process's gradients:")
    for way, (prepare, call_all, right) in WAYS.items():
        model = Experts(2 * world_size, call_all).to(device)
        prepare(model)
        model(*batch(rank, world_size, device)).square().mean().backward()
        found = (
            equal(model.router.parameters(), router),
            equal(model.experts.parameters(), experts),
        )
        assert found == (right if world_size > 1 else (True, True)), way
        if rank == 0:
            print(f"{way}: router {found[0]}, experts {found[1]}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
