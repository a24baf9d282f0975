"""Where a script on several processes parts from itself on one; causes.py says why.

record.py wrote the traces. A Trace is what a rank did, and Runs are the traces that are
compared. Two things are looked for: the first step in which the ranks part from each
other, and the first one in which they part from one process. In that step it is found
out where it comes from: the samples, the model's inputs, its outputs, the loss, or what
is done with the gradients. What differs earlier, and changes no gradient, explains
nothing.
"""

import functools
import json
import re
from collections import Counter
from collections import defaultdict
from itertools import combinations
from itertools import pairwise
from math import hypot
from math import inf
from math import isclose
from math import isfinite
from pathlib import Path

import torch

from .record import DETAILED

ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-2, "bfloat16": 0.2}
GROWS = 1e4  # rounding that a training magnifies grows less than that in a step
GENERATORS = ("torch", "random", "NumPy")


# ---- traces --------------------------------------------------------------------------
class Step:
    """What one optimizer step consists of: all since the step before.

    The lines of a kind are in an attribute of its name, and all of them in `lines`.
    """

    def __init__(self):
        self.lines, self.number = [], 0  # of the pass over the data
        self.facts, self.closure, self.stepped = {}, {}, {}  # lines, too

    def __getattr__(self, kind):
        if kind.startswith("__"):
            raise AttributeError(kind)
        return [line for line in self.lines if line["e"] == kind]

    def leave_batches(self, loader):
        """Forget what was read, and left unused when the loader began another pass."""
        used = [n for n, line in enumerate(self.lines) if line["e"] == "forward"]
        end = used[-1] if used else -1
        rest = self.lines[end + 1 :]
        rest = [x for x in rest if (x["e"], x.get("loader")) != ("batch", loader)]
        self.lines[end + 1 :] = rest

    @property
    def got(self):
        """What the optimizer gets; {} if it calls a closure, which was not seen."""
        return self.closure if self.facts.get("closure") else self.facts

    @property
    def made(self):
        """What the rank's own backward passes have made: {name: projections} each."""
        return self.got.get("local", [])

    @property
    def passes(self):
        """The forward passes before any weight has changed."""
        first = {f["model"]: f.get("weights") for f in reversed(self.forward)}
        return [f for f in self.forward if f.get("weights") == first[f["model"]]]

    @property
    def begins_with(self):
        """The weights at the first forward pass."""
        return self.forward[0].get("weights") if self.forward else None

    @property
    def loss(self):
        losses = [each["loss"] for each in self.backward]
        changes = len(self.passes) < len(self.forward)
        losses = losses[:1] if self.facts.get("closure") or changes else losses
        return sum(losses) if losses and None not in losses else None

    @property
    def weights(self):
        return self.stepped.get("weights", {})

    def state_of(self, name):
        """Return a generator's state at the first forward pass, or None."""
        return self.forward[0].get("states", {}).get(name) if self.forward else None


class Trace:
    """What one rank did."""

    def __init__(self, lines):
        lines = list(parse(lines))
        self.all, self.loaders, self.passes, self.steps = defaultdict(list), {}, [], []
        training = {line["loader"] for line in lines if line["e"] == "trains"}
        self.rest, in_step = Step(), False
        for line in lines:
            kind = line["e"]
            # a closure is called between "step" and "stepped"
            step = self.steps[-1] if in_step else self.rest
            if line.get("loader", line.get("id")) not in (None, *training):
                continue
            self.all[kind].append(line | {"after": len(self.steps)})
            if kind == "loader":
                self.loaders[line["id"]] = line
            elif kind == "pass":
                self.passes.append((line["loader"], []))
                step.leave_batches(line["loader"])
            elif kind == "outputs":
                step.forward[-1]["outputs"] = line["outputs"]
            elif kind == "step":
                self.rest = Step()
                step.facts, step.number = line, len(self.passes)
                self.steps.append(step)
                in_step = line["closure"]
            elif kind == "closure":
                step.closure = line
            elif kind == "stepped":
                self.steps[-1].stepped, in_step = line, False
            else:
                step.lines.append(line)
            if kind == "batch":
                of_it = [each for n, each in self.passes if n == line["loader"]]
                of_it[-1].append(line)
        self.starts = [line["weights"] for line in self.all["start"]]
        self.size = sum(line["size"] for line in self.all["start"][:1])

    def moves(self, name):
        """Return whether a global generator is used between two steps of a pass."""
        return any(
            a.number == b.number and a.state_of(name) != b.state_of(name)
            for a, b in pairwise(self.steps[:DETAILED])
        )


def parse(lines):
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # killed while it wrote
            return


