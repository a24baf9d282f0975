"""As the world grows: what one training step sends, counted with no other process.

python -m tools.simulate
python -m tools.simulate --ranks 16 256 --width 256
python -m tools.simulate --ranks 8 16 32 64 128 256 512 1024 --plot growth.png

torch's "fake" backend has a process group of any size in one process. Its collectives
return at once, and what they return is useless: no data is sent, and no time is
measured. But their number and their sizes are those of a real group, since FSDP2,
DTensor and ZeroRedundancyOptimizer themselves call them. DDP's all-reduce is made by a
hook here, bucket by bucket, because the fake backend cannot return what DDP reads.

This program is rank 0. It trains a small GPT for two steps in float32, and counts the
second one: forward, backward and optimizer. Each group of ranks that share a sequence
has one sequence. The collectives are noted as in tools/counting.py.

What a rank sends is computed from that, for rings in the order of the ranks: of a
tensor of so many bytes, each of n ranks sends (n - 1) / n in an all-gather, a
reduce-scatter or a broadcast, and twice as much in an all-reduce. NCCL may choose trees
for an all-reduce. They send about as many bytes on average, in fewer successive
messages. Switches that add up by themselves halve what it sends between machines.

keeps      bytes of weights, gradients and AdamW's moments that stay on rank 0, without
           DDP's buckets, which are a second copy of the gradients by default
sends      bytes that a rank sends, on average over its ring
leaves     bytes that the ranks of a machine together send to another machine
messages   sends that wait for the one before, if no two collectives overlap
sequences  in the global batch
"""

import argparse
import importlib.util
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from common import launch
from common.args import fail
from common.args import positive_int
from common.args import writable_file
from common.gpt import GPT
from tools.counting import Collectives
from tools.stages import ROOT
from tools.stages import first_with

# Around a ring, a rank sends (n - 1) / n of the whole so many times.
TIMES = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}
COLORS = {
    "DDP": "tab:gray",
    "DDP, ZeRO-1": "black",
    "FSDP": "tab:orange",
    "HSDP": "tab:purple",
    "TP x FSDP": "tab:green",
    "TP across machines": "tab:red",
}
KINDS = tuple(COLORS)


# ---- the model, in each way ----------------------------------------------------------
class Shape(NamedTuple):
    """The sizes of a GPT; `context` is the length of the one sequence, too."""

    width: int = 1024
    depth: int = 2
    context: int = 1024
    vocabulary: int = 1024


def make_mesh(kind, per_machine):
    """Return the DeviceMesh of a kind, over all ranks of the process group.

    Its last dimension is within a machine, except for the kind that is wrong in this.
    """
    ranks = torch.arange(dist.get_world_size())
    names = ("replicate", "shard") if kind == "HSDP" else ("dp", "tp")
    if kind in ("DDP", "DDP, ZeRO-1", "FSDP"):
        return DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))
    grid = ranks.view(-1, per_machine)
    if kind == "TP across machines":
        grid = ranks.view(per_machine, -1).t()
    return DeviceMesh("cpu", grid, mesh_dim_names=names)


def tensor_parallel():
    """Return the stage's function that splits the layers of a GPT."""
    path = ROOT / first_with("tensor_parallel") / "train.py"
    spec = importlib.util.spec_from_file_location("tensor_parallel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.split_layers


def in_place(_state, bucket):
    """Average a bucket's gradients, as DDP does without a hook.

    DDP itself reads the collective's result, which the fake backend does not return.
    """
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def prepare(kind, shape, mesh):
    """Return the model, distributed in place or wrapped, and its optimizer."""
    torch.manual_seed(0)
    heads = shape.width // 64
    model = GPT(shape.vocabulary, shape.context, shape.width, shape.depth, heads)
    if kind in ("DDP", "DDP, ZeRO-1"):
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, in_place)
    else:
        if "tp" in mesh.mesh_dim_names:
            tensor_parallel()(model, mesh["tp"])
            mesh = mesh["dp"]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind == "DDP, ZeRO-1":
        weights = model.parameters()
        return model, ZeroRedundancyOptimizer(weights, torch.optim.AdamW)
    return model, torch.optim.AdamW(model.parameters())


