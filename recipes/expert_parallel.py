"""Expert parallelism: how do the tokens get to the rank of their expert, and back?

By two all-to-alls. Each rank sorts its tokens by the expert that its router has chosen,
tells the others how many they will get, and sends them in pieces of unequal size; a
second all-to-all returns the results. `all_to_all_single_autograd` sends the gradients
in the opposite direction. An expert sees the tokens of all ranks, and gets the sum of
their gradients: divide it by the number of ranks, because DDP and FSDP2 average the
gradients of everything else. Keep FSDP2 from sharding the experts again, with
`ignored_params`. `clip_grad_norm_` refuses experts beside sharded weights; `clip` takes
the norm over the experts of all ranks and the rest. AdamW with `foreach`, its default
on a GPU, wants the experts in a parameter group of their own. The CPU has to know the
sizes, so each layer waits for the GPU. No tokens are dropped here, so the busiest rank
sets the time of a step. Large trainings limit how many tokens an expert takes (its
capacity, beyond which tokens skip it), or balance the router's choices, for instance by
a loss.

$ torchrun --standalone --nproc-per-node=2 recipes/expert_parallel.py
outputs and gradients of experts and router: within 1e-12 of one process's
norm of all gradients, and what is clipped by it: within 1e-12
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard


# ---- the lines to copy ---------------------------------------------------------------
def exchange(rows, chosen, compute, number):
    """Have each row computed by the rank that has its expert.

    rows: [T, width]; chosen: [T], the number of each row's expert; compute: a function
    of rows and of the numbers of their experts, among this rank's; number: of experts,
    which the ranks divide. Returns the results in the order of the rows.
    """
    ranks = dist.get_world_size()
    order = chosen.argsort(stable=True)
    to_send = chosen.bincount(minlength=number).view(ranks, -1)  # [rank, its expert]
    to_get = torch.empty_like(to_send)
    dist.all_to_all_single(to_get, to_send)
    sent, got = to_send.sum(1).tolist(), to_get.sum(1).tolist()
    group = dist.group.WORLD
    arrived = all_to_all_single_autograd(rows[order], got, sent, group)
    own = torch.arange(number // ranks, device=rows.device).repeat(ranks)
    results = compute(arrived, own.repeat_interleave(to_get.flatten()))
    back = all_to_all_single_autograd(results, sent, got, group)
    return back[order.argsort()]


def average_experts(parameters):
    """Divide the gradients of this rank's experts, after backward, as a mean's are."""
    for parameter in parameters:
        parameter.grad /= dist.get_world_size()


def clip(experts, others, max_norm):
    """Clip the gradients by the norm of all of them, and return it; all ranks call it.

    experts: this rank's, after average_experts; others: what FSDP2 has sharded.
    """
    square = nn.utils.get_total_norm([expert.grad for expert in experts]).square()
    dist.all_reduce(square)  # otherwise each rank clips by a norm of its own
    rest = nn.utils.get_total_norm([other.grad for other in others]).full_tensor()
    norm = (square + rest.square()).sqrt()
    for parameters in (experts, others):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# ---- the proof -----------------------------------------------------------------------
class Experts(nn.Module):
    """A layer of 12 experts, of which it holds `numbers`. Maps [T, 16] to [T, 16]."""

    def __init__(self, numbers, spread):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(12, 16, 32, generator=generator) / 4
        down = torch.randn(12, 32, 16, generator=generator) / 4
        self.up, self.down = nn.Parameter(up[numbers]), nn.Parameter(down[numbers])
        self.router = nn.Linear(16, 12, bias=False)
        weight = torch.randn(12, 16, generator=generator) / 4
        self.router.weight = nn.Parameter(weight)
        self.spread = spread  # over the ranks

    def compute(self, rows, numbers):
        results = torch.zeros_like(rows)
        for number in range(len(self.up)):
            (places,) = (numbers == number).nonzero(as_tuple=True)
            hidden = (rows[places] @ self.up[number]).relu()
            results = results.index_put((places,), hidden @ self.down[number])
        return results

    def forward(self, rows):
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        if self.spread:
            results = exchange(rows, chosen, self.compute, 12)
        else:
            results = self.compute(rows, chosen)
        return weights[:, None] * results


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
    torch.manual_seed(1)
    rows = torch.randn(48, 16).to(device)
    own = rows.chunk(world_size)[rank]
    alone = Experts(slice(None), spread=False).to(device)
    expected = alone(rows)
    expected.square().mean().backward()

    numbers = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
    model = Experts(numbers, spread=True).to(device)
    experts = [model.up, model.down]
    fully_shard(model, ignored_params={*experts})
    outputs = model(own)
    outputs.square().mean().backward()
    average_experts(experts)

    chosen = alone.router(own).softmax(-1).argmax(-1)
    sent = chosen.bincount(minlength=12).view(world_size, -1).sum(1)
    rest = [model.router.weight]
    found = [
        (outputs, expected.chunk(world_size)[rank]),
        (model.up.grad, alone.up.grad[numbers]),
        (model.down.grad, alone.down.grad[numbers]),
        (model.router.weight.grad.full_tensor(), alone.router.weight.grad),
    ]
    for one, other in found:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    found[0] = (clip(experts, rest, 0.01), norm)
    found[3] = (model.router.weight.grad.full_tensor(), alone.router.weight.grad)
    for one, other in found:  # the gradients are the clipped ones now
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert norm > 0.01
    groups = [{"params": experts}, {"params": rest}]
    torch.optim.AdamW(groups, foreach=True).step()  # in one group, it would fail
    assert len({*sent.tolist()}) > 1 or world_size == 1  # pieces of unequal size
    if rank == 0:
        what = "outputs and gradients of experts and router"
        print(f"{what}: within 1e-12 of one process's")
        print("norm of all gradients, and what is clipped by it: within 1e-12")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