class Runs:
    """What is compared: the ranks of a run, and one process.

    ranks: their traces; one: that of one process, or None. equal: whether the weights
    that were written are equal; grew: whether rounding can be why they are not. again:
    one process a second time; stirred: with other random numbers; rehashed: with sets
    in another order. out: the lines that each rank printed, one_out those of one
    process, and again_out those of a second run of it.
    """

    equal = grew = hangs = unread = False
    again = stirred = rehashed = None
    one_out = again_out = ()

    def __init__(self, ranks, one=None, **others):
        self.ranks, self.one, self.n = ranks, one, len(ranks)
        vars(self).update(others)
        self.nodes = self.local_ranks.count(0)
        self.steps = min(len(trace.steps) for trace in ranks)
        self.common = min(self.steps, len(one.steps)) if one else 0
        dtypes = {d for t in ranks for line in t.all["start"] for d in line["dtypes"]}
        self.dtype = max(dtypes & {*ROUNDING}, key=ROUNDING.get, default="float64")
        self.rounding = ROUNDING[self.dtype]
        # whether what the model gets is drawn, or the model draws
        self.inputs_random, self.model_random = self.find_random()

    def find_random(self):
        """Return whether other random numbers change the inputs, and the gradients.

        They are other ones from the first forward pass on, which gets the same inputs.
        Random is only what moves a global generator within a pass over the data.
        """
        if self.one is None or self.stirred is None:
            return False, False
        steps = zip(self.one.steps[:5], self.stirred.steps[:5], strict=False)
        pairs = [pair for pair in steps if pair[0].number < 2]
        if not pairs or not any(map(self.one.moves, GENERATORS)):
            return False, False
        inputs = any(parts(a, [b], "arguments") for a, b in pairs)
        return inputs, pairs[0][0].made != pairs[0][1].made

    def at(self, s):
        """Return step s of one process, or None, and of the ranks."""
        one = self.one.steps[s] if s < self.common else None
        return one, [trace.steps[s] for trace in self.ranks]

    def label(self, s):
        """Return how a step is called; with its optimizer, if there are several."""
        several = len(self.ranks[0].starts) > 1 and s < self.steps
        facts = self.ranks[0].steps[s].facts if several else {}
        which = f", of {facts['kind']} at {facts['at']}" if several else ""
        return f"step {s + 1}{which}"


class Finding(dict):
    """Where something differs.

    kind: what the causes are looked up by. s: in which step, from 0. place: what is
    printed, if it is not that of the kind. silent: it is a mistake also if the weights
    are equal. What else is known is beside that; what is not known is None.
    """

    __getattr__, __setattr__ = dict.get, dict.__setitem__

    def __init__(self, kind, s, **facts):
        super().__init__(kind=kind, s=s, **facts)


# ---- sketches ------------------------------------------------------------------------
def merge(sketches):
    """Return {name: [norm, projections]} of a run, from the sketches of its ranks."""
    merged = {}
    for name, (shards, *_) in sketches[0].items():
        each = [ranks[name] for ranks in sketches if name in ranks]
        each = each[:1] if shards == 1 else each
        copies = max(len(each) / shards, 1 / shards)
        sums = [sum(column) / copies for column in zip(*each, strict=True)][1:]
        merged[name] = [max(sums[0], 0) ** 0.5, *sums[1:]]
    shards = [name for name in merged if name.startswith("all ")]
    if shards:  # of all tensors together, whole ones and shards
        each = list(zip(*(merged.pop(name) for name in shards), strict=True))
        merged["all"] = [hypot(*each[0]), *map(sum, each[1:])]
    return merged


def distances(one, other):
    """Return {name: how far they are apart}, relative to the norm of all together.

    A small tensor counts for more, if it differs much for its size.
    """
    total = hypot(*(each[0] for each in one.values())) or 1
    apart = {}
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name, [inf]), other.get(name, [-inf])
        if all(map(isfinite, (*a, *b))):
            off = max(abs(x - y) for x, y in zip(a, b, strict=True))
            apart[name] = max(off / total, 1e-4 * off / max(a[0], 1e-7 * total))
        else:
            apart[name] = 0 if str(a) == str(b) else inf
    return apart


def unequal(one, other, rounding=ROUNDING["float64"]):
    return [name for name, far in distances(one, other).items() if far > rounding]


def unequal_to_one(sketches, rounding):
    """Return the names of tensors that are not those of one process, the first."""
    return unequal(merge(sketches[:1]), merge(sketches[1:]), rounding)


def unequal_between_ranks(sketches, rounding=ROUNDING["float64"]):
    """Return the names of tensors that every rank has whole, and not the same."""
    merged = [merge([{n: s for n, s in x.items() if s[0] == 1}]) for x in sketches]
    names = [x for other in merged[1:] for x in unequal(merged[0], other, rounding)]
    return list(dict.fromkeys(names))


def name_them(names):
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def add(parts, factor=1):
    """Return the sum of {name: projections}, times a factor."""
    total = {}
    for part in parts:
        for name, x in part.items():
            before = total.get(name, [0] * len(x))
            total[name] = [a + factor * b for a, b in zip(before, x, strict=True)]
    return total


