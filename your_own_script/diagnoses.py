"""Say why two runs of a script part: what check_yours.py prints below each of them.

    python diagnoses.py FOLDER

looks again at what check_yours.py --keep=FOLDER SCRIPT has kept. differences.py finds
the places where the runs part. Here each function is the cause of one, and its name
says which. It looks at a Difference d of the runs c, and returns whether it is that; if
the texts above it have names in braces, it returns their values. The first that applies
is told, so the order matters: what can be seen for certain comes first, and "nothing of
the above" last.
"""

# ruff: noqa: ARG001 (all causes are asked with the same two arguments)
import json
import re
import sys
from collections import Counter
from itertools import combinations
from math import isclose
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from differences import ORDER
from differences import SEARCHES
from differences import Difference
from differences import Runs
from differences import Trace
from differences import merge
from differences import name_them
from differences import printed_numbers_differ
from differences import unequal
from differences import unequal_between_ranks

PAGE = "your_own_script/README.md"
ACCUMULATION = "08_grad_accumulation/08_grad_accumulation.ipynb"
SPECIAL, BATCHES = f"{PAGE}, Special cases", f"{PAGE}, Batches drawn at random"
ASSUMES = f"{PAGE}, What the checklist assumes"
# What is told below another difference, because it does not follow from it.
INDEPENDENT = {"stopped", "untied", "order", "draws", "unowned", "evaluation", "files"}


class Because(NamedTuple):
    """Why something differs, what to do, and where that is explained."""

    cause: str
    cure: str
    see: str
    seen: str  # in place of what the Difference says
    note: bool  # so by nature, and no mistake
    unsure: bool  # the operations can say more


TENSOR_PARALLEL = "tensor parallelism"

CAUSES = {}  # for each kind of difference the functions that explain it


def explains(*kinds, cause, cure, see, seen="{seen}", note=False, unsure=False):
    def add(function):
        def explain(c, d):
            values = function(c, d)
            if not values:
                return None
            values = values if isinstance(values, dict) else {}
            values = {"seen": d.seen, "step": d.step, "n": c.n} | values
            texts = [text.format(**values) for text in (cause, cure, see, seen)]
            return Because(*texts, note, unsure)

        for kind in kinds:
            CAUSES.setdefault(kind, []).append(explain)
        return function

    return add


def row(number):
    return f"{PAGE}, row {number}"


# ---- the data ------------------------------------------------------------------------
@explains(
    "set order",
    cause="the order of a set, or hash(), is different in each process; or something "
    "is drawn without a seed",
    cure="sorted(...) around the set, so that all ranks number its members alike",
    see=row(4),
)
def order_of_a_set(c, d):
    """Other numbers in a new Python, of a script that has a set or calls hash()."""
    return True


@explains(
    "order",
    cause="the sampler is not told the epoch, so every epoch has the same order",
    cure="sampler.set_epoch(epoch) before each pass over the loader",
    see=row(7),
)
def epoch_not_set(c, d):
    """The sampler shuffles, and has a set_epoch."""
    return True


@explains(
    "samples",
    cause="LOCAL_RANK counts on each machine, and is used where RANK belongs",
    cure='int(os.environ["RANK"]) for the samples, LOCAL_RANK for the device only',
    see=row(1),
    seen="step {step}: ranks with the same LOCAL_RANK train on the same samples",
)
def local_rank_as_rank(c, d):
    """With --nodes=2: two ranks have the same samples if they have one local rank."""
    pairs = list(combinations(range(c.n), 2))
    same = [d.each[a] == d.each[b] for a, b in pairs]
    local = [c.local_ranks[a] == c.local_ranks[b] for a, b in pairs]
    if not any(local) or same != local:
        return False
    # If all have the local rank 0, it can also be that nothing deals the samples out.
    return not all(local) or any(each["replicas"] for each in c.ranks[0].trained())


@explains(
    "samples",
    cause="nothing deals the samples out",
    cure="let each rank take its part of the global batch: x[rank::world_size]",
    see=BATCHES,
)
def batch_not_dealt_out(c, d):
    """All ranks have the same samples, and no loader."""
    return d.same and not c.ranks[0].trained()


@explains(
    "samples",
    cause="each sampler was given the same rank",
    cure="leave rank and num_replicas to DistributedSampler",
    see=row(5),
)
def sampler_with_a_fixed_rank(c, d):
    """All ranks have the same samples, and a sampler that deals them out."""
    return d.same and any(each["replicas"] for each in c.ranks[0].trained())


@explains(
    "samples",
    cause="each rank reads the whole stream ({at})",
    cure="take every n-th in __iter__: itertools.islice(stream, rank * workers + "
    "worker, None, world_size * workers)",
    see="recipes/iterable_dataset.py",
)
def stream_not_dealt_out(c, d):
    """All ranks have the same samples, of an IterableDataset."""
    loaders = c.ranks[0].trained()
    if not d.same or not loaders or loaders[0]["size"] is not None:
        return False
    return {"at": loaders[0]["at"]}


@explains(
    "samples",
    cause="no sampler deals the samples out: each rank reads all of them ({at})",
    cure="sampler=DistributedSampler(train_set, drop_last=True), and no shuffle=True",
    see=row(5),
)
def no_sampler(c, d):
    """All ranks have the same samples, or read as many in a pass as one process."""
    loaders = c.ranks[0].trained()
    if not loaders or any(each["replicas"] for each in loaders):
        return False
    alone, *each = [
        samples_of_pass(t, 1, "rows") for t in (c.one or c.ranks[0], *c.ranks)
    ]
    reads_all = all(len(set(x) & set(alone)) > 0.9 * len(set(alone)) for x in each)
    if d.same or reads_all:
        return {"at": loaders[0]["at"]}
    return False


