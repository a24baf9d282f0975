"""Mistakes with tensor parallelism that raise no error; the arguments name them.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/mistakes.py samples

They run on two tp groups of two ranks, on the CPU, in float64.
"""

import gc
import math
import sys
from unittest import mock

import counts  # finds the modules of this repository
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from common import launch
from common import text
from common.gpt import GPT
from common.gpt import Attention

stage = counts.load_stage()


# ---- the model, and how it is split --------------------------------------------------
def make(attention=Attention, width=64, heads=4):
    """Return a small GPT in float64, so that equal losses have equal digits."""
    torch.manual_seed(0)
    model = GPT(256, 32, width, depth=2)
    for block in model.blocks:
        block.attention = attention(width, heads)
    model.reset_parameters()
    return model.double()


def make_mesh():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make_plan():
    """Return the plan that the stage's split_layers hands to parallelize_module."""
    names = ("parallelize_module", "distribute_module")
    with mock.patch.multiple(stage, **dict.fromkeys(names, mock.DEFAULT)) as called:
        stage.split_layers(model=None, mesh=None)
    _, _, plan = called["parallelize_module"].call_args.args
    return plan


def split(model, mesh):
    """Split the layers over each tp group, as the stage does; return the model."""
    stage.split_layers(model, mesh["tp"])
    return model


def shard(model, mesh):
    """Shard over each dp group what its ranks have of the layers; return the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


# ---- batches, steps and output -------------------------------------------------------
def get_batch(part=0, parts=1, batch=0):
    """Return inputs and targets: one part of 8 sequences, every `parts`th of them."""
    windows, _ = text.load(None, context_length=32)
    return windows.__getitems__(range(8 * batch, 8 * batch + 8)[part::parts])


def get_group_batch(mesh, batch=0):
    """Return a tp group's part of a batch, the same for all its processes."""
    return get_batch(mesh["dp"].get_local_rank(), mesh["dp"].size(), batch)


def get_loss(model, batch):
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def evaluate(model):
    """Return the loss on sequences that no rank trains on, the same for all ranks."""
    _, windows = text.load(None, context_length=32)
    with torch.no_grad():
        return get_loss(model, windows.__getitems__(range(64))).item()


def to_whole(tensor):
    """Return a DTensor as a plain tensor; all ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(name, model, batch, one):
    """Print the ranks' losses, and those of one process; return how gradients differ.

    one: the model that one process would train, on the whole batch.
    """
    wanted_loss = get_loss(one, get_batch())
    wanted_loss.backward()
    loss = get_loss(model, batch)
    loss.backward()
    wanted, found = (
        {key: to_whole(weight.grad) for key, weight in each.named_parameters()}
        for each in (one, model)
    )
    off = nn.utils.get_total_norm([found[key] - wanted[key] for key in wanted])
    share = (off / nn.utils.get_total_norm(wanted.values())).item()
    tell_groups(f"{name}: losses", loss.item())
    tell(f"    one process {wanted_loss:.4f}; the gradient is off by {share:.1%}")
    return share


def train(model, mesh, seed=None):
    """Take 10 steps; seed: a function of the mesh that returns a rank's number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        if seed:
            torch.manual_seed(1000 * step + seed(mesh))
        optimizer.zero_grad()
        get_loss(model, get_group_batch(mesh, step)).backward()
        optimizer.step()
    return model


def tell(line):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def tell_groups(name, number):
    """Print a number of each rank, one tp group after the other; return all."""
    numbers = [f"{each:.4f}" for each in gather(number)]
    groups = [" ".join(numbers[n : n + 2]) for n in range(0, len(numbers), 2)]
    tell(f"{name} {' | '.join(groups)}")
    return numbers


def gather(value):
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- copies --------------------------------------------------------------------------
def copies_that_differ(model, mesh):
    """Return {name: largest difference} of weights that should be equal in a tp group.

    mesh: with a dimension "tp". A weight that is split over it has no copies there. If
    a weight is sharded by FSDP, too, this is about the shards that this rank's group
    has. All ranks have to call it.
    """
    group, found = mesh["tp"].get_group(), {}
    for name, weight in model.named_parameters():
        mine = weight.detach()
        if isinstance(mine, DTensor):
            names = mine.device_mesh.mesh_dim_names
            if "tp" in names and not mine.placements[names.index("tp")].is_replicate():
                continue
            mine = mine.to_local()
        mine = mine.contiguous()
        copies = [torch.empty_like(mine) for _ in range(mesh["tp"].size())]
        dist.all_gather(copies, mine, group=group)
        if not all(each.equal(copies[0]) for each in copies):
            found[name] = (torch.stack(copies) - copies[0]).abs().max().item()
    return found