def is_factor(factor, wanted):
    return factor is not None and isclose(factor, wanted, rel_tol=1e-6)


def common_factor(one, other):
    """Return by what {name: projections} are multiplied in others, or None."""
    if one.keys() != other.keys():
        return None
    pairs = [pair for n in one for pair in zip(one[n], other[n], strict=True)]
    squares = sum(a * a for a, _ in pairs) or inf
    factor = sum(a * b for a, b in pairs) / squares
    off = hypot(*(b - factor * a for a, b in pairs))
    return factor if off <= 1e-7 * hypot(*(b for _, b in pairs)) else None


def combine(whole, parts, size):
    """Return the numbers by which the parts are multiplied in the whole, or None.

    whole, parts: {name: projections}. size: of the space that they are from. With as
    many numbers as parts, any whole could be combined of them.
    """
    if not whole or size <= len(parts) or any(p.keys() != whole.keys() for p in parts):
        return None
    rows = [[x for name in whole for x in each[name]] for each in (whole, *parts)]
    b, a = (torch.tensor(x, dtype=torch.float64) for x in (rows[0], rows[1:]))
    if len(b) <= len(parts) or not (a.isfinite().all() and b.isfinite().all()):
        return None
    values = torch.linalg.svdvals(a)
    if values[-1] <= 1e-6 * values[0]:
        return None
    weights = torch.linalg.lstsq(a.T, b[:, None]).solution[:, 0]
    return weights.tolist() if (weights @ a - b).norm() <= 1e-8 * b.norm() else None


# ---- inputs and outputs --------------------------------------------------------------
def adds_up(one, parts):
    """Return whether what the ranks have is what one process has, or the same."""
    if any(part is None for part in (one, *parts)):
        return False
    whole = [sum(column) for column in zip(*(p["is"] for p in parts), strict=True)]
    return same(one["is"], whole) or all(same(one["is"], part["is"]) for part in parts)


def same(a, b):
    """Return whether the sums of two tensors are equal: see `describe`."""
    scales = a[4], a[1], a[5], 7 * a[4]
    pairs = zip(a[:4], b[:4], scales, strict=True)
    return all(abs(p - q) <= 1e-9 * scale + 1e-15 for p, q, scale in pairs)


def tensors_of(step, what):
    """Return {(model, number of a tensor): [what it got or returned in each pass]}."""
    found = defaultdict(list)
    for forward in step.passes:
        outputs = next((x[2] for x in forward.get("outputs", ()) if not x[0]), [])
        each = outputs if what == "outputs" else forward.get("arguments", [])
        for number, tensor in enumerate(each):
            found[forward["model"], number].append(tensor)
    return found


def parts(one, ranks, what):
    """Return the first tensor of a step that is not the ranks' together, or None.

    It is (model, its number, of one process, of each rank).
    """
    alone, *each = [tensors_of(step, what) for step in (one, *ranks)]
    for key, tensors in alone.items():
        others = [x[key] for x in each]
        if not all(len(x) == len(tensors) for x in others):  # micro-batches
            tensors, *others = [add_tensors(x) for x in (tensors, *others)]
        for tensor, *parts in zip(tensors, *others, strict=True):
            if not adds_up(tensor, parts):
                return *key, tensor, parts
    return None


def add_tensors(tensors):
    sums = zip(*(tensor["is"] for tensor in tensors), strict=True)
    return [tensors[0] | {"is": [*map(sum, sums)]}] if tensors else [None]


def layer_that_parts(one, ranks):
    """Return the first layer whose output is not the ranks' together, or {}."""
    for forwards in zip(*(step.passes for step in (one, *ranks)), strict=False):
        each = [forward.get("outputs", []) for forward in forwards]
        for (name, kind, tensors), *others in zip(*each, strict=False):
            if any(other[0] != name for other in others):
                return {}  # the ranks do not call the same modules
            for k, tensor in enumerate(tensors if name else ()):
                parts = [x[2][k] if k < len(x[2]) else None for x in others]
                if not adds_up(tensor, parts):
                    return {"layer": name, "layer_kind": kind}
    return {}


# ---- one process ---------------------------------------------------------------------
def one_process_differs(c):
    """Return where one process, started again, trains something else, or None."""
    one, kind = c.one or c.ranks[0], "unseeded" if c.one else "set order"
    s = first_other_step(one, c.again if c.one else c.rehashed)
    if s is None:
        return None
    if not c.one and first_other_step(one, c.again) is not None:
        kind = "unseeded"
    return Finding(kind, s, place="again", silent=True)


def first_other_step(one, other):
    pairs = zip(one.steps, other.steps, strict=False) if other else ()
    for s, (a, b) in enumerate(pairs):
        if unequal(merge([a.weights]), merge([b.weights])):
            return s
    return None