def samples_of_pass(trace, number, kind):
    """Return how often a rank reads each sample in a pass over the data."""
    batches = trace.passes[number - 1 : number]
    return Counter(x for each in batches for b in each for x in b[kind] or ())


@explains(
    "samples",
    "inputs",
    cause="each rank builds a different data set: from files in an unsorted order, or "
    "with random numbers without a seed",
    cure="sorted(...) around what lists the files; a seed for what is drawn",
    see=row(4),
    seen="step {step}: sample {index} of the data set is not the same on {a} and {b}",
)
def data_set_of_its_own(c, d):
    """Most indices stand for another sample than on another rank."""
    if c.random or c.one is None or has_other_widths(c, d):
        return False
    names = [*(f"rank {rank}" for rank in range(c.n)), "one process"]
    each = [(n, by_index(t)) for n, t in zip(names, (*c.ranks, c.one), strict=True)]
    for (a, one), (b, other) in combinations(each, 2):
        shared = one.keys() & other.keys()
        wrong = [i for i in shared if one[i] != other[i]]
        if len(wrong) > len(shared) / 2:
            return {"index": min(wrong), "a": a, "b": b}
    return False


def by_index(trace):
    """Return {index in the data set: hash of the sample}, of all passes."""
    return {
        index: sample
        for batches in trace.passes
        for b in batches
        if b["index"] and len(b["index"]) == len(b["rows"])
        for index, sample in zip(b["index"], b["rows"], strict=True)
    }


@explains(
    "samples",
    cause="each rank splits the data set differently, and trains on samples that "
    "another one validates with",
    cure="random_split(..., generator=torch.Generator().manual_seed(0)) on all ranks",
    see=row(4),
    seen="step {step}: the ranks train on different subsets of the data set",
)
def split_of_its_own(c, d):
    """A sampler deals out a Subset, which has other indices on each rank."""
    each = [[(x["size"], x["subset"]) for x in t.trained()] for t in c.ranks]
    dealt = any(x["replicas"] for x in c.ranks[0].trained())
    return dealt and any(subsets != each[0] for subsets in each)


@explains(
    "samples",
    cause="a rank skips batches that the others train on ({passes} forward passes in "
    "the step): it decides by its own loss, or by what its samples are",
    cure="decide together: all-reduce what decides",
    see="docs/uneven_inputs.md",
)
def batch_skipped(c, d):
    """The ranks take different numbers of forward passes in the step."""
    passes = [len(trace.steps[d.s].forwards) for trace in c.ranks]
    return len(set(passes)) > 1 and {"passes": ", ".join(map(str, passes))}


@explains(
    "samples",
    cause="the batch size is not divided by the world size",
    cure="batch_size // world_size in the loader; or scale the learning rate, knowing "
    "that the training is different",
    see=row(8),
)
def batch_not_divided(c, d):
    """N times as many samples in a step."""
    times = sum(d.each, Counter()).total() / d.wanted.total()
    return isclose(times, c.n) or (times > 1.5 and d.s == 0)


@explains(
    "samples",
    cause="each sampler has a different seed ({seeds}) and so a different order: some "
    "samples are read twice, others never",
    cure="the same seed on all ranks",
    see=row(5),
)
def sampler_seed_of_its_own(c, d):
    """The samplers' seeds differ."""
    seeds = [[x["seed"] for x in t.trained()] for t in c.ranks]
    if all(each == seeds[0] for each in seeds):
        return False
    return {"seeds": ", ".join(f"{each[0]}" for each in seeds if each)}


@explains(
    "samples",
    cause="the sampler repeats samples, so that all ranks have as many, and the last "
    "batch is a short one",
    cure="drop_last=True in the sampler and in the loader",
    see=row(6),
    seen="{seen}, in the last step of a pass",
)
def sampler_pads(c, d):
    """In the last step of a pass, with a sampler without drop_last=True."""
    return is_last_of_pass(c, d) and any(x["pads"] for x in c.ranks[0].trained())


@explains(
    "samples",
    cause="the last batch is shorter, and weighs as much as a full one",
    cure="drop_last=True in the loader, as in the sampler",
    see=row(6),
    seen="{seen}, in the last step of a pass",
)
def short_last_batch(c, d):
    """In the last step of a pass, with another number of samples."""
    return is_last_of_pass(c, d) and d.wanted.total() != sum(d.each, Counter()).total()


def is_last_of_pass(c, d):
    """Return whether a step is the last of a pass, after which there can be another."""
    for trace in (c.one, c.ranks[0]):
        steps = trace.steps[d.s : d.s + 2]
        if d.s and (len(steps) < 2 or steps[0].number != steps[1].number):
            return True
    return False


@explains(
    "samples",
    cause="the batch is divided twice: its size, and the number of micro-batches",
    cure="divide one of them by the world size",
    see=f"{PAGE}, Gradient accumulation",
)
def batch_divided_twice(c, d):
    """One N-th of the samples in a step."""
    return is_factor(sum(d.each, Counter()).total() / d.wanted.total(), 1 / c.n)


@explains(
    "samples",
    cause="{n} processes do not divide the batch evenly",
    cure="a global batch size that the world size divides",
    see=row(8),
)
def batch_cannot_be_divided(c, d):
    """Another number of samples in any other step."""
    return d.wanted.total() != sum(d.each, Counter()).total()


@explains(
    "samples",
    "inputs",
    cause="each rank normalizes with the mean and deviation of its own samples",
    cure="use the statistics of the whole data set on all ranks",
    see=SPECIAL,
)
def normalized_by_its_own_statistics(c, d):
    """What the model gets has the mean 0 and the deviation 1 exactly, on each rank."""
    forwards = [trace.steps[0].forwards for trace in c.ranks]
    moments = [each[0]["moments"] if each else None for each in forwards]
    return all(each and max(each) < 1e-6 for each in moments)