# ---- samples -------------------------------------------------------------------------
def samples():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    assert compare("by tp group", model, get_group_batch(mesh), make()) < 1e-12

    batch = get_batch(dist.get_rank(), dist.get_world_size())  # the mistake
    model = shard(split(make(), mesh), mesh)
    assert compare("by rank", model, batch, make()) > 0.2


# ---- attention -----------------------------------------------------------------------
class Thirds(Attention):
    """All queries, then all keys, then all values: the order of GPT-2's weights."""

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = [each.unflatten(-1, (-1, self.head_dim)) for each in parts]
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rows_by_head(tensor, heads):
    """Reorder a weight or bias of thirds: all of head 0, then all of head 1, ..."""
    return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def attention():
    mesh = make_mesh()
    batch = get_group_batch(mesh)
    model = shard(split(make(attention=Thirds), mesh), mesh)
    assert compare("in thirds", model, batch, make(attention=Thirds)) > 0.2

    one, model = make(attention=Thirds), make()
    state = one.state_dict()
    rows = {name: rows_by_head(state[name], 4) for name in state if ".qkv." in name}
    model.load_state_dict(state | rows)
    shard(split(model, mesh), mesh)
    inputs, _ = batch
    assert (model(inputs) - one(inputs)).abs().max() < 1e-10
    tell("rows by head: the logits are those of one process")


# ---- dropout -------------------------------------------------------------------------
class Dropout(Attention):
    def forward(self, x):
        return functional.dropout(super().forward(x), 0.1, self.training)


def dropout():
    for name, seed in (
        ("by rank", lambda _: dist.get_rank()),  # the mistake
        ("by tp group", lambda mesh: mesh["dp"].get_local_rank()),
    ):
        mesh = make_mesh()
        model = shard(split(make(attention=Dropout), mesh), mesh)
        train(model, mesh, seed=seed).eval()
        found = copies_that_differ(model, mesh)
        tell_groups(f"seeded {name}: losses", evaluate(model))
        tell(f"    {len(found)} copies differ, such as {next(iter(found), 'none')}")
        assert len(found) == (8 if name == "by rank" else 0)


# ---- norms ---------------------------------------------------------------------------
def norms():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    get_loss(model, get_group_batch(mesh)).backward()
    grads = [weight.grad.to_local() for weight in model.parameters()]
    norm = nn.utils.get_total_norm(grads)  # the mistake
    tell_groups("by rank", norm.item())
    square = norm.square()
    dist.all_reduce(square)  # a mistake, too
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    tell(
        f"from the squares of all ranks {square.sqrt():.4f}, clip_grad_norm_ {norm:.4f}"
    )

    one = make()
    get_loss(one, get_batch()).backward()
    right = nn.utils.get_total_norm([weight.grad for weight in one.parameters()])
    assert math.isclose(norm, right, rel_tol=1e-9) and square.sqrt() > 1.2 * norm


# ---- nothing_around_it ---------------------------------------------------------------
def nothing_around_it():
    mesh = make_mesh()
    for name, model in (
        ("FSDP", shard(split(make(), mesh), mesh)),
        ("nothing", split(make(), mesh)),  # the mistake
    ):
        losses = tell_groups(f"{name}: losses", evaluate(train(model, mesh)))
        tell(f"    copies that differ: {len(copies_that_differ(model, mesh))}")
        assert len(set(losses)) == (2 if name == "nothing" else 1)


# ---- tied ----------------------------------------------------------------------------
def tied():
    for name in ("tied before the split", "and again after it"):
        mesh, model, one = make_mesh(), make(), make()
        model.head.weight = model.tokens.weight
        one.head.weight = one.tokens.weight
        split(model, mesh)
        if name == "and again after it":
            model.head.weight = model.tokens.weight  # the cure
        count = len(list(model.parameters()))
        shard(model, mesh)
        off = compare(name, model, get_group_batch(mesh), one)
        tell(f"    {count} parameters")
        mistake = name == "tied before the split"
        assert (off > 0.1, count) == (mistake, 28 + mistake)


# ---- head ----------------------------------------------------------------------------
def head():
    mesh = make_mesh()
    for name, layouts in (("gathered", Replicate()), ("left split", Shard(-1))):
        head = ColwiseParallel(output_layouts=layouts)  # the default is the mistake
        plan = make_plan() | {"head": head}
        model = parallelize_module(make(), mesh["tp"], plan)
        distribute_module(model, mesh["tp"])
        losses = tell_groups(f"{name}: losses", get_loss(model, get_batch()).item())
    tell(f"ln 256 = {math.log(256):.4f}, ln 128 = {math.log(128):.4f}")
    assert len(set(losses)) == 2


# ---- the run -------------------------------------------------------------------------
def main():
    launch.check()
    launch.die_with_parent()
    launch.ignore_mesh_warnings()
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        globals()[name]()
    gc.collect()  # on gloo, a model still alive can abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
