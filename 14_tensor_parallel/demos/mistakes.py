"""Mistakes with tensor parallelism that raise no error; the arguments name them.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/mistakes.py samples

They run on two tp groups of two ranks, on the CPU, in float64.
"""

import gc
import math
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import counts  # finds the modules of this repository
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from common import launch
from common import meters
from common import text
from common.gpt import GPT
from common.gpt import Attention

stage = counts.load_stage()

CPU = torch.device("cpu")
WHOLE = StateDictOptions(full_state_dict=True)


# ---- the model, and how it is split --------------------------------------------------
def make(seed=0, attention=Attention, width=64, heads=4):
    """Return a small GPT in float64, so that equal losses have equal digits."""
    torch.manual_seed(seed)
    model = GPT(256, 32, width, depth=2)
    for block in model.blocks:
        block.attention = attention(width, heads)
    model.reset_parameters()
    return model.double()


def make_mesh(names=("dp", "tp")):
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


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


def to_local(tensor):
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_gradients(model):
    """Return {name: the whole gradient}; all ranks have to call it."""
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: to_whole(grad) for name, grad in grads.items()}


def compare(name, model, batch, one, whole_batch=None):
    """Print the ranks' losses, and those of one process; return how gradients differ.

    one: the model that one process would train, on the whole batch.
    """
    wanted_loss = get_loss(one, whole_batch or get_batch())
    wanted_loss.backward()
    wanted = get_gradients(one)
    loss = get_loss(model, batch)
    loss.backward()
    found = get_gradients(model)
    off = [(found[name] - wanted[name]).norm() for name in wanted]
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    share = (torch.stack(off).norm() / norm).item()
    tell_groups(f"{name}: losses", loss.item())
    tell(f"    one process {wanted_loss:.4f}; the gradient is off by {share:.1%}")
    return share


def train(model, mesh, steps=10, seed=None):
    """Take some steps; seed: a function of the mesh that returns a rank's number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
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

    first_ranks = [get_batch(0, 4), get_batch(2, 4)]
    first_ranks = [torch.cat(each) for each in zip(*first_ranks, strict=True)]
    model = shard(split(make(), mesh), mesh)
    tell("against one process that has the sequences of ranks 0 and 2 alone:")
    assert compare("by rank", model, batch, make(), first_ranks) < 1e-12


# ---- attention -----------------------------------------------------------------------
class Thirds(Attention):
    """All queries, then all keys, then all values: the order of GPT-2's weights."""

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = [each.unflatten(-1, (-1, self.head_dim)) for each in parts]
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Narrow(Attention):
    """`view` infers the width of a head, and not the number of heads."""

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 4, 3, -1)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def attention():
    for name, layer in (("in thirds", Thirds), ("width inferred", Narrow)):
        mesh = make_mesh()
        model = shard(split(make(attention=layer), mesh), mesh)
        one = make(attention=layer)
        assert compare(name, model, get_group_batch(mesh), one) > 0.2


def rows_by_head(tensor, heads):
    """Reorder a weight or bias of thirds: all of head 0, then all of head 1, ..."""
    return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


# ---- rows_by_head, tried -------------------------------------------------------------
def reordered():
    """Split a model with the weights of one with thirds, reordered."""
    mesh = make_mesh()
    one, model = make(attention=Thirds), make()
    for weight in one.parameters():
        nn.init.normal_(weight, std=0.1)
    state = one.state_dict()
    rows = {name: rows_by_head(state[name], 4) for name in state if ".qkv." in name}
    model.load_state_dict(state | rows)
    shard(split(model, mesh), mesh)
    inputs, _ = get_batch()
    apart = (model(inputs) - one(inputs)).abs().max().item()
    assert apart < 1e-10
    tell("reordered: the logits are those of one process")


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