@explains(
    "inputs",
    cause="each rank draws it from a generator with the same seed",
    cure="draw for the global batch, and take [rank::world_size] of it",
    see=BATCHES,
    seen="step {step}: argument {number} of the model is the same on all ranks",
)
def same_negatives(c, d):
    """One of the model's arguments is the same on all ranks, and not on one process."""
    forwards = [trace.steps[d.s].forwards for trace in (c.one, *c.ranks)]
    if not all(forwards):
        return False
    alone, *each = [first[0].get("arguments", []) for first in forwards]
    for number, (whole, *parts) in enumerate(zip(alone, *each, strict=False), start=1):
        same = all(part == parts[0] for part in parts)
        is_dealt_out = Counter(whole) == sum(map(Counter, parts), Counter())
        if same and not is_dealt_out and len(set(whole)) > 1:
            return {"number": number}
    return False


@explains(
    "samples",
    "inputs",
    cause="noise or augmentation, which follows the rank by nature",
    cure="turn it off for the check",
    see=f"{PAGE}, Check yours",
    seen="step {step}: what the model gets is random",
    note=True,
)
def noise_by_rank(c, d):
    """What the model gets changes with the state of the random generators."""
    return c.inputs_random and (d.kind == "inputs" or d.base == "model")


@explains(
    "noise",
    cause="they follow the rank by nature",
    cure="turn them off for the check",
    see=f"{PAGE}, Check yours",
    note=True,
)
def noise_in_the_model(c, d):
    """As in a variational autoencoder."""
    return True


@explains(
    "samples",
    cause="each rank shuffles differently",
    cure="the same seed for the order on all ranks; DistributedSampler sees to that",
    see=row(5),
    seen="pass {number}: {twice} samples are read twice and {never} never",
)
def order_of_its_own(c, d):
    """In the whole pass, samples are read twice and others never."""
    number = c.one.steps[d.s].number
    if d.base == "model" or not number:
        return False
    kind = "rows" if d.base == "loader" else "index"
    alone, *each = [samples_of_pass(t, number, kind) for t in (c.one, *c.ranks)]
    got = sum(each, Counter())
    twice = sum(max(count - max(alone[x], 1), 0) for x, count in got.items())
    never = sum(x not in got for x in alone)
    return twice and {"number": number, "twice": twice, "never": never}


@explains(
    "samples",
    cause="the samples are dealt out by {many}, and on one process by {one}",
    cure="use the same sampler on one process, too: DistributedSampler works there",
    see=row(5),
)
def another_sampler(c, d):
    """The loaders have samplers of different classes."""
    one, many = ({x["sampler"] for x in t.trained()} for t in (c.one, c.ranks[0]))
    return one != many and {"one": "/".join(one), "many": "/".join(many)}


@explains(
    "samples",
    cause="each rank draws or shuffles for itself, takes another part than its own, or "
    "computes something from its own part first, such as a mean or a vocabulary",
    cure="draw for the global batch on all ranks with one seed, take "
    "[rank::world_size], and compute from all samples",
    see=BATCHES,
)
def samples_of_its_own(c, d):
    """Nothing of the above."""
    return True


@explains(
    "inputs",
    cause="sequences are padded to the longest of the batch, and something reads the "
    "padding",
    cure="pad all of them to the same length for the check",
    see=f"{PAGE}, Check yours",
    note=True,
)
def padded_to_the_longest(c, d):
    """What the model gets has another width than on one process."""
    return has_other_widths(c, d)


def has_other_widths(c, d):
    forwards = [t.steps[0].forwards for t in (c.one, *c.ranks)]
    if not all(forwards):
        return False
    widths = [[shape[1:] for shape in each[0].get("shapes", [])] for each in forwards]
    return d.s == 0 and any(each != widths[0] for each in widths)


@explains(
    "inputs",
    cause="it is computed from the other samples of the batch (their mean, their "
    "longest), or drawn from a generator of its own",
    cure="compute it per sample, or for the whole data set before that is dealt out",
    see=ASSUMES,
)
def computed_from_the_batch(c, d):
    """Nothing of the above."""
    return True


@explains(
    "draws",
    cause="all ranks have the same seed when they draw",
    cure="torch.manual_seed(seed + rank) after the model is made",
    see=row(11),
)
def same_torch_seed(c, d):
    """The state of torch's generator is the same on all ranks."""
    return d.generator == "torch"


@explains(
    "draws",
    cause="all ranks have the same seed when they draw",
    cure="seed it with the rank, too",
    see=row(11),
)
def same_seed(c, d):
    """The state of Python's or NumPy's generator is."""
    return True


# ---- the model -----------------------------------------------------------------------
@explains(
    "untied",
    cause="{by} gives each name a tensor of its own, and the copies are trained apart",
    cure="tie them again afterwards, before fully_shard and the optimizer, and leave "
    "both to the root",
    see="your_own_script/hugging_face/README.md",
)
def weights_came_apart(c, d):
    """Names that shared a tensor, and do not when training begins."""
    return {"by": d.by}


@explains(
    "start",
    cause="a part that only one of the runs has; or weights that share a tensor (are "
    "tied) in one of them only",
    cure="make the same model on any number of processes; tie weights after copying "
    "them",
    see=SPECIAL,
)
def another_model(c, d):
    """A parameter is missing in one of the runs."""
    return d.only


@explains(
    "start",
    cause="each rank has drawn weights of its own, or loaded them on one rank only, "
    "and nothing copies rank 0's",
    cure="torch.manual_seed(0) before the model is made, or DistributedDataParallel",
    see=row(9),
)
def weights_of_its_own(c, d):
    """They differ between ranks."""
    return d.between


