"""What goes wrong with tensor parallelism; the argument names some of the mistakes.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/mistakes.py samples
"""

import functools
import gc
import os
import re
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import launch
from common import meters
from common import text
from common.args import fail
from common.gpt import GPT
from common.gpt import Attention
from common.gpt import generate

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


def make_mesh(tp=2):
    """Return the processes as a grid of tp groups, with so many processes each."""
    shape = (dist.get_world_size() // tp, tp)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def make_plan():
    """Return the stage's plan."""
    same = {"input_layouts": Replicate(), "use_local_output": False}
    return {
        "tokens": RowwiseParallel(**same),
        "positions": RowwiseParallel(**same),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(use_local_output=False),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(use_local_output=False),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def make_short_plan():
    """Return a plan of the matrices in the blocks; all else is left as it is."""
    return {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def split(model, mesh, plan=None):
    """Split the layers over each tp group, as the stage does; return the model."""
    parallelize_module(model, mesh["tp"], plan or make_plan())
    distribute_module(model, mesh["tp"])  # the norms, whole
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


def get_gradients(model):
    """Return {name: the whole gradient}; all ranks have to call it."""
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: to_whole(grad) for name, grad in grads.items()}


def to_whole(tensor):
    """Return a DTensor as a plain tensor; all ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_local(tensor):
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(model, batch, one):
    """Print the losses of the ranks and of one process, and how the gradients differ.

    one: the model that one process would train, on the whole batch.
    """
    wanted_loss = get_loss(one, get_batch())
    wanted_loss.backward()
    wanted = get_gradients(one)
    loss = get_loss(model, batch)
    loss.backward()
    found = get_gradients(model)
    off = [(found[name] - wanted[name]).norm() for name in wanted]
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    share = torch.stack(off).norm() / norm
    tell_groups("losses", loss.item())
    tell(f"one process: loss {wanted_loss:.4f}; the gradient is off by {share:.1%}")


def train(model, mesh, get=get_group_batch, steps=10, seed=None):
    """Take some steps; seed: a function of the mesh that returns a rank's number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        if seed:
            torch.manual_seed(1000 * step + seed(mesh))
        optimizer.zero_grad()
        get_loss(model, get(mesh, step)).backward()
        optimizer.step()


def tell(line):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(f"    {line}", flush=True)


def tell_groups(name, number):
    """Print a number of each rank, one tp group after the other."""
    numbers = [f"{each:.4f}" for each in gather(number)]
    groups = [" ".join(numbers[n : n + 2]) for n in range(0, len(numbers), 2)]
    tell(f"{name}: {' | '.join(groups)}")


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
def same_samples_in_a_tp_group():
    """No mistake."""
    report_samples(get_group_batch)


def different_samples_in_a_tp_group():
    model = report_samples(get_rank_batch)
    one = make()
    train(one, None, get_first_ranks_batch, steps=30)
    trained = get_model_state_dict(model, options=WHOLE)
    off = [
        (trained[name] - each).abs().max() for name, each in one.state_dict().items()
    ]
    tell(f"one process on the samples of ranks 0 and 2: off by {max(off):.9f} at most")


def get_rank_batch(_, batch=0):
    # the mistake: the sampler divides by all processes
    return get_batch(dist.get_rank(), dist.get_world_size(), batch)


def get_first_ranks_batch(*_):
    """Return the samples that the mistake gives to the first ranks of the tp groups."""
    parts = get_batch(0, 4), get_batch(2, 4)
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def report_samples(get):
    mesh = make_mesh()
    compare(shard(split(make(), mesh), mesh), get(mesh), one=make())
    model = shard(split(make(), mesh), mesh)
    train(model, mesh, lambda mesh, _: get(mesh), steps=30)
    with torch.no_grad():
        loss = get_loss(model, get_batch())
    tell(f"after 30 steps on this batch: loss {loss:.4f}")
    return model


# ---- uneven samples ------------------------------------------------------------------
def fewer_samples_on_a_rank():
    mesh = make_mesh()
    inputs, targets = get_group_batch(mesh)
    last = 4 - mesh["tp"].get_local_rank()  # the mistake
    with torch.no_grad():
        get_loss(split(make(), mesh), (inputs[:last], targets[:last]))


# ---- attention -----------------------------------------------------------------------
class Thirds(Attention):
    """All queries, then all keys, then all values: the order of GPT-2's weights."""

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = [each.unflatten(-1, (-1, self.head_dim)) for each in parts]
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Fixed(Attention):
    """Whole heads next to each other, but their number is fixed."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.heads = heads

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, self.heads, 3, self.head_dim)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Narrow(Fixed):
    """The same, but `view` infers the width of a head."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.head_dim = -1


def heads_next_to_each_other():
    """No mistake."""
    mesh = make_mesh()
    compare(shard(split(make(), mesh), mesh), get_group_batch(mesh), one=make())


def queries_keys_values_in_thirds():
    report_attention(Thirds)  # the mistake


def width_of_heads_inferred():
    report_attention(Narrow)  # the mistake


def report_attention(attention):
    mesh = make_mesh()
    model = shard(split(make(attention=attention), mesh), mesh)
    compare(model, get_group_batch(mesh), one=make(attention=attention))
    train(model, mesh, steps=20)
    one = make(attention=attention)
    set_model_state_dict(one, get_model_state_dict(model, options=WHOLE))
    tell(f"after 20 steps: loss {evaluate(model):.4f}")
    tell(f"the same weights in one process: loss {evaluate(one):.4f}")


def heads_that_tp_does_not_divide():
    mesh = make_mesh()
    get_loss(split(make(width=48, heads=3), mesh), get_group_batch(mesh))


def number_of_heads_fixed():
    mesh = make_mesh()
    get_loss(split(make(attention=Fixed), mesh), get_group_batch(mesh))


# ---- random numbers ------------------------------------------------------------------
class Dropout(Attention):
    def forward(self, x):
        return functional.dropout(super().forward(x), 0.1, self.training)


def dropout_seeded_by_dp_rank():
    """No mistake."""
    report_dropout(lambda mesh: mesh["dp"].get_local_rank())


def dropout_seeded_by_rank():
    report_dropout(lambda _: dist.get_rank())  # the mistake


def report_dropout(seed):
    mesh = make_mesh()
    model = shard(split(make(attention=Dropout), mesh), mesh)
    train(model, mesh, seed=seed)
    copies = sum(is_copy(weight) for weight in model.parameters())
    found = copies_that_differ(model, mesh)
    most = max(found.values(), default=0)
    tell(f"copies that differ: {len(found)} of {copies}, by {most:.4f} at most")
    for name in found:
        tell(f"    {name}")
    model.eval()
    tell_groups("losses on the same sequences", evaluate(model))


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


def dropout_inside_a_pair():
    report_masks(nn.Dropout(0.1))  # the mistake


def dropout_inside_a_pair_with_a_generator():
    """No mistake."""
    report_masks(OwnDropout(seed=dist.get_rank()))


def report_masks(dropout):
    """Put dropout on the hidden units, which are split; seed as the stage does."""
    mesh = make_mesh()
    model = make()
    for block in model.blocks:
        block.activation = nn.Sequential(nn.GELU(), dropout)
    shard(split(model, mesh), mesh)
    dropped = []
    dropout.register_forward_hook(lambda *given: dropped.append(given[-1] == 0))
    train(model, mesh, seed=lambda mesh: mesh["dp"].get_local_rank())
    masks = gather(dropped[0])
    same = [rank for rank in range(len(masks)) if masks[rank].equal(masks[0])]
    tell(f"ranks that drop the same of their units as rank 0: {same}")
    tell(f"copies that differ: {len(copies_that_differ(model, mesh))}")


def weights_seeded_by_rank():
    mesh = make_mesh()
    model = shard(split(make(seed=dist.get_rank()), mesh), mesh)  # the mistake
    report_seeds(model)
    tell(f"copies that differ: {len(copies_that_differ(model, mesh))}")


def weights_not_in_the_plan_seeded_by_rank():
    mesh = make_mesh()
    model = make(seed=dist.get_rank())  # the mistake
    parallelize_module(model, mesh["tp"], make_short_plan())
    found = copies_that_differ(model, mesh)
    tell(f"copies that differ: {', '.join(found)}")
    tell_groups("losses on the same sequences", evaluate(model))


def report_seeds(model):
    """Print with which seed each quarter of the embedding's rows was drawn."""
    weight = get_model_state_dict(model, options=WHOLE)["tokens.weight"]
    drawn = [make(seed).tokens.weight for seed in range(4)]
    for first in range(0, 256, 64):
        rows = slice(first, first + 64)
        (seed,) = [n for n in range(4) if weight[rows].equal(drawn[n][rows])]
        tell(f"tokens.weight, rows {first:3} to {first + 63:3}: seed {seed}")


# ---- sequence parallelism ------------------------------------------------------------
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


def norms_in_the_plan():
    """No mistake."""
    report_sequence(make_sequence_plan())


def norms_not_in_the_plan():
    plan = make_sequence_plan()
    del plan["blocks.*.norm*"], plan["norm"]  # the mistake
    report_sequence(plan)


def report_sequence(plan):
    mesh = make_mesh()
    model = shard(parallelize_module(make(), mesh["tp"], plan), mesh)
    compare(model, get_group_batch(mesh), one=make())
    train(model, mesh)
    found = copies_that_differ(model, mesh)
    most = max(found.values(), default=0)
    tell(f"copies that differ: {len(found)}, by {most:.4f} at most")
    tell_groups("losses on the same sequences", evaluate(model))


# ---- norms, counts, files ------------------------------------------------------------
def norm_by_hand(tp=2):
    mesh = make_mesh(tp)
    model = shard(split(make(), mesh), mesh)
    get_loss(model, get_group_batch(mesh)).backward()
    grads = [weight.grad for weight in model.parameters()]
    norm = nn.utils.get_total_norm([grad.to_local() for grad in grads])  # the mistake
    tell_groups("norms of the ranks", norm.item())
    square = norm.square()
    dist.all_reduce(square)  # a mistake, too
    tell(f"from the squares of all ranks: {square.sqrt():.4f}")
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    tell(f"clip_grad_norm_, and one process: {norm:.4f}, {get_norm_of_one():.4f}")


def report_norms_of_parts():
    """Print the norms of the gradients of split weights, and of copied ones."""
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    get_loss(model, get_group_batch(mesh)).backward()
    grads = [weight.grad for weight in model.parameters()]
    for name, copies in (("split in a tp group", False), ("copied", True)):
        part = [grad for grad in grads if is_copy(grad) == copies]
        norm = nn.utils.get_total_norm(part).full_tensor()
        tell(f"norm of the gradients of {len(part)} weights, {name}: {norm:.4f}")


def is_copy(tensor):
    """Whether each process of a tp group has the same part of a DTensor."""
    return tensor.placements[-1].is_replicate()


def get_norm_of_one():
    model = make()
    get_loss(model, get_batch()).backward()
    return nn.utils.get_total_norm([weight.grad for weight in model.parameters()])


def norm_in_a_tp_group_of_four():
    norm_by_hand(tp=4)


def every_process_counts():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    inputs, targets = get_group_batch(mesh)
    for counts in (True, mesh["tp"].get_local_rank() == 0):  # the first is the mistake
        meter = meters.Meter(CPU)
        outputs = model(inputs)
        loss = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        if counts:
            meter.update(loss, outputs, targets)
        dist.all_reduce(meter.sums)
        found = meter.compute()
        tell(f"loss {found['loss']:.4f}, count {found['count']}")


def state_dict_of_each_rank():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rank{dist.get_rank()}.pt"
        torch.save(model.state_dict(), path)  # the mistake
        weight = torch.load(path, weights_only=False)["tokens.weight"]
    local = gather(tuple(weight.to_local().shape))
    tell(f"tokens.weight: {tuple(weight.shape)}, in the files: {local}")
    # where the rows of each file are in the whole weight
    whole, mine = make().tokens.weight, weight.to_local()
    first = next(row for row in range(256) if mine.equal(whole[row : row + 64]))
    tell(f"the first row of each: {gather(first)}")
    tell(f"placements: {weight.placements}")
    make().load_state_dict({"tokens.weight": weight}, strict=False)


# ---- mesh ----------------------------------------------------------------------------
def dimensions_in_the_right_order():
    """No mistake."""
    report_groups(("dp", "tp"))


def dimensions_swapped():
    report_groups(("tp", "dp"))  # the mistake


def report_groups(names):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    groups = sorted(set(map(tuple, gather(ranks_of(mesh["tp"])))))
    tell(f"ranks that share a layer: {' and '.join(map(str, groups))}")
    for name, wrap in (("without", lambda model, _: model), ("with", shard)):
        model = wrap(split(make(), mesh), mesh)
        loss = get_loss(model, get_group_batch(mesh))
        loss.backward()
        losses = sorted({f"{each:.4f}" for each in gather(loss.item())})
        tell(f"{name} FSDP: the losses of the groups are {' and '.join(losses)}")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        tell(f"{name} FSDP: clipped; the norm of rank 0's gradient was {norm:.4f}")


def ranks_of(mesh):
    return dist.get_process_group_ranks(mesh.get_group())


def whole_mesh_for_parallelize_module():
    parallelize_module(make(), make_mesh(), make_plan())


def fully_shard_first():
    mesh = make_mesh()
    split(shard(make(), mesh), mesh)


def whole_mesh_for_fully_shard():
    mesh = make_mesh()
    model = split(make(), mesh)
    fully_shard(model, mesh=mesh)


def no_mesh_for_fully_shard():
    model = split(make(), make_mesh())
    fully_shard(model)


def fsdp_around_it():
    """No mistake."""
    mesh = make_mesh()
    report_training(shard(split(make(), mesh), mesh), mesh)


def nothing_around_it():
    mesh = make_mesh()
    report_training(split(make(), mesh), mesh)  # the mistake


def ddp_around_it():
    mesh = make_mesh()
    model = split(make(), mesh)
    nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def ddp_with_a_mesh_around_it():
    mesh = make_mesh()
    model = split(make(), mesh)
    ddp = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    report_training(ddp, mesh)


def report_training(model, mesh):
    """Train for some steps; print losses, and what the model says it has."""
    counts = [len(list(model.parameters()))]
    train(model, mesh)
    norm = to_whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    tell_groups("clip_grad_norm_ says of the last gradient", norm.item())
    counts.append(len(list(model.parameters())))
    tell("parameters: {} before the training, {} after it".format(*counts))
    tell(f"copies that differ: {len(copies_that_differ(model, mesh))}")
    tell_groups("losses on the same sequences", evaluate(model))


def weights_of_two_meshes():
    mesh = make_mesh()
    model = parallelize_module(make(), mesh["tp"], make_short_plan())
    get_loss(shard(model, mesh), get_group_batch(mesh)).backward()
    step_with_foreach_or_not(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def plain_weights_and_clipping():
    """As above, but without FSDP."""
    mesh = make_mesh()
    model = parallelize_module(make(), mesh["tp"], make_short_plan())
    get_loss(model, get_group_batch(mesh)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def plain_weights_and_foreach():
    mesh = make_mesh()
    model = parallelize_module(make(), mesh["tp"], make_short_plan())
    get_loss(model, get_group_batch(mesh)).backward()
    step_with_foreach_or_not(model)


def step_with_foreach_or_not(model):
    for foreach in (False, True):  # what AdamW chooses on a CPU, and on a GPU
        torch.optim.AdamW(model.parameters(), foreach=foreach).step()
        tell(f"AdamW(foreach={foreach}): no error")


# ---- plan ----------------------------------------------------------------------------
def no_mistake_in_the_plan():
    report_plan(make_plan())


def names_that_match_nothing():
    plan = {f"model.{name}": part for name, part in make_short_plan().items()}
    report_plan(plan, distribute=False)  # the mistake


def only_the_second_of_a_pair():
    report_plan(without("blocks.*.up"))  # the mistake


def only_the_second_of_a_pair_and_plain_norms():
    report_plan(without("blocks.*.up", plan=make_short_plan()), distribute=False)


def only_the_first_of_a_pair():
    report_plan(without("blocks.*.down"))  # the mistake


def only_the_first_of_a_pair_and_plain_norms():
    report_plan(without("blocks.*.down", plan=make_short_plan()), distribute=False)


def colwise_twice():
    report_plan(make_plan() | {"blocks.*.down": ColwiseParallel()})


def attention_not_in_the_plan():
    report_plan(without("blocks.*.attention.qkv", "blocks.*.attention.out"))


def without(*names, plan=None):
    """Return a plan, by default the stage's, without some of its layers."""
    plan = plan or make_plan()
    return {name: part for name, part in plan.items() if name not in names}


def report_plan(plan, distribute=True):
    """Split a model by a plan; print warnings, the loss, and what a process holds."""
    mesh = make_mesh()
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(model, mesh["tp"], plan)
    for warning in caught:
        tell(f"{warning.category.__name__}: {first_line(warning.message)}")
    if distribute:
        distribute_module(model, mesh["tp"])
    loss = get_loss(model, get_group_batch(mesh))
    held = sum(to_local(weight).nbytes for weight in model.parameters())
    total = sum(weight.nbytes for weight in make().parameters())
    tell(f"loss {loss:.4f}, {held / total:.0%} of the weights on a process")


def norms_not_distributed():
    mesh = make_mesh()
    model = parallelize_module(make(), mesh["tp"], make_plan())  # no distribute_module
    get_loss(model, get_group_batch(mesh))


def plain_load_state_dict():
    weights = make().state_dict()
    split(make(), make_mesh()).load_state_dict(weights)


def tied_weights():
    report_tied(again=False)  # the mistake


def tied_weights_tied_again():
    """No mistake."""
    report_tied(again=True)


def report_tied(again):
    """Split a model whose head uses the embedding's weight; count and compare."""
    mesh = make_mesh()
    model, one = make_tied(), make_tied()
    counts = [len(list(model.parameters()))]
    split(model, mesh)
    if again:
        model.head.weight = model.tokens.weight
    counts.append(len(list(model.parameters())))
    tell("parameters: {} before the split, {} after it".format(*counts))
    compare(shard(model, mesh), get_group_batch(mesh), one)
    train(model, mesh)
    apart = to_whole(model.head.weight - model.tokens.weight).abs().max()
    tell(f"after 10 steps, the embedding and the head differ by {apart:.4f}")


def make_tied():
    model = make()
    model.head.weight = model.tokens.weight
    return model


# ---- logits --------------------------------------------------------------------------
def split_with_head(head):
    """Return a model whose plan has this entry for the head."""
    mesh = make_mesh()
    return split(make(), mesh, make_plan() | {"head": head})


def gathered_logits():
    """No mistake."""
    model = split_with_head(ColwiseParallel(output_layouts=Replicate()))
    tell_groups("losses", get_loss(model, get_batch()).item())


def logits_left_split():
    model = split_with_head(ColwiseParallel())  # the mistake
    inputs, targets = get_batch()
    tell_groups("losses", get_loss(model, (inputs, targets)).item())
    targets[0, 0] = 195  # the first byte of an é
    get_loss(model, (inputs, targets))


def loss_parallel_around_both():
    """No mistake."""
    model = split_with_head(ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = get_loss(model, get_batch())
        loss.backward()
    tell_groups("losses", to_whole(loss).item())


def without_loss_parallel():
    model = split_with_head(ColwiseParallel(use_local_output=False))
    get_loss(model, get_batch())  # the mistake


def loss_parallel_around_forward():
    model = split_with_head(ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = get_loss(model, get_batch())
    loss.backward()  # the mistake


# ---- alone ---------------------------------------------------------------------------
def whole_weights_on_rank_0():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    if dist.get_rank() == 0:
        get_model_state_dict(model, options=WHOLE)  # the mistake


def generate_on_rank_0():
    mesh = make_mesh()
    model = shard(split(make(), mesh), mesh)
    if dist.get_rank() == 0:
        generate(model, b"\n", 8)  # the mistake


def weights_on_rank_0_only():
    model = make()
    if dist.get_rank() > 0:
        model.to("meta")
    split(model, make_mesh())  # the mistake


# ---- the run -------------------------------------------------------------------------
# the number of processes, and the mistakes
GROUPS = {
    "samples": (4, same_samples_in_a_tp_group, different_samples_in_a_tp_group),
    "uneven": (2, fewer_samples_on_a_rank),
    "attention": (
        2,
        heads_next_to_each_other,
        queries_keys_values_in_thirds,
        width_of_heads_inferred,
        heads_that_tp_does_not_divide,
        number_of_heads_fixed,
    ),
    "random": (
        4,
        dropout_seeded_by_dp_rank,
        dropout_seeded_by_rank,
        dropout_inside_a_pair,
        dropout_inside_a_pair_with_a_generator,
        weights_seeded_by_rank,
        weights_not_in_the_plan_seeded_by_rank,
    ),
    "sequence": (4, norms_in_the_plan, norms_not_in_the_plan),
    "sums": (
        4,
        norm_by_hand,
        report_norms_of_parts,
        every_process_counts,
        state_dict_of_each_rank,
    ),
    "exercise": (4, norm_in_a_tp_group_of_four),
    "mesh": (
        4,
        dimensions_in_the_right_order,
        dimensions_swapped,
        whole_mesh_for_parallelize_module,
        fully_shard_first,
        whole_mesh_for_fully_shard,
        no_mesh_for_fully_shard,
        fsdp_around_it,
        nothing_around_it,
        ddp_around_it,
        ddp_with_a_mesh_around_it,
        weights_of_two_meshes,
        plain_weights_and_clipping,
        plain_weights_and_foreach,
    ),
    "plan": (
        2,
        no_mistake_in_the_plan,
        names_that_match_nothing,
        only_the_second_of_a_pair,
        only_the_second_of_a_pair_and_plain_norms,
        only_the_first_of_a_pair,
        only_the_first_of_a_pair_and_plain_norms,
        colwise_twice,
        attention_not_in_the_plan,
        norms_not_distributed,
        plain_load_state_dict,
        tied_weights,
        tied_weights_tied_again,
    ),
    "logits": (
        2,
        gathered_logits,
        logits_left_split,
        loss_parallel_around_both,
        without_loss_parallel,
        loss_parallel_around_forward,
    ),
    "alone": (2, whole_weights_on_rank_0, generate_on_rank_0, weights_on_rank_0_only),
}


@functools.cache
def find_others():
    """Return the store of all processes, this one's rank, and their number."""
    return next(dist.rendezvous("env://"))


def attempt(mistake, seconds):
    """Make a mistake in a process group of its own, and tell its error.

    seconds: how long a rank waits for another one.
    """
    store, rank, world_size = find_others()
    store = dist.PrefixStore(mistake.__name__, store)
    # otherwise the timeout would count from when the first of them is here
    store.set(f"{rank} is here", "")
    store.wait([f"{other} is here" for other in range(world_size)])
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    tell_name(mistake)
    error = ""
    try:
        mistake()
    except Exception as raised:
        error = reason(raised)
    store.set(f"error {rank}", error)
    # this waits for all ranks, so that none leaves while another one waits for it
    errors = [store.get(f"error {other}").decode() for other in range(world_size)]
    if len(set(errors)) == 1:
        errors = {"all ranks": error}
    else:
        errors = {f"rank {rank}": each for rank, each in enumerate(errors)}
    for ranks, each in errors.items():
        if each:
            tell(f"{ranks}: {each}")
    gc.collect()  # on gloo, a model still alive can abort the process
    dist.destroy_process_group()


def tell_name(mistake):
    if dist.get_rank() == 0:
        print(mistake.__name__, flush=True)


def reason(error):
    """Return the type of an error, and the first line of what it says."""
    text = re.sub(r"\[/\S+?:\d+\] ", "", str(error))  # a line of torch's C++ code
    text = re.sub(r", whose dimensions .*?, an", " ... an", text)
    first, *others = (line.strip() for line in text.splitlines())
    if first.endswith(":"):
        first += f" {others[0]}"
    return f"{type(error).__name__}: {first}"


def first_line(message):
    return str(message).splitlines()[0]


def main():
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in GROUPS:
        fail(f"name some of the mistakes: {', '.join(GROUPS)}")
    launch.check()
    processes, *mistakes = GROUPS[name]
    if int(os.environ["WORLD_SIZE"]) != processes:
        fail(f"{name} needs --nproc-per-node={processes}")
    launch.ignore_mesh_warnings()
    for mistake in mistakes:
        attempt(mistake, seconds=5 if name == "alone" else 60)
    # rank 0, which may have the store, leaves last
    store, rank, world_size = find_others()
    store.set(f"{rank} leaves", "")
    if rank == 0:
        store.wait([f"{other} leaves" for other in range(world_size)])


if __name__ == "__main__":
    main()