# ---- the ranks among themselves ------------------------------------------------------
def ranks_part(c):
    """Return where the ranks part from each other first, for certain."""
    together = meet_again(c)
    for s in range(0 if c.equal and together else c.steps):
        _, steps = c.at(s)
        d = start_parts(c.ranks, "own start", unequal_between_ranks) if s == 0 else None
        begin = [step.begins_with for step in steps]
        if s and all(begin) and unequal_between_ranks(begin, c.rounding):
            d = changed_outside("own weights", s)
        d = d or own_gradients(c, s, steps)
        for rank, trace in enumerate(c.ranks):
            d = d or options_part(c, s, "rank 0", c.ranks[0], f"rank {rank}", trace)
        names = unequal_between_ranks([step.weights for step in steps], c.rounding)
        d = d or names and Finding("own weights", s, names=names)
        if d:
            d.between, d.silent, d.passes = True, True, passes_of(steps)
            d.update(together=together, closure=steps[0].facts["closure"])
            return d
    return None


def meet_again(c):
    """Return whether the ranks end with the same weights, and they are not those of
    rank 0 alone: something averages weights.
    """
    last = [[x["weights"] for x in trace.all["last"]] for trace in c.ranks]
    alike = not any(map(unequal_between_ranks, zip(*last, strict=False)))
    return alike and c.one and first_other_step(c.one, c.ranks[0]) is not None


def changed_outside(kind, s):
    """Weights that were equal after a step are not before the next one."""
    return Finding(kind, s - 1, names=["a weight"], outside=True)


def start_parts(traces, place, differ):
    """Return where the first weights differ, if those that the models begin with do.

    At the first call of step() SAM, for instance, has moved them.
    """
    names = differ([(trace.starts or [{}])[0] for trace in traces])
    passes = [reversed(trace.steps[0].forward) for trace in traces]
    first = [{f["model"]: f["weights"] for f in each}.values() for each in passes]
    apart = names and any(map(differ, zip(*first, strict=False)))
    return Finding("start", 0, place=place, names=names) if apart else None


def own_gradients(c, s, steps):
    """Each rank has a gradient of its own when the optimizer uses it, and its weights
    differ after that: no optimizer has averaged it itself.
    """
    got = [step.got.get("gradients", {}) for step in steps]
    names = unequal_between_ranks(got, c.rounding)
    # without a tolerance for the dtype: ranks that average have the same weights
    if not names or not unequal_between_ranks([step.weights for step in steps]):
        return None
    d, first = Finding("own gradients", s), steps[0]
    for key in ("late", "outside"):
        # after the steps of which each tensor is recorded, it can be any of them
        found = [x for x in first.facts[key] if x in names or "all" in names]
        d[key] = found
    others = re.compile("broadcast|object")
    d.reduces = any(not others.match(x["name"]) for x in first.collective)
    d.left_out = d.reduces and len(names) < len(got[0]) and names
    d.names = d.outside or d.late or names
    for forward in first.forward:
        if forward["inside"]:
            d.inside, d.model = forward["at"], forward["model"]
            d.wrapper = forward["inside"]
        d.unsynced = None if forward["sync"] else forward["at"]
    d.bare = first.forward and all(f["how"] == "bare" for f in first.forward)
    d.past = first.grad[-1]["at"] if first.grad and not first.backward else None
    return d


def passes_of(steps):
    """Return how often each rank passes forward, or backward, if they differ in it."""
    for what in ("forward", "backward"):
        counts = [len(getattr(step, what)) for step in steps]
        if len(set(counts)) > 1 and not steps[0].facts["closure"]:
            return f"{', '.join(map(str, counts))} {what} passes"
    return None


def options_part(c, s, one, alone, other, trace):
    """A learning rate, or another number of an optimizer's group, differs."""
    which = alone.steps[s].facts["optimizer"]
    steps = [[x.facts for x in each.steps[s:]] for each in (alone, trace)]
    options = [
        [x["options"] for x in each if x["optimizer"] == which] for each in steps
    ]
    if not all(options):
        return None
    for group, (a, b) in enumerate(zip(options[0][0], options[1][0], strict=False)):
        for name in (k for k in a if k in b and not isclose(a[k], b[k], rel_tol=1e-12)):
            values = {"x": a[name], "y": b[name], "one": one, "other": other}
            d = Finding("options", s, name=name, **values)
            d.scheduled = "initial_lr" in a and a["initial_lr"] == b.get("initial_lr")
            factor = b[name] / a[name] if a[name] else inf
            later = [[x[group].get(name, inf) for x in each] for each in options]
            always = all(is_factor(y, factor * x) for x, y in zip(*later, strict=False))
            scales = any(is_factor(factor, c.n**k) for k in (1, 0.5, -0.5, -1))
            first = which not in [step.facts["optimizer"] for step in alone.steps[:s]]
            d.scaled = first and always and scales and not d.scheduled
            return d
    return None