@explains(
    "start",
    cause="they are drawn in another order, or each rank shards weights that it has "
    "drawn for itself",
    cure="torch.manual_seed(0) on all ranks before the model is made",
    see="your_own_script/ddp_to_fsdp2.md",
)
def shards_of_different_weights(c, d):
    """They differ from those of one process."""
    return True


@explains(
    "outputs",
    cause="batch norm takes the statistics of the rank's own samples, which is its "
    "nature",
    cure="put group norm in its place for the check",
    see=f"{PAGE}, Batch norm",
    note=True,
)
def batch_norm(c, d):
    """The first module with another output is a batch norm."""
    return "BatchNorm" in d.module


@explains(
    "operations",
    cause="it compares the samples of a batch, of which a rank has fewer",
    cure="gather what is compared from all ranks",
    see=f"{SPECIAL}; recipes/contrastive_loss.py",
)
def compares_samples(c, d):
    """An operation has more numbers for a sample if the batch is larger."""
    return d.wider


@explains(
    "outputs",
    cause="it takes the samples for a sequence, and attends across them",
    cure="batch_first=True",
    see=ASSUMES,
)
def attends_across_samples(c, d):
    """It is an attention."""
    return re.search("Attention|Transformer", d.module)


@explains(
    "operations",
    "outputs",
    cause="it depends on the other samples of the batch: on their mean, or because it "
    "takes the first dimension for another one",
    cure="compute it for each sample by itself, or over all ranks",
    see=ASSUMES,
    unsure=True,
)
def mixes_samples(c, d):
    """It is any other module, or an operation."""
    return True


# ---- gradients -----------------------------------------------------------------------
@explains(
    "own gradients",
    "gradients",
    "own weights",
    "weights",
    cause="{who} changes weights between steps {step} and {following}, outside of the "
    "optimizer",
    cure="do the same on all ranks, or broadcast rank 0's",
    see=SPECIAL,
)
def changed_between_steps(c, d):
    """The weights before a step are not those after the one before it."""
    runs = [*(f"rank {rank}" for rank in range(c.n)), "one process"]
    changing = [
        who
        for who, trace in zip(runs, (*c.ranks, c.one), strict=True)
        if trace and changes_weights_before(trace, d.step - 1)
    ]
    if 0 < len(changing) < len(runs) - (c.one is None):
        return {"who": " and ".join(changing), "step": d.step - 1, "following": d.step}
    return False


def changes_weights_before(trace, s):
    """Return whether weights have changed since the last step of the same optimizer."""
    if not 0 < s < len(trace.steps):
        return False
    now, earlier = trace.steps[s], trace.steps[s - 1]
    if now.facts["optimizer"] != earlier.facts["optimizer"] or not earlier.total:
        return False
    before = now.facts["before"]
    return bool(before and unequal(merge([earlier.total]), merge([before])))


@explains(
    "own gradients",
    cause="it was frozen, or not there, when DistributedDataParallel was made, which "
    "only averages what it saw then",
    cure="unfreeze first, then wrap",
    see=SPECIAL,
)
def unfrozen_late(c, d):
    """A parameter of a wrapped model that was not to be trained when it was wrapped."""
    return those_among(d, c.ranks[0].steps[d.s].facts["late"])


@explains(
    "own gradients",
    cause="it is in no wrapped model",
    cure="make it a part of the model that is wrapped, or wrap its own",
    see=row(9),
)
def in_no_wrapper(c, d):
    """A parameter outside of all wrapped models, of which there are some."""
    return those_among(d, c.ranks[0].steps[d.s].facts["outside"])


def those_among(d, others):
    """Return that the gradients of some names differ, if these are among the others.

    After the steps of which each tensor is recorded, it can be any of the others.
    """
    names = others if "all" in d.names else [name for name in d.names if name in others]
    which = f"the gradient of {name_them(names)}" if names else ""
    return names and {"seen": f"step {d.step}: {which} differs between the ranks"}


@explains(
    "own gradients",
    cause="{at} calls the {model}, not the {inside} around it, which averages",
    cure="call the wrapper",
    see=f"{row(9)}; 03_ddp_launch/03_ddp_launch.ipynb",
)
def bare_model_called(c, d):
    """The module that is called is inside of a wrapper."""
    for forward in c.ranks[0].steps[d.s].forwards:
        if forward["inside"]:
            return forward
    return False


@explains(
    "own gradients",
    "gradients",
    cause="{how} at {at} has {ranks} of the {n} processes",
    cure="no mesh or process group, or one of all: init_device_mesh(device.type, "
    "(world_size,))",
    see="your_own_script/ddp_to_fsdp2.md",
)
def mesh_of_the_wrong_size(c, d):
    """A wrapper was made with fewer ranks than there are."""
    wraps = [each for each in c.ranks[0].kept["wrap"] if each["ranks"] < c.n]
    return wraps and wraps[0]


@explains(
    "own gradients",
    cause="{at} calls a model that is in no DistributedDataParallel",
    cure="wrap it, and call the wrapper",
    see=row(9),
)
def no_wrapper(c, d):
    """All models that are called are bare."""
    forwards = c.ranks[0].steps[d.s].forwards
    bare = forwards and all(each["how"] == "bare" for each in forwards)
    return bare and {"at": forwards[0]["at"]}


@explains(
    "own gradients",
    "nothing",
    cause="{at}: the last forward pass before the step is one without synchronization",
    cure="leave no_sync(), or set_requires_gradient_sync(True), for the last "
    "micro-batch",
    see=ACCUMULATION,
)
def no_sync_left_on(c, d):
    """The wrapper said so when it was called."""
    forwards = c.ranks[0].steps[d.s].forwards
    return forwards and not forwards[-1]["sync"] and {"at": forwards[-1]["at"]}