# ---- one step, counted ---------------------------------------------------------------
class Call(NamedTuple):
    """A collective; whole: bytes of the tensor; dim: of the mesh, along its groups."""

    name: str
    whole: int
    dim: int


class Calls(Collectives):
    """Notes the collectives of a mesh as Calls, in `calls`."""

    def __init__(self, mesh):
        super().__init__()
        groups = [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]
        self.dims = {name: dim for dim, name in enumerate(groups)}
        self.calls = []

    def note(self, operation, args, result):
        count = len(self.seen)
        super().note(operation, args, result)
        for name, _, _, whole in self.seen[count:]:
            self.calls.append(Call(name, whole, self.dims[group_name(args)]))


def group_name(args):
    """Return the name of the process group among a collective's arguments.

    Those of torch.distributed take the group itself, those of DTensor its name.
    """
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return dist.ProcessGroup.unbox(one).group_name
    return args[-1]


def local_bytes(values):
    """Return the bytes of this rank's parts of tensors; scalars are not counted."""
    tensors = [one for one in values if torch.is_tensor(one) and one.dim()]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(one.nbytes for one in local)


def take_step(model, optimizer, shape, length):
    """Train one step on one sequence of so many tokens."""
    optimizer.zero_grad()
    tokens = torch.randint(shape.vocabulary, (1, length))
    logits = model(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def one_step(kind, shape, per_machine):
    """Train in a process group that exists, and count the second step.

    Return the bytes that this rank keeps, the Calls, and the ranks as a mesh's tensor.
    """
    mesh = make_mesh(kind, per_machine)
    model, optimizer = prepare(kind, shape, mesh)
    take_step(model, optimizer, shape, 1)  # DDP makes its buckets after the first one
    with Calls(mesh) as seen:
        take_step(model, optimizer, shape, shape.context)
    weights = list(model.parameters())
    if kind == "DDP, ZeRO-1":
        optimizer = optimizer.optim  # of this rank's parameters
    states = tree_leaves(list(optimizer.state.values()))
    kept = [*weights, *(weight.grad for weight in weights), *states]
    return local_bytes(kept), seen.calls, mesh.mesh


# ---- what is sent --------------------------------------------------------------------
class Row(NamedTuple):
    """What a kind costs, with so many ranks; the docstring above explains it."""

    ranks: int
    kind: str
    keeps: int
    sends: int
    leaves: int
    messages: int
    sequences: int


def per_rank(call, ranks):
    """Return the bytes that each of so many ranks sends in a collective."""
    return TIMES[call.name] * call.whole * (ranks - 1) / ranks


def borders(mesh, dim, per_machine):
    """Return how many ranks of a machine have their next one on another machine.

    On average over the machines, in the rings along a dimension of the mesh.
    """
    rings = mesh.swapdims(dim, -1).flatten(0, -2) if mesh.ndim > 1 else mesh[None]
    machines = rings.sort(-1).values // per_machine
    crossing = (machines != machines.roll(-1, -1)).sum().item()
    return crossing * per_machine / mesh.numel()


def make_row(kind, kept, calls, mesh, per_machine):
    """Return the Row of a step that was counted."""
    sizes = [mesh.size(call.dim) for call in calls]
    sent = [per_rank(call, n) for call, n in zip(calls, sizes, strict=True)]
    crossing = [borders(mesh, dim, per_machine) for dim in range(mesh.ndim)]
    return Row(
        ranks=mesh.numel(),
        kind=kind,
        keeps=kept,
        sends=round(sum(sent)),
        leaves=round(
            sum(size * crossing[c.dim] for size, c in zip(sent, calls, strict=True))
        ),
        messages=sum(
            TIMES[call.name] * (n - 1) for call, n in zip(calls, sizes, strict=True)
        ),
        sequences=mesh.size(0) if kind.startswith("TP") else mesh.numel(),
    )


def simulate(kind, ranks, shape, per_machine):
    """Return the Row of a kind for so many ranks, of which only rank 0 runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return make_row(kind, *one_step(kind, shape, per_machine), per_machine)
    finally:
        dist.destroy_process_group()


# ---- the table and the plot ----------------------------------------------------------
def lines(rows):
    """Return the table of Rows, a line each."""
    names = ("keeps", "sends", "leaves", "messages", "sequences")
    text = [f"{'ranks':>5}  {'':18}" + "".join(f"{name:>11}" for name in names)]
    for row in rows:
        sizes = "".join(f"{size / 1e6:>8.1f} MB" for size in row[2:5])
        text.append(
            f"{row.ranks:>5}  {row.kind:18}{sizes}{row.messages:>11,}"
            f"{row.sequences:>11,}"
        )
    return text


def draw(rows, path, per_machine):
    """Draw Rows into a PNG file, which also stores their table."""
    import matplotlib

    matplotlib.use("Agg")  # a file, on a machine without a screen
    import matplotlib.pyplot as plt

    panels = {
        "keeps": "a rank keeps, MB (log scale)",
        "sends": "a rank sends, MB",
        "leaves": "leaves a machine, MB",
        "messages": "messages in a row (log scale)",
    }
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 7.2))
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
        for kind, color in COLORS.items():
            some = [row for row in rows if row.kind == kind]
            scale = 1 if name == "messages" else 1e6
            values = [getattr(row, name) / scale for row in some]
            style = "--" if kind in ("DDP, ZeRO-1", "TP across machines") else "-"
            ranks = [row.ranks for row in some]
            axis.plot(ranks, values, style, marker=".", color=color, label=kind)
        axis.set_xscale("log", base=2)
        axis.set_title(title, size=11)
        axis.set_xlabel(f"ranks, {per_machine} per machine (only rank 0 runs)", size=9)
        if "log" in title:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        ranks = sorted({row.ranks for row in rows})
        axis.set_xticks(ranks, [f"{n}" for n in ranks], size=8, rotation=45)
        axis.minorticks_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    place = {"loc": "lower center", "frameon": False, "fontsize": 9}
    figure.legend(handles, labels, ncols=6, **place)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    stored = {"Software": None, "Description": "\n".join(lines(rows))}
    figure.savefig(path, dpi=110, facecolor="white", metadata=stored)
    plt.close(figure)


# ---- the command ---------------------------------------------------------------------
class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line."""

    def error(self, message):
        fail(message.removeprefix("argument "))


def parse_args(argv=None):
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, usual = parser.add_argument, Shape()
    add("--ranks", type=positive_int, nargs="+", default=[64, 1024], help="how many")
    add("--per-machine", type=positive_int, default=8, help="ranks of a machine")
    add("--width", type=positive_int, default=usual.width, help="of the GPT")
    add("--depth", type=positive_int, default=usual.depth, help="its blocks")
    add("--context", type=positive_int, default=usual.context, help="tokens")
    add("--plot", type=writable_file, metavar="FILE", help="also draw them, as a PNG")
    args = parser.parse_args(argv)
    for ranks in args.ranks:
        if ranks % args.per_machine:
            fail(f"--ranks {ranks} must be divisible by --per-machine")
    if args.width % (64 * args.per_machine):
        fail(
            f"--width {args.width} must be divisible by 64 times --per-machine"
            f" ({args.per_machine}): a head has 64, and a rank has whole heads"
        )
    return args


def main():
    args = parse_args()
    launch.ignore_mesh_warnings()
    shape = Shape(args.width, args.depth, args.context)
    rows = []
    for ranks, kind in itertools.product(dict.fromkeys(args.ranks), KINDS):
        rows.append(simulate(kind, ranks, shape, args.per_machine))
        shown = lines(rows)
        print(*(shown[-1:] if len(rows) > 1 else shown), sep="\n", flush=True)
    if args.plot:
        draw(rows, Path(args.plot), args.per_machine)


if __name__ == "__main__":
    main()