# ---- the ranks and one process -------------------------------------------------------
def parts_from_one(c):
    """Return where the ranks part from one process first, if rounding is not why."""
    far, all_of_them = {"before": 0, "gradients": 0, "weights": 0}, (c.one, *c.ranks)
    differ = functools.partial(unequal_to_one, rounding=c.rounding)
    if c.common and (found := start_parts(all_of_them, "start", differ)):
        return found
    for s in range(c.common):
        one, steps = c.at(s)
        each = [step.begins_with for step in (one, *steps)]
        pair = (merge(each[:1]), merge(each[1:])) if s and all(each) else ({}, {})
        names, far["before"] = jump(c, *pair, far["before"])
        if names:
            return changed_outside("weights", s)
        whole = [step.got.get("gradients") for step in (one, *steps)]
        # not so if the optimizer averages them itself
        if all(whole) and not unequal_between_ranks(whole[1:], c.rounding):
            pair = merge(whole[:1]), merge(whole[1:])
            names, far["gradients"] = jump(c, *pair, far["gradients"])
            if names:
                return gradients_from_one(c, s, names, pair)
        runs = "one process", c.one, f"{c.n} processes", c.ranks[0]
        if found := options_part(c, s, *runs):
            return found
        each = [step.weights for step in (one, *steps)]
        names, far["weights"] = jump(
            c, merge(each[:1]), merge(each[1:]), far["weights"]
        )
        if names:
            return Finding("weights", s, names=names, closure=one.facts["closure"])
    return None


def jump(c, one, other, before):
    """Return the names that are apart by more than rounding, and how far the most.

    before: the same of the step before. What grows slowly is rounding.
    """
    apart = distances(one, other)
    largest = max(apart.values(), default=0)
    names = [name for name, far in apart.items() if far > c.rounding]
    return names if largest > GROWS * before else [], max(largest, c.rounding / GROWS)


def saved_parts(c):
    """Return where what is saved can part from one process, if no step does."""
    for s in range(c.common):
        if facts := what_is_carried(c, s):
            return Finding("saved", s, **facts)
    return Finding("saved", c.common - 1)


def gradients_from_one(c, s, names, pair):
    """Return the place that the difference of an averaged gradient comes from."""
    one, steps = c.at(s)
    d, first = Finding("gradients", s, place="gradients", names=names), steps[0]
    d.far = max(distances(*pair).values())
    losses = [step.loss for step in (one, *steps)]
    if None not in losses:
        d.loss_fits = is_factor(sum(losses[1:]) / c.n, losses[0])
        d.loss_whole = all(is_factor(each, losses[0]) for each in losses)
    d.fewer_passes = len(first.backward) * c.n == len(one.backward)
    d.passes = passes_of(steps)
    d.norms = ", ".join(sorted({n for f in first.forward for n in f["norms"]}))
    # without a wrapper the script averages itself
    bare = all(f["how"] == "bare" for f in first.forward)
    ends = "backward|.*reduce" if bare else "backward"
    names = [line.get("name", line["e"]) for line in first.lines]
    last = max((n for n, name in enumerate(names) if re.match(ends, name)), default=0)
    for line in reversed(first.lines[:last]):
        d.early = line["at"] if line["e"] == "clip" else d.early
        d.gather = f"{line['name']} ({line['at']})" if line.get("lost") else d.gather
    weights = [[f["weights"] for f in x.forward if "weights" in f] for x in steps]
    if any(map(unequal_between_ranks, zip(*weights, strict=False))):
        d.kind = d.place = "within"
        return d
    where_it_is_made(c, s, d, pair)
    if d.kind == "gradients" and (found := samples_part(c, s)):
        d.update(found)
    if d.kind == "gradients":
        where_it_is_computed(c, s, d)
    if d.kind in ("gradients", "outputs", "loss"):
        d.update(what_is_carried(c, s), second=s == 1)
    return d


def where_it_is_made(c, s, d, pair):
    """Compare what the ranks' own backward passes have made, and what becomes of it."""
    one, steps = c.at(s)
    made = [add(step.made) for step in (one, *steps)]
    mean = add(made[1:], 1 / c.n)
    got = [{n: x[1:] for n, x in each.items()} for each in pair]
    factor = common_factor(made[0], mean) if all(made) else common_factor(*got)
    if is_factor(factor, 1):
        d.kind = "reduced"
        norms = [
            step.clip[-1]["norm"] if step.clip else None for step in (one, steps[0])
        ]
        factor = norms[1] / norms[0] if all(norms) else common_factor(*got)
        used = combine(got[1], made[1:], c.one.size)
        d.own_scale = used and max(used) - min(used) > 1e-6 * max(used)
        d.shards = any(x[0] > 1 for x in steps[0].got["gradients"].values())
    elif factor and (
        c.one.size > 3 or is_factor(factor, c.n) or is_factor(factor, 1 / c.n)
    ):
        d.kind = "factor"  # in a small space any number is a multiple of any other
    elif found := combine_passes(c, made[0], steps):
        d.kind = "counts"
        of_all = [*zip(*found, strict=True)]
        # of the micro-batch that shows it most
        most = max(of_all, key=lambda shares: max(shares) - min(shares))
        d.parts = " + ".join(f"{x:.4g} of rank {r}'s" for r, x in enumerate(most))
    d.factor, d.n_times = factor, is_factor(factor, c.n)
    d.one_nth = is_factor(factor, 1 / c.n)