# ---- dropout inside a pair -----------------------------------------------------------
class OwnDropout(nn.Module):
    """Dropout that draws from a generator of its own."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)  # "cuda" on GPUs

    def forward(self, x):
        if not self.training:
            return x
        kept = torch.empty_like(x).bernoulli_(0.9, generator=self.generator)
        return x * kept / 0.9


def inside_a_pair():
    for name, layer in (
        ("nn.Dropout", nn.Dropout(0.1)),  # the mistake
        ("OwnDropout", OwnDropout(seed=dist.get_rank())),
    ):
        mesh, model, dropped = make_mesh(), make(), []
        for block in model.blocks:
            block.activation = nn.Sequential(nn.GELU(), layer)
        layer.register_forward_hook(lambda *all, to=dropped: to.append(all[-1] == 0))
        shard(split(model, mesh), mesh)
        train(model, mesh, steps=1, seed=lambda mesh: mesh["dp"].get_local_rank())
        masks = gather(dropped[0])
        same = [rank for rank in range(4) if masks[rank].equal(masks[0])]
        tell(f"{name}: ranks that drop the same of their units as rank 0: {same}")
        assert same == ([0, 1] if name == "nn.Dropout" else [0])


# ---- seeds ---------------------------------------------------------------------------
def seeds():
    mesh = make_mesh()
    model = shard(split(make(seed=dist.get_rank()), mesh), mesh)  # the mistake
    weight = get_model_state_dict(model, options=WHOLE)["tokens.weight"]
    for first, seed in ((0, 0), (64, 2), (128, 0), (192, 2)):
        rows = slice(first, first + 64)
        assert weight[rows].equal(make(seed).tokens.weight[rows])
        tell(f"tokens.weight, rows {first:3} to {first + 63:3}: seed {seed}")

    model = make(seed=dist.get_rank())  # the mistake
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)  # and no distribute_module
    losses = tell_groups("without distribute_module: losses", evaluate(model))
    assert len(set(losses)) == 4


# ---- sequence ------------------------------------------------------------------------
def make_sequence_plan():
    """Return a plan: between the layers, a rank has its part of each sequence."""
    part, whole = Shard(1), Replicate()  # dimension 1 is the sequence
    rows = {"input_layouts": whole}
    return {
        "tokens": RowwiseParallel(**rows, output_layouts=part),
        "positions": RowwiseParallel(**rows, output_layouts=Shard(0)),  # no batch here
        "blocks.*.norm*": SequenceParallel(use_local_output=True),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=part),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=part),
        "blocks.*.up": ColwiseParallel(input_layouts=part),
        "blocks.*.down": RowwiseParallel(output_layouts=part),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }


def sequence():
    for name in ("norms in the plan", "norms not in the plan"):
        mesh, plan = make_mesh(), make_sequence_plan()
        if name == "norms not in the plan":
            del plan["blocks.*.norm*"], plan["norm"]  # the mistake
        model = shard(parallelize_module(make(), mesh["tp"], plan), mesh)
        off = compare(name, model, get_group_batch(mesh), one=make())
        found = copies_that_differ(train(model, mesh), mesh)
        tell(f"    after 10 steps {len(found)} copies differ")
        assert (off > 1e-3, len(found)) == ((True, 10) if "not" in name else (False, 0))


# ---- sums ----------------------------------------------------------------------------
def sums():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    inputs, targets = get_group_batch(mesh)
    get_loss(model, (inputs, targets)).backward()
    grads = [weight.grad.to_local() for weight in model.parameters()]
    norm = nn.utils.get_total_norm(grads)  # the mistake
    tell_groups("norm: by rank", norm.item())
    square = norm.square()
    dist.all_reduce(square)  # a mistake, too
    by_hand = square.sqrt().item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    tell(f"    from the squares of all ranks {by_hand:.4f}, clip_grad_norm_ {norm:.4f}")

    one = make()
    get_loss(one, get_batch()).backward()
    right = nn.utils.get_total_norm([weight.grad for weight in one.parameters()])
    assert math.isclose(norm, right, rel_tol=1e-9) and by_hand > 1.2 * norm

    for name, group in (
        ("all ranks", None),  # the mistake
        ("a dp group", mesh["dp"].get_group()),
    ):
        meter = meters.Meter(CPU)
        outputs = model(inputs)
        loss = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        meter.update(loss, outputs, targets)
        dist.all_reduce(meter.sums, group=group)
        found = meter.compute()
        tell(f"over {name}: loss {found['loss']:.4f}, {found['count']} tokens")
        assert found["count"] == (256 if group else 512)


# ---- files ---------------------------------------------------------------------------
def files():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        torch.save(model.state_dict(), path)  # the mistake
        weight = torch.load(path, weights_only=False)["tokens.weight"]
    whole, mine = make().tokens.weight, weight.to_local()
    first = next(row for row in range(256) if mine.equal(whole[row : row + 64]))
    tell(f"tokens.weight, {tuple(weight.shape)}; in each file {tuple(mine.shape)}")
    tell(f"the first row in the files of ranks 0 to 3: {gather(first)}")
    assert gather(first) == [0, 128, 64, 192]


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


# ---- ddp_with_a_mesh -----------------------------------------------------------------
def ddp_with_a_mesh():
    mesh = make_mesh()
    model = split(make(), mesh)
    ddp = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    before = len(list(ddp.parameters()))
    tell_groups("losses", evaluate(train(ddp, mesh)))
    after = len(list(ddp.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "parameters" is empty
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    tell(f"parameters: {before} before the training, {after} after it")
    tell(f"clip_grad_norm_ says of the last gradient: {norm:.4f}")
    assert (before, after, norm, len(ddp.state_dict())) == (29, 0, 0, 0)


# ---- dimensions_swapped --------------------------------------------------------------
def dimensions_swapped():
    for names in (("dp", "tp"), ("tp", "dp")):  # the second is the mistake
        mesh = make_mesh(names)
        ranks = dist.get_process_group_ranks(mesh["tp"].get_group())
        groups = sorted(set(map(tuple, gather(ranks))))
        tell(f"{names}: ranks that share a layer {' and '.join(map(str, groups))}")
        model = shard(split(make(), mesh), mesh)
        loss = get_loss(model, get_group_batch(mesh))
        loss.backward()
        losses = sorted({f"{each:.4f}" for each in gather(loss.item())})
        tell(f"    the losses of the groups are {' and '.join(losses)}")
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except KeyError as error:
            assert names == ("tp", "dp")
            tell(f"    clip_grad_norm_: KeyError: {error}")


# ---- not_split -----------------------------------------------------------------------
def not_split():
    right = make_plan()
    wrapped = {f"model.{name}": part for name, part in right.items()}
    half = {name: part for name, part in right.items() if name != "blocks.*.up"}
    for name, plan, share in (
        ("the stage's plan", right, 50),
        ("names that match nothing", wrapped, 100),  # a mistake
        ("the second of a pair only", half, 63),  # a mistake
    ):
        mesh, model = make_mesh(), make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "could not be resolved"
            parallelize_module(model, mesh["tp"], plan)
        if plan is not wrapped:
            distribute_module(model, mesh["tp"])
        loss = get_loss(model, get_batch())
        held = sum(to_local(weight).nbytes for weight in model.parameters())
        total = sum(weight.nbytes for weight in make().parameters())
        tell(f"{name}: loss {loss:.4f}, {held / total:.0%} of the weights on a rank")
        assert round(100 * held / total) == share


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
        train(model, mesh)
        apart = to_whole(model.head.weight - model.tokens.weight).abs().max().item()
        tell(f"    {count} parameters; after 10 steps the two differ by {apart:.4f}")
        mistake = name == "tied before the split"
        assert (off > 0.1, count, apart > 0.01) == (mistake, 28 + mistake, mistake)


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


# ---- meta_on_some --------------------------------------------------------------------
def meta_on_some():
    # a rank waits 5 seconds for the others, in place of the 30 minutes of gloo
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = make()
    if dist.get_rank() > 0:
        model.to("meta")  # the mistake
    try:
        mesh = DeviceMesh.from_group(group, "cpu")
        stage.split_layers(model, mesh)
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: RuntimeError: {error}", flush=True)
    dist.barrier()


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