@explains(
    "own gradients",
    cause="nothing averages it: another method than forward is called, or a backward "
    "pass comes between a model's forward and backward",
    cure="call the wrapper itself, and its backward pass next",
    see=f"{SPECIAL}; recipes/two_networks.py",
)
def not_averaged(c, d):
    """Nothing of the above."""
    return True


@explains(
    "gradients",
    cause="a part that the other run does not use, or weights that are tied in one "
    "only",
    cure="use it on all ranks: 0 * outputs.sum() keeps it in the loss",
    see=f"{PAGE}, A parameter that the loss does not use",
    seen="step {step}: {which} has a gradient on {where} only",
)
def used_in_one_run_only(c, d):
    """A parameter has a gradient in one of the runs only."""
    only = [name for name in [*d.one, *d.other] if (name in d.one) != (name in d.other)]
    if not only:
        return False
    where = "one process" if only[0] in d.one else f"{c.n} processes"
    return {"which": name_them(only), "where": where}


@explains(
    "gradients",
    cause="the loss is a sum over the batch, and the ranks' gradients are averaged; "
    "or it is divided by the world size, too",
    cure="(world_size * loss).backward(), or a mean",
    see=SPECIAL,
    seen="step {step}: the gradients are 1/{n} of those of one process",
)
def loss_is_a_sum(c, d):
    """All gradients are 1/N of those of one process."""
    return is_factor(common_factor(d), 1 / c.n)


@explains(
    "gradients",
    cause="the gradients of the ranks are summed where their mean belongs: an "
    "all_reduce without a division, or a loss that is multiplied by the world size",
    cure="divide by the world size",
    see=SPECIAL,
    seen="step {step}: the gradients are {n} times those of one process",
)
def summed_not_averaged(c, d):
    """All gradients are N times those of one process."""
    return is_factor(common_factor(d), c.n)


@explains(
    "gradients",
    cause="the loss is divided by another number of micro-batches or samples, or "
    "clipped by another norm",
    cure="divide by what belongs to the global batch",
    see=ACCUMULATION,
    seen="step {step}: the gradients are {factor:.6g} times those of one process",
)
def divided_by_another_number(c, d):
    """All gradients are so many times those of one process."""
    factor = common_factor(d)
    return factor is not None and {"factor": factor}


def is_factor(factor, wanted):
    return factor is not None and isclose(factor, wanted, rel_tol=1e-6)


def common_factor(d):
    """Return by what all gradients are multiplied, or None."""
    total = sqrt(sum(norm**2 for norm, _ in d.one.values()))
    large = [name for name in d.one if d.one[name][0] > 1e-6 * total]
    factors = [d.other[name][0] / d.one[name][0] for name in large]
    if not factors or max(factors) - min(factors) > 1e-6 * max(factors):
        return None
    for name in large:
        expected, limit = factors[0] * d.one[name][1], 1e-8 * d.other[name][0]
        if not isclose(d.other[name][1], expected, rel_tol=1e-5, abs_tol=limit):
            return None
    return factors[0]


@explains(
    "gradients",
    cause="{at} clips a gradient that the last backward pass of the step has not yet "
    "completed and averaged",
    cure="clip once per step, after the last backward pass",
    see=SPECIAL,
)
def clipped_early(c, d):
    """clip_grad_norm_ is called before the last backward pass of the step."""
    step = c.ranks[0].steps[d.s]
    early = (
        "clip" in step.calls and "backward" in step.calls[step.calls.index("clip") :]
    )
    return early and {"at": step.clips[0]["at"]}


@explains(
    "gradients",
    "weights",
    cause="each rank computes it from its own samples, and the model uses it",
    cure="all-reduce the sums that it is computed from",
    see=f"{SPECIAL}; your_own_script/rare_cases.md",
    seen="after step {before}, the buffer {which} is not that of one process",
)
def buffer_of_its_own_samples(c, d):
    """After the step before, a buffer differed, and it is none of batch norm's."""
    if d.step < 2:
        return False
    alone, *each = [trace.steps[d.step - 2].buffers for trace in (c.one, *c.ranks)]
    if not alone or None in each:
        return False
    names = unequal_between_ranks(each) + unequal(merge([alone]), merge(each))
    names = [name for name in names if not re.search("running_|num_batches", name)]
    return names and {"before": d.step - 1, "which": name_them(names)}


@explains(
    "gradients",
    cause="the ranks have different numbers of samples ({sizes}) and the same weight",
    cure="divide the sum of the losses by the number of all ranks' samples",
    see="docs/uneven_inputs.md",
)
def shards_of_different_sizes(c, d):
    """The model gets more samples on one rank than on another."""
    steps = [trace.steps[d.s] for trace in c.ranks]
    sizes = [sum(len(f["rows"]) for f in step.forwards) for step in steps]
    return len(set(sizes)) > 1 and {"sizes": ", ".join(map(str, sizes))}


@explains(
    "gradients",
    cause="{norms} takes the statistics of the rank's own samples, which is its nature",
    cure="put group norm in its place for the check",
    see=f"{PAGE}, Batch norm",
    note=True,
)
def batch_norm_in_the_model(c, d):
    """The model has one, whose output was not seen."""
    norms = sorted({n for f in c.ranks[0].steps[d.s].forwards for n in f["norms"]})
    return norms and {"norms": ", ".join(norms)}


@explains(
    "gradients",
    cause="the loss of one process is {one:.6g}, and none of the ranks' is as {what}, "
    "so it compares the samples of a batch, of which a rank has fewer",
    cure="gather what is compared from all ranks",
    see=f"{SPECIAL}; recipes/contrastive_loss.py",
    unsure=True,
)
def loss_compares_samples(c, d):
    """One process's loss is no mean of the ranks' losses, whatever their weights."""
    one, each = losses(c, d)
    if one is None or fits(one, each) or min(each) <= one <= max(each):
        return False
    return {"one": one, "what": "large" if one > max(each) else "small"}