def combine_passes(c, one, steps):
    """Return how one process's gradient is made of the ranks' backward passes."""
    count = len(steps[0].made)
    if any(len(step.made) != count for step in steps):
        return None
    found = combine(one, [part for step in steps for part in step.made], c.one.size)
    used = found and min(map(abs, found)) > 1e-6  # what is left out are other samples
    return used and [found[r * count : (r + 1) * count] for r in range(c.n)]


def where_it_is_computed(c, s, d):
    """Follow the samples through the model: inputs, layers, outputs."""
    one, steps = c.at(s)
    outputs, inputs = (parts(one, steps, what) for what in ("outputs", "arguments"))
    if tensors_of(one, "outputs") and outputs is None:
        d.kind = "loss"
    elif inputs:
        d.kind, (model, number, _, each) = "inputs", inputs
        d.alike = all(same(each[0]["is"], x["is"]) for x in each if x)
        d.model, d.number = model, number + 1
    elif (layer := layer_that_parts(one, steps)) or outputs:
        d.kind = "outputs"
        d.update(layer)
        d.where = (
            f"layer `{d.layer}` ({d.layer_kind})" if layer else f"the {outputs[0]}"
        )
        d.norms = d.norms if "BatchNorm" in (d.layer_kind or d.norms) else None
    d.place = d.kind if d.kind in ("inputs", "outputs") else "gradients"


def count_samples(forward):
    """Return the length of the first argument of a forward pass."""
    return next((x["shape"][0] for x in forward.get("arguments", ())), 1)


def what_is_carried(c, s):
    """Return a buffer, or a weight nobody trains, that has just begun to differ."""
    differ = []
    for k in range(max(s - 1, 0), s + 1):
        one, steps = c.at(k)
        lines = [[*step.carries, *step.forward[:1]] for step in (one, *steps)]
        lines = [[line.get("carried", {}).items() for line in x] for x in lines]
        each = [{name: x for found in rank for name, x in found} for rank in lines]
        if not all(each):
            return {}
        apart = unequal_between_ranks(each[1:])
        names = apart + unequal_to_one(each, c.rounding)
        differ.append([x for x in names if "running_" not in x])
    new = [name for name in differ[-1] if s < 2 or name not in differ[0]]
    if not new:
        return {}
    facts = {"carried": name_them(list(dict.fromkeys(new))), "begins": s == 0}
    return facts | {"shared": not {*new} & {*apart}}


# ---- the samples ---------------------------------------------------------------------
def samples_part(c, s):
    """Return how the ranks' samples in a step are not those of one process, or None."""
    one, steps = c.at(s)
    for base in ("index", "hashes"):
        wanted, *each = [samples_of(step, base) for step in (one, *steps)]
        if wanted and all(each):
            break
    got, d = sum(each, Counter()), Finding("samples", s, place="samples")
    total, many, d.alike = wanted.total(), got.total(), each.count(each[0]) == c.n
    if not (wanted and all(each)):  # no loader
        base = None
        if not (inputs := parts(one, steps, "arguments")):
            return None
        d.place, (d.model, _, one_has, ranks_have) = "numbers", inputs
        shapes = [x["shape"] if x else [0] for x in (one_has, *ranks_have)]
        total, *others = [torch.Size(shape).numel() for shape in shapes]
        many = sum(others)
        d.alike = given_alike(steps)
        shared = all(x and same(x["is"], ranks_have[0]["is"]) for x in ranks_have)
        if shared and not d.alike:  # noise, for instance: not all that they get
            return None
    elif got == wanted or d.alike and each[0] == wanted:  # or dealt out later
        return content_parts(c, s) if base == "index" else None
    elif many == total:
        d.place, d.known = "some samples", (wanted & got).total()
    if one.number != steps[0].number:
        facts = {"one_in": one.number, "in_pass": steps[0].number}
        return Finding("steps", s, place="another pass", **facts)
    d.place, d.later = "alike" if d.alike else d.place, s > 0
    d.total, d.many, d.count = total, many, count_samples((steps[0].forward or [{}])[0])
    d.times_n = is_factor(many / total, c.n) or many > 1.5 * total and c.nodes > 1
    d.once_too_often = is_factor(many / total, 1 / c.n)
    d.rounded = total > many > total - c.n and many % c.n == 0
    by_local = defaultdict(list)
    for rank, x in zip(c.local_ranks, each, strict=True):
        by_local[rank].append(x)
    copies = all(x == row[0] for row in by_local.values() for x in row)
    facts_of_loaders(c, d)
    several = len(by_local) > 1 or d.replicas
    d.by_local = copies and several and c.n > len(by_local)
    reads_all = d.reads_all or d.alike or many > 1.5 * total
    reads_all = reads_all or d.sampler == "WeightedRandomSampler"
    d.all_of_them = d.loader and not d.replicas and reads_all
    d.last = is_last_of_pass(c, s) and (d.pads or many != total)
    if base and one.number:
        alone, *each = [samples_of_pass(t, one.number, base) for t in (c.one, *c.ranks)]
        got = sum(each, Counter())
        d.twice = sum(max(count - max(alone[x], 1), 0) for x, count in got.items())
        d.never, d.number = sum(x not in got for x in alone), one.number
        d.blocks = got == alone
    return d


