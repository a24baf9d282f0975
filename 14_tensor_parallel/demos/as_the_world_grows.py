"""Count what one training step sends with 64 ranks, and with 1,024, by one process.

python 14_tensor_parallel/demos/as_the_world_grows.py

This is rank 0 of a group in which no other process runs. The collectives of torch's
"fake" backend return at once and send nothing, so results and times are meaningless.
But their number, order and sizes are real: FSDP2, DTensor and ZeroRedundancyOptimizer
make the same calls as in a real group.

sends     bytes that a rank sends, on average over its ring
leaves    bytes that the ranks of a machine together send to other machines
messages  sends that wait for the one before, if no two collectives overlap
"""

import counts  # finds the modules of this repository
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from common import launch
from common.gpt import GPT
from harness.counting import Collectives

RANKS = (64, 1024)
PER_MACHINE = 8
WIDTH = 1024  # also the vocabulary, and the number of tokens in a sequence
DEPTH = 2
KINDS = ("DDP", "DDP, ZeRO-1", "FSDP", "HSDP", "TP x FSDP", "TP across machines")
# around a ring, a rank sends (n - 1) / n of the whole so many times
TIMES = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}


# ---- a model on many ranks -----------------------------------------------------------
def make_mesh(kind, per_machine):
    """Return a mesh of all ranks, with the dimension "outer", or "outer" and "inner".

    The ranks of an inner group share a machine, except in "TP across machines".
    """
    ranks = torch.arange(dist.get_world_size())
    if kind in ("HSDP", "TP x FSDP"):
        ranks = ranks.view(-1, per_machine)
    elif kind == "TP across machines":
        ranks = ranks.view(per_machine, -1).t()
    return DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "inner")[: ranks.dim()])


def average(_state, bucket):
    """Average the gradients of a bucket, as DDP does without a hook.

    DDP itself reads what its all-reduce returns, and the fake backend returns nothing.
    """
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def prepare(kind, width, mesh):
    """Return a GPT, distributed over the mesh, and its optimizer."""
    model = GPT(width, width, width, DEPTH, heads=width // 64)
    if kind.startswith("DDP"):
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, average)
    else:
        if kind.startswith("TP"):
            counts.load_stage().split_layers(model, mesh["inner"])
            mesh = mesh["outer"]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind == "DDP, ZeRO-1":
        weights = model.parameters()
        return model, ZeroRedundancyOptimizer(weights, torch.optim.AdamW)
    return model, torch.optim.AdamW(model.parameters())


def take_step(model, optimizer, width, length):
    """Train on one sequence of so many tokens."""
    optimizer.zero_grad()
    counts.get_loss(model, torch.randint(width, (1, length))).backward()
    optimizer.step()


# ---- what it sends -------------------------------------------------------------------
class Calls(Collectives):
    """Notes the collectives as (name, bytes of the whole tensor, ranks), in `calls`.

    A collective of a group that does not belong to the mesh raises KeyError.
    """

    def __init__(self, mesh):
        super().__init__()
        self.groups = {group.group_name: group for group in mesh.get_all_groups()}
        self.calls = []

    def note(self, operation, args, result):
        count = len(self.seen)
        super().note(operation, args, result)
        for name, _, _, whole in self.seen[count:]:
            group = self.groups[group_name(args)]
            self.calls.append((name, whole, dist.get_process_group_ranks(group)))


def group_name(args):
    """Return the name of the process group among a collective's arguments.

    Those of torch.distributed take the group itself; those of DTensor its name, last.
    """
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return dist.ProcessGroup.unbox(one).group_name
    return args[-1]


def count_step(kind, width, per_machine):
    """Train in the process group that exists; return the Calls of the second step."""
    mesh = make_mesh(kind, per_machine)
    model, optimizer = prepare(kind, width, mesh)
    take_step(model, optimizer, width, 1)  # DDP makes its buckets after the first step
    # only what tensor parallelism sends depends on the tokens; one is quick
    tokens = width if kind.startswith("TP") else 1
    with Calls(mesh) as seen:
        take_step(model, optimizer, width, tokens)
    return seen.calls


def add_up(calls, per_machine):
    """Return (sends, leaves, messages) of collectives in rings, in the ranks' order."""
    sends = leaves = messages = 0
    for name, whole, ranks in calls:
        n = len(ranks)
        machines = [rank // per_machine for rank in ranks]
        crossing = sum(machines[i] != machines[i - 1] for i in range(n))
        sent = TIMES[name] * whole * (n - 1) / n
        sends += sent
        leaves += sent * per_machine * crossing / n
        messages += TIMES[name] * (n - 1)
    return sends, leaves, messages


def simulate(kind, ranks, width=WIDTH, per_machine=PER_MACHINE):
    """Return (sends, leaves, messages) of a step with so many ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        return add_up(count_step(kind, width, per_machine), per_machine)
    finally:
        dist.destroy_process_group()


def main():
    launch.ignore_mesh_warnings()
    print("ranks                          sends     leaves   messages")
    for ranks in RANKS:
        for kind in KINDS:
            sends, leaves, messages = simulate(kind, ranks)
            sizes = f"{sends / 1e6:>8.1f} MB{leaves / 1e6:>8.1f} MB"
            print(f"{ranks:>5}  {kind:18}{sizes}{messages:>11,}", flush=True)


if __name__ == "__main__":
    main()