@explains(
    "gradients",
    cause="the mean of the ranks' losses is {mean:.6g}, that of one process "
    "{one:.6g}: each rank divides by its own count (tokens, a mask, class weights)",
    cure="all-reduce the divisor, and multiply the loss by the world size",
    see=SPECIAL,
    unsure=True,
)
def mean_over_different_counts(c, d):
    """It is between the ranks' losses, and not in the middle."""
    one, each = losses(c, d)
    if one is None or fits(one, each):
        return False
    return {"one": one, "mean": sum(each) / len(each)}


def fits(one, each):
    """Return whether a loss is the mean of others, or their sum."""
    wholes = sum(each) / len(each), sum(each)
    return any(isclose(one, whole, rel_tol=1e-9) for whole in wholes)


def losses(c, d):
    """Return one process's loss in a step, and that of each rank; None if not seen."""
    each = [trace.steps[d.s].losses for trace in (c.one, *c.ranks)]
    if any(not x or None in x for x in each):
        return None, []
    one, *each = map(sum, each)
    return one, each


@explains(
    "gradients",
    cause="{at} clips each rank's own gradient, before they are averaged",
    cure="average first, then clip",
    see=SPECIAL,
)
def clipped_before_the_average(c, d):
    """What clip_grad_norm_ gets differs between the ranks."""
    clips = [trace.steps[d.s].clips for trace in c.ranks]
    if not all(clips) or not unequal_between_ranks([x[-1]["gradients"] for x in clips]):
        return False
    return {"at": clips[0][-1]["at"]}


@explains(
    "gradients",
    cause="what {name} returns ({at}) has no gradient, so that it does not reach the "
    "other ranks' samples",
    cure="gather with torch.distributed.nn.functional.all_gather",
    see=f"{SPECIAL}; recipes/contrastive_loss.py",
)
def gathered_without_a_gradient(c, d):
    """Something was gathered in the step, and the losses fit."""
    calls = collectives_after(c.ranks[0], d.s)
    gathers = [event for event in calls if event["name"].startswith("all_gather")]
    return losses(c, d)[0] is not None and gathers and gathers[0]


@explains(
    "gradients",
    cause="the losses fit, and the gradient does not: something is detached; or "
    "clipped by a norm of its own; or scaled or reduced twice",
    cure="look at what happens to a gradient between backward() and step()",
    see=SPECIAL,
    unsure=True,
)
def changed_after_the_loss(c, d):
    """The losses fit."""
    return losses(c, d)[0] is not None


@explains(
    "gradients",
    cause="a mean over counts that differ by rank, or what is computed from the whole "
    "batch",
    cure="all-reduce the divisor, and multiply by the world size",
    see=SPECIAL,
    unsure=True,
)
def loss_was_not_seen(c, d):
    """Nothing of the above."""
    return True


# ---- the optimizer and the loop ------------------------------------------------------
@explains(
    "nothing",
    cause="the optimizer has tensors that the model no longer uses",
    cure="make it after fully_shard, or after whatever replaces the parameters",
    see="your_own_script/ddp_to_fsdp2.md",
)
def optimizer_made_first(c, d):
    """Its tensors are in no model that was called."""
    return c.ranks[0].lost


@explains(
    "nothing",
    cause="no parameter of the optimizer gets a gradient",
    cure="look at what the optimizer was given, and at what backward() reaches",
    see=row(9),
)
def no_gradient(c, d):
    """There is none in all steps."""
    return not any(step.facts["gradients"] for step in c.ranks[0].steps)


@explains(
    "nothing",
    cause="the learning rate or the gradients are 0",
    cure="look at the schedule, and at what the loss is computed from",
    see=f"{PAGE}, A learning-rate schedule",
)
def rate_of_zero(c, d):
    """Nothing of the above."""
    return True


@explains(
    "options",
    cause="a schedule looks at the rank's own metric",
    cure="all-reduce the metric first",
    see=f"{PAGE}, A learning-rate schedule",
)
def schedule_by_its_own_metric(c, d):
    """The ranks' rates differ from each other."""
    return d.between


@explains(
    "options",
    cause="the parameters are chosen by their names, which the wrapper changes "
    "(module.)",
    cure="choose them before the model is wrapped",
    see=row(10),
)
def chosen_by_name(c, d):
    """A group has another number of parameters."""
    return d.name == "parameters"


@explains(
    "options",
    cause="it is scaled by the world size, and the global batch is not",
    cure="leave it as it is; or keep the batch size of one process on each rank, too",
    see=row(8),
)
def rate_scaled(c, d):
    """It is N times that of one process, or the root of N times."""
    return is_factor(d.factor, c.n) or is_factor(d.factor, sqrt(c.n))


@explains(
    "options",
    cause="a schedule has another length or pace, perhaps because it is computed from "
    "the local batch size or from one rank's samples",
    cure="compute it from the steps that all take: len(loader)",
    see=f"{PAGE}, A learning-rate schedule",
)
def schedule_of_another_length(c, d):
    """It has another value."""
    return True


@explains(
    "state",
    cause="it was loaded, or changed, on one rank only; DDP copies weights, and "
    "nothing else",
    cure="optimizer.load_state_dict(...) on all ranks",
    see="09_resume/09_resume.ipynb",
)
def state_of_one_rank(c, d):
    """The optimizer's state differs between ranks."""
    return True


@explains(
    "own weights",
    "weights",
    cause="the gradients are equal, and the step is not: the optimizer's state, the "
    "loss that a closure returns, or weights that something else changes",
    cure="give the optimizer the same on all ranks: all-reduce what the closure "
    "returns",
    see=SPECIAL,
)
def another_step(c, d):
    """Nothing of the above."""
    return True