def given_alike(steps):
    """Return whether the models get the same on all ranks, in a step."""
    given = [tensors_of(step, "arguments").values() for step in steps]
    one, *each = [[x["is"] for tensors in g for x in tensors] for g in given]
    pairs = ((x, one) for x in each)
    return one and all(len(a) == len(b) and all(map(same, a, b)) for a, b in pairs)


def samples_of(step, kind):
    """Return how often each sample is in the step, by its index or by its hash."""
    if any(not b[kind] or None in b[kind] for b in step.batch):
        return Counter()
    return Counter((b["loader"], x) for b in step.batch for x in b[kind])


def facts_of_loaders(c, d):
    one, *ranks = [[*t.loaders.values()] for t in (c.one or c.ranks[0], *c.ranks)]
    if not all(ranks):
        return
    d.loader = first = ranks[0][0]
    d.at, d.sampler, d.stream = first["at"], first["sampler"], first["size"] is None
    d.plain = d.sampler in ("RandomSampler", "SequentialSampler")
    d.replicas, d.pads = (any(x[k] for x in ranks[0]) for k in ("replicas", "pads"))
    subsets = [[x["subset"] for x in each] for each in ranks]
    d.subsets = subsets.count(subsets[0]) < c.n
    if one and one[0]["sampler"] != d.sampler:
        d.sampler_of_one = one[0]["sampler"]
    alone, *others = [{*samples_of_pass(t, 1)} for t in (c.one or c.ranks[0], *c.ranks)]
    d.reads_all = all(len(x & alone) > 0.9 * len(alone) for x in others)


def samples_of_pass(trace, number, kind="hashes"):
    """Return how often a rank reads each sample in a pass over the data."""
    passes = trace.passes[number - 1 : number]
    return Counter(x for _, each in passes for b in each for x in b[kind] or ())


def is_last_of_pass(c, s):
    """Return whether a step is the last of a pass, after which there can be another."""
    for trace in (c.one, c.ranks[0]):
        steps = trace.steps[s : s + 2]
        if s and (len(steps) < 2 or steps[0].number != steps[1].number):
            return True
    return False


def content_parts(c, s):
    """Most indices stand for another sample on a rank than on one process."""
    one, *each = [by_index(trace) for trace in (c.one, *c.ranks)]
    wrong, right = {}, False
    for rank, known in enumerate(each):
        shared = one.keys() & known.keys()
        off = [i for i in shared if one[i] != known[i]]
        right = right or rank == 0 and not off
        if len(off) > len(shared) / 2:
            wrong[rank] = min(off)[2]
    if not wrong:
        return None
    rank, index = next(iter(wrong.items()))
    facts = {"rank": rank, "index": index, "first_is_right": right}
    return Finding("data", s, place="data", **facts)


def by_index(trace):
    """Return {(pass, loader, index in the data set): hash of the sample}."""
    return {
        (number, b["loader"], index): sample
        for number, (_, batches) in enumerate(trace.passes)
        for b in batches
        for index, sample in zip(b["index"] or (), b["hashes"], strict=False)
    }


# ---- mistakes that can leave the weights equal ---------------------------------------
def all_train_the_same(c):
    """What the models get, and the losses, are the same on all ranks."""
    steps = [trace.steps[0] for trace in c.ranks] if c.steps and c.n > 1 else []
    losses = [step.loss for step in steps]
    if not steps or None in losses or not given_alike(steps):
        return
    if all(isclose(x, losses[0], rel_tol=1e-9) for x in losses):
        count = count_samples(steps[0].forward[0])
        d = Finding("samples", 0, place="alike", silent=True, alike=True, count=count)
        facts_of_loaders(c, d)
        d.all_of_them = d.loader and not d.replicas
        d.by_local = d.replicas and not any(c.local_ranks)
        yield d