@explains(
    "steps",
    cause="the ranks' shards have different sizes, or each decides for itself when to "
    "stop",
    cure="drop_last=True; all-reduce what decides",
    see="docs/uneven_inputs.md",
)
def uneven_steps(c, d):
    """The ranks differ."""
    return d.between


@explains(
    "steps",
    cause="a last batch is left out, or the batch size or the micro-batches are not "
    "divided",
    cure="drop_last=True in the sampler and in the loader",
    see=row(6),
)
def another_number_of_steps(c, d):
    """One process takes more, or fewer."""
    return True


@explains(
    "unowned",
    cause="perhaps by design; or they are chosen by names that they do not have, as "
    "with module. in front",
    cure="choose them before the model is wrapped",
    see=row(10),
    note=True,
)
def group_without_parameters(c, d):
    """All parameters with gradients are in another group."""
    return not d.unowned


@explains(
    "unowned",
    cause="parameters are chosen by names that they do not have, as with module. in "
    "front",
    cure="choose them before the model is wrapped",
    see=row(10),
)
def group_is_empty(c, d):
    """Parameters that get gradients are in no group, and one group is empty."""
    return True


@explains(
    "stopped",
    cause="{names}: a buffer that forward makes on some ranks only, and DDP sends "
    "rank 0's buffers to all of them",
    cure="register_buffer in __init__, on all ranks",
    see="docs/symptoms.md, op.preamble.length",
)
def buffer_of_some_ranks(c, d):
    """After the last step that all took, one rank's buffers have other names."""
    last = [set(trace.steps[c.steps - 1].buffers or ()) for trace in c.ranks]
    names = set.union(*last) - set.intersection(*last) if c.steps else ()
    return names and {"names": name_them(sorted(names))}


@explains(
    "stopped",
    cause="rank {more} takes more steps than rank {fewer}: their shards have "
    "different sizes, or each decides for itself when to stop",
    cure="drop_last=True in the sampler and the loader; all-reduce what decides",
    see="docs/uneven_inputs.md",
)
def one_rank_goes_on(c, d):
    """One rank had begun another step, and another one had not."""
    counts = [len(trace.steps) + bool(trace.rest.forwards) for trace in c.ranks]
    fewer, more = counts.index(min(counts)), counts.index(max(counts))
    return fewer != more and {"fewer": fewer, "more": more}


@explains(
    "stopped",
    cause="the ranks call different collectives, or one calls one more",
    cure="call the same ones on all ranks, in the same order",
    see="docs/first_aid.md",
)
def different_collectives(c, d):
    """They are in the same step."""
    return True


# ---- evaluation and output -----------------------------------------------------------
@explains(
    "evaluation",
    cause="that is right if the metrics do not count them",
    cure="let the script print its metrics",
    see=row(13),
    note=True,
)
def evaluated_and_not_counted(c, d):
    """No number is printed that shows it."""
    return not any(printed_numbers_differ(c))


@explains(
    "evaluation",
    cause="the sampler repeats samples, so that all ranks have as many",
    cure="Subset(val_set, range(rank, len(val_set), world_size)), without a sampler",
    see=row(13),
)
def evaluation_padded(c, d):
    """Samples are evaluated more often than on one process."""
    return d.twice


@explains(
    "evaluation",
    cause="only one rank evaluates, and only its own shard",
    cure="evaluate on all ranks, and all-reduce; or the whole set on rank 0",
    see=row(12),
)
def evaluation_of_one_shard(c, d):
    """Samples are missing, and one rank evaluates."""
    return d.ranks == 1


@explains(
    "evaluation",
    cause="a sampler or a loader that drops the last ones, or shards that do not add "
    "up",
    cure="Subset(val_set, range(rank, len(val_set), world_size)), without drop_last",
    see=row(13),
)
def evaluation_dropped(c, d):
    """Samples are missing."""
    return True


@explains(
    "evaluated",
    cause="an average of the weights (EMA) that one rank alone updates, or that was "
    "copied before DistributedDataParallel gave all ranks the same weights",
    cure="make it after wrapping, and update it on all ranks; or evaluate it on rank "
    "0 alone",
    see="recipes/ema.py",
)
def average_of_one_rank(c, d):
    """The evaluated model has different weights on each rank."""
    return True


@explains(
    "files",
    cause="every rank writes it, and one can be there when another one begins",
    cure="if rank == 0: around it",
    see=row(14),
)
def all_ranks_write(c, d):
    """Files of the same name."""
    return True


@explains(
    "printed",
    cause="rank 0 prints the metrics of its own shard: no collective follows the "
    "evaluation",
    cure="all-reduce sums and counts, then divide",
    see=row(12),
)
def metrics_of_one_rank(c, d):
    """No collective was called between the last evaluation and the next step."""
    steps = [steps for steps, _ in c.ranks[0].evaluations]
    return steps and not collectives_after(c.ranks[0], steps[-1])


def collectives_after(trace, steps):
    """Return the collectives that are called after so many steps, before another."""
    return [event for before, event in trace.collectives if before == steps]


@explains(
    "printed",
    cause="it is rank 0's own, or a mean of means, or a metric of a whole batch",
    cure="all-reduce sums and counts over samples, then divide",
    see=f"{row(12)}; 07_distributed_eval/07_distributed_eval.ipynb",
)
def mean_of_means(c, d):
    """Nothing of the above."""
    return True


# ---- what is printed -----------------------------------------------------------------
def diagnose(c):
    """Return the differences to be told, the first one first, and notes last."""
    if any(event["how"] == TENSOR_PARALLEL for event in foreign(c)):
        return []
    found = [each for search in SEARCHES for each in search(c)]
    if any(c.codes):  # the ranks were ended wherever they were
        found = [d for d in found if d.kind != "steps"] + list(find_stop(c))
    if c.equal:
        found = [d for d in found if d.silent]
    found.sort(key=lambda d: (d.step, ORDER.index(d.kind)))
    for d in found:
        causes = (cause(c, d) for cause in CAUSES[d.kind])
        d.because = next(each for each in causes if each)
    faults = [d for d in found if not d.because.note]
    notes = [d for d in found if d.because.note][:1]
    if notes and not c.random:  # what comes after it can follow from it
        faults = faults[: found.index(notes[0])] + [
            d for d in faults[found.index(notes[0]) :] if d.kind in INDEPENDENT
        ]
    others = [d for d in faults[1:] if d.kind in INDEPENDENT]
    return faults[:1] + others[:2] + notes


def foreign(c):
    """Return what was called that is no data parallelism with a process per device."""
    return [event for trace in c.ranks for event in trace.kept["foreign"]]


def find_stop(c):
    """Yield where each rank is of a run that hangs, or whose connections broke."""
    if c.hangs:
        each = [
            f"rank {rank} {where_it_is(trace)}" for rank, trace in enumerate(c.ranks)
        ]
        seen = f"after {c.steps} steps, {', '.join(each)}"
        yield Difference("stopped", c.steps + 1, seen, silent=True)


def where_it_is(trace):
    if trace.waits:
        return f"is in {trace.waits['name']} ({trace.waits['at']})"
    if trace.end:
        return "has ended"
    kind, at = trace.last.get("e", "nothing"), trace.last.get("at", "")
    after = {"done": "a collective", "batch": "a batch", "stepped": "a step"}
    text = f"is after {after[kind]}" if kind in after else f"is in {kind}"
    return f"{text} ({at})" if at else text


def find_notes(c):
    """Return what is worth knowing, and no mistake."""
    notes = []
    for event in foreign(c)[:1]:
        says = "its ranks read the same samples on purpose, so that nothing can be said"
        if event["how"] == "nn.DataParallel":
            says = f"it is one process, and is not needed any more: see {row(9)}"
        notes.append(f"{event['how']} ({event['at']}): {says}")
    printing = [rank for rank, lines in enumerate(c.out) if rank and lines]
    if printing:
        line = c.out[printing[0]][0].strip()
        notes.append(f'rank {printing[0]} prints, too: "{line}" ({row(14)})')
    last = (
        [trace.steps[c.steps - 1].buffers for trace in c.ranks] if c.steps else [None]
    )
    names = unequal_between_ranks(last) if None not in last else []
    if names and any(trace.evaluations for trace in c.ranks[1:]):
        says = "differs between ranks that evaluate: broadcast rank 0's before"
        notes.append(f"{name_them(names)} {says} ({PAGE}, Batch norm)")
    return notes


def has_trained_together(c):
    """Return whether the ranks share a training, which equal weights do not show."""
    if c.n == 1 or c.steps:
        return True
    # Without an optimizer of torch.optim there are no steps, but perhaps a wrapper.
    rows = {str([f["rows"] for f in trace.rest.forwards]) for trace in c.ranks}
    return all(trace.kept["wrap"] for trace in c.ranks) and len(rows) == c.n


def is_fault(d):
    return not d.because.note


def tell(found, notes=()):
    """Return the lines for what `diagnose` has found, and for notes."""
    lines, faults = [], list(filter(is_fault, found))
    for d in faults[:1]:
        lines += [("first", d.because.seen), ("cause", d.because.cause)]
        lines += [("cure", d.because.cure), ("see", d.because.see)]
    for d in faults[1:]:
        text = f"{d.because.seen}: {d.because.cause} ({d.because.see})"
        lines.append(("then", text))
    for d in found:
        if not is_fault(d):
            lines.append(("note", f"{d.because.seen}: {d.because.cause}"))
            lines.append(("", f"{d.because.cure} ({d.because.see})"))
    lines += [("note", text) for text in notes]
    return [f"  {f'{name}:' * bool(name):7}{text}" for name, text in lines]


# ---- what is kept --------------------------------------------------------------------
def read_lines(file):
    """Return the lines of a file that are not blank; none if there is no file."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def read_run(folder):
    """Return what a run has left: Runs knows what it is."""
    facts = json.loads((folder / "run.json").read_text())
    ranks = range(len(facts["codes"]))
    facts["ranks"] = [Trace(read_lines(folder / f"{rank}.trace")) for rank in ranks]
    facts["out"] = [read_lines(folder / f"{rank}.out") for rank in ranks]
    return facts


def read_runs(folder, processes):
    """Return the Runs of so many processes, beside those of one process."""
    facts = read_run(folder / str(processes))
    others = {"one": "1", "stirred": "stirred", "rehashed": "rehashed"}
    others |= {"again": "again", "one_by_operations": "operations-1"}
    others["by_operations"] = f"operations-{processes}"
    for name, other in others.items():
        if str(processes) == other or not (folder / other / "run.json").exists():
            continue
        run = read_run(folder / other)
        if not any(run["codes"]):
            facts[name], facts[f"{name}_out"] = run["ranks"][0], run["out"][0]
    return Runs(**facts)


def diagnose_folder(folder):
    """Print what the runs in a folder say; return whether there is a fault."""
    runs = sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())
    if not runs:
        sys.exit(f"{folder} has no runs that check_yours.py --keep has made")
    fault = False
    for processes in runs:
        c = read_runs(folder, processes)
        found = diagnose(c)
        fault = fault or any(c.codes) or any(map(is_fault, found))
        failed = "failed after " * any(c.codes)
        print(f"{processes} process{'es' * (processes > 1):4}{failed}{c.steps} steps")
        for line in tell(found, find_notes(c)):
            print(line)
    return fault


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(
            "python diagnoses.py FOLDER, which check_yours.py --keep=FOLDER has made"
        )
    sys.exit(diagnose_folder(Path(sys.argv[1])))