def order_repeats(c):
    """A sampler that shuffles gives a pass the order of the one before."""
    trace, orders = c.ranks[0], defaultdict(list)
    steps = {step.number: s for s, step in reversed([*enumerate(trace.steps)])}
    for number, (loader, batches) in enumerate(trace.passes, start=1):
        facts, s = trace.loaders[loader], steps.get(number)
        if facts["shuffles"] and s is not None:
            key = facts["at"], facts["size"], trace.steps[s].facts["optimizer"]
            order = [i for b in batches for i in b["index"] or ()]
            orders[key].append((s, number, order))
    for each in orders.values():
        for (_, _, one), (s, number, other) in pairwise(each):
            size = min(len(one), len(other))
            if size > 2 and one[:size] == other[:size]:
                yield Finding("order", s, silent=True, number=number)
                return


def draws_are_equal(c):
    """All ranks' generators are in the same state, and something is drawn from them."""
    steps = [trace.steps[0] for trace in c.ranks] if c.steps and c.n > 1 else []
    for name in GENERATORS:
        each = [step.state_of(name) for step in steps]
        if not each or None in each or each.count(each[0]) < c.n:
            continue
        drops = any(forward["drops"] for forward in steps[0].forward)
        what = "dropout (off in the check)" if drops and name == "torch" else "numbers"
        drawn = (c.inputs_random or c.model_random) and c.ranks[0].moves(name)
        if drawn or what != "numbers":
            yield Finding("draws", 0, silent=True, what=what, name=name, drawn=drawn)
            return


def nothing_is_trained(c):
    """The weights of an optimizer at the end are those at the beginning."""
    trace = c.ranks[0]
    for last in trace.all["last"]:
        first = trace.all["start"][last["optimizer"]]
        pairs = zip(first["weights"].values(), last["weights"].values(), strict=False)
        if all(a == b for a, b in pairs):
            yield Finding("nothing", 0, silent=True, lost=first["lost"])
            return


def numbers_of_steps_differ(c):
    """The ranks take different numbers of steps, or another number than one process."""
    counts = [len(trace.steps) for trace in c.ranks]
    if any(c.codes):  # the ranks were ended wherever they were
        return
    if counts.count(counts[0]) < c.n:
        each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        facts = {"silent": True, "between": True, "place": "own steps", "each": each}
        yield Finding("steps", min(counts), **facts)
    elif c.one and counts[0] != len(c.one.steps) and not c.equal:
        alone = len(c.one.steps)
        yield Finding("steps", min(counts[0], alone), alone=alone, count=counts[0])


def files_are_shared(c):
    """Several ranks write a file of the same name."""
    writes = [{x["file"]: x["at"] for x in trace.all["write"]} for trace in c.ranks]
    for (a, one), (b, other) in combinations(enumerate(writes), 2):
        for file in one.keys() & other.keys():
            facts = {"a": a, "b": b, "file": Path(file).name, "at": one[file]}
            yield Finding("files", c.steps, silent=True, **facts)
            return


SILENT = (
    all_train_the_same,
    order_repeats,
    draws_are_equal,
    nothing_is_trained,
    numbers_of_steps_differ,
    files_are_shared,
)


# ---- what is printed -----------------------------------------------------------------
NUMBER = re.compile(r"-?\d+(?:\.(\d+))?(?:e[+-]?\d+)?")
TIME = re.compile(r".*(time|took|elapsed|/s|\bETA)\W*0|0 ?(m?s|sec\w*|min\w*|\w+/s)\b")


def printed_numbers_differ(c):
    """The weights are equal, and rank 0 prints other numbers than one process."""
    first = c.ranks[0].all
    last = first["evaluate"][-1]["after"] if first["evaluate"] else None
    reduced = any(x["after"] == last for x in first["collective"])
    alone, many, again = map(by_words, (c.one_out, c.out[0], c.again_out or c.one_out))
    for words, lines in alone.items():
        others = zip(lines, many[words], again[words] or lines, strict=False)
        for one, other, second in others:
            rows = zip(*(NUMBER.finditer(x) for x in (one, other, second)), strict=True)
            for a, b, x in rows:
                # what differs between two runs of one process is a time, too
                text = f"{a.string[max(a.start() - 12, 0) : a.start()]}0"
                time = TIME.match(text) or TIME.match(f"0{a.string[a.end() :]}")
                if close(a, x) and not close(a, b, c.n) and not time:
                    facts = {"printed": other.strip(), "alone": one.strip()}
                    facts["unshared"] = last is not None and not reduced
                    yield Finding("printed", c.steps, silent=True, **facts)
                    return


def by_words(lines):
    """Return {a line without its numbers: the lines}."""
    found = defaultdict(list)
    for line in lines:
        found[NUMBER.sub("", line)].append(line)
    return found


def close(a, b, n=1):
    """Return whether two printed numbers are equal, their last digit apart; n: or as
    the world size makes them, if they are integers.
    """
    digit = 1.01 * 10 ** -len(a[1]) if a[1] else 0
    x, y = float(a[0]), float(b[0])
    if isclose(x, y, rel_tol=1e-6, abs_tol=digit):
        return True
    whole = a[1] is None and b[1] is None and "e" not in a[0] + b[0]
    return n > 1 and whole and (y in (n, x * n, x // n) or y * n == x)
