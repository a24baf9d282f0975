"""Where a script on several processes parts from itself on one; diagnoses.py says why.

recorder.py wrote the traces; this file reads them, and needs no torch. A Trace is what
a rank did, and Runs are the traces that are compared. Then each function looks for the
first place where something differs, and yields a Difference.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from dataclasses import field
from itertools import combinations
from itertools import pairwise
from math import inf
from math import isclose
from math import isfinite
from math import sqrt
from types import SimpleNamespace

ROUNDING = 1e-9  # of the norm of all gradients or weights together, in float64
GROWS = (
    1e4  # rounding that a training magnifies grows less than so many times in a step
)
# What differs in one step, in the order in which one thing leads to the next.
ORDER = [
    *("stopped", "set order", "untied", "order", "samples", "inputs", "draws", "noise"),
    *(
        "start",
        "operations",
        "outputs",
        "own gradients",
        "gradients",
        "nothing",
        "options",
        "state",
    ),
    *("own weights", "weights", "steps", "unowned", "evaluation", "evaluated", "files"),
    "printed",
]


# ---- traces --------------------------------------------------------------------------
@dataclass
class Step:
    """What one optimizer step consists of: all since the step before."""

    number: int = 0  # of the pass over the data
    batches: list = field(default_factory=list)
    forwards: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    clips: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # "backward" and "clip"
    facts: dict = field(default_factory=dict)  # the line "step"
    weights: dict | None = None
    buffers: dict | None = None
    total: dict | None = None  # of all weights together

    @property
    def gradients(self):
        """Those that clipping was given, if it came last: it divides a factor out."""
        if self.calls[-2:] == ["backward", "clip"] and self.clips[-1]["gradients"]:
            return self.clips[-1]["gradients"]
        return self.facts["gradients"]

    def samples(self, kind):
        """Return how often each sample is in the step: {hash or index: count}.

        kind: what the model gets, along its first or second dimension; what the loader
        returns; or the index of that in the data set.
        """
        if kind == "index":
            index = [b["index"] for b in self.batches]
            known = all(i is not None and None not in i for i in index)
            counts = Counter(x for i in index for x in i) if known else Counter()
        elif kind == "loader":
            counts = Counter(x for b in self.batches for x in b["rows"])
        else:
            name = {"model": "rows", "columns": "columns"}[kind]
            counts = Counter(x for f in self.forwards for x in f.get(name, ()))
        if self.facts.get("closure"):  # which is called as often as the optimizer likes
            return Counter(set(counts))
        return counts


class Trace:
    """What one rank did."""

    def __init__(self, lines):
        events = list(parse(lines))
        self.loaders, self.passes, self.steps = {}, [], []
        self.starts, self.lasts, self.evaluations = {}, {}, []
        self.kept = {"wrap": [], "untied": [], "foreign": [], "write": []}
        self.lost, self.waits, self.end, self.collectives = [], None, {}, []
        self.operations = []
        self.rest = Step()
        self.last = events[-1] if events else {}
        training = find_training_loaders(events)
        stepping = False
        for event in events:
            kind = event["e"]
            if kind in self.kept:
                self.kept[kind].append(event)
            elif kind == "loader":
                self.loaders[event["id"]] = event | {"trains": event["id"] in training}
            elif kind == "pass" and event["loader"] in training:
                self.passes.append([])
            elif kind == "batch" and event["loader"] in training:
                self.rest.batches.append(event)
                self.passes[-1].append(event)
            elif kind in ("forward", "outputs", "backward", "clip"):
                # a closure is called between "step" and "stepped"
                self.add_to(self.steps[-1] if stepping else self.rest, event)
            elif kind == "operation":
                self.operations.append(event)
            elif kind == "evaluate":
                self.evaluations.append((len(self.steps), event))
            elif kind == "start":
                self.starts[event["optimizer"]] = event["weights"]
                self.lost += event["lost"]
            elif kind == "step":
                step, self.rest = self.rest, Step()
                step.facts, step.number = event, len(self.passes)
                self.steps.append(step)
                stepping = event["closure"]
            elif kind == "stepped":
                stepping = False
                step = self.steps[-1]
                step.weights, step.buffers = event["weights"], event["buffers"]
                step.total = event["total"]
                self.lasts[event["optimizer"]] = event["weights"]
            elif kind == "last":
                self.lasts[event["optimizer"]] = event["weights"]
            elif kind == "collective":
                self.waits = event
                self.collectives.append((len(self.steps), event))
            elif kind == "done":
                self.waits = None
            elif kind == "end":
                self.end = event
        self.leave_out_warm_up()

    @staticmethod
    def add_to(step, event):
        kind = event["e"]
        if kind == "forward":
            step.forwards.append(event)
        elif kind == "outputs":
            step.forwards[-1]["outputs"] = event["outputs"]
        elif kind == "backward":
            step.losses.append(event["loss"])
            step.calls.append("backward")
        else:
            step.clips.append(event)
            step.calls.append("clip")

    def leave_out_warm_up(self):
        """Drop passes before the training, with a batch of zeros for instance."""
        if not self.steps:
            return
        first, *others = self.steps
        same = [s for s in others if s.facts["optimizer"] == first.facts["optimizer"]]
        # with more batches of the loader, it is one that was skipped
        more = same and len(first.batches) > len(same[0].batches)
        if same and not more and not first.facts["closure"]:
            more = len(first.forwards) - len(same[0].forwards)
            first.forwards = first.forwards[max(more, 0) :]
            more = len(first.losses) - len(same[0].losses)
            first.losses = first.losses[max(more, 0) :]

    def trained(self):
        """Return the loaders that the training reads."""
        return [each for each in self.loaders.values() if each["trains"]]


def parse(lines):
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # killed while it wrote
            return


def find_training_loaders(events):
    """Return the numbers of loaders whose batches are followed by a training pass."""
    latest, training = None, set()
    for event in events:
        if event["e"] == "batch":
            latest = event["loader"]
        elif event["e"] == "forward" and latest is not None:
            training.add(latest)
    return training


class Runs:
    """What is compared: the ranks of a run, and one process.

    ranks: their traces; one: that of one process, or None. equal: whether the weights
    that were written are equal. stirred: one process again, with other random numbers;
    rehashed: with sets in another order. one_by_operations and by_operations: one
    process and rank 0, with their operations. out: the lines that each rank printed,
    one_out those of one process, and again_out those of a second run of it.
    """

    def __init__(self, ranks, one=None, **others):
        self.ranks, self.one, self.n = ranks, one, len(ranks)
        self.equal, self.stirred, self.rehashed = False, None, None
        self.one_by_operations, self.by_operations = None, None
        self.codes, self.hangs = [0] * self.n, False
        self.out, self.one_out, self.again_out = [], [], []
        self.local_ranks = list(range(self.n))
        vars(self).update(others)
        self.steps = min(len(trace.steps) for trace in ranks)
        self.common = min(self.steps, len(one.steps)) if one else 0
        # whether what the model gets is drawn, or the model draws
        self.inputs_random, self.model_random = self.find_random()
        self.random = self.inputs_random or self.model_random
        self.inputs_equal = False  # whether it is that of one process, in step 1

    def find_random(self):
        """Return whether other random numbers change the inputs, and the loss.

        They are other ones from the first forward pass on, which gets the same inputs.
        If it does not, what differs is the data set, or whatever else has no seed.
        """
        if self.one is None or self.stirred is None:
            return False, False
        steps = list(zip(self.one.steps[:5], self.stirred.steps, strict=False))
        pairs = [
            [x.samples("model") for x in pair] for pair in steps if pair[0].number < 2
        ]
        if not pairs or pairs[0][0] != pairs[0][1]:
            return False, False
        losses = [x.losses for x in steps[0]]
        return any(a != b for a, b in pairs), losses[0] != losses[1]

    def pairs(self):
        """Yield each step's number, one process's, and the ranks'."""
        for s in range(self.common):
            yield s, self.one.steps[s], [trace.steps[s] for trace in self.ranks]

    def label(self, s):
        """Return how a step is called; with its optimizer, if there are several."""
        facts = self.ranks[0].steps[s].facts
        if len(self.ranks[0].starts) > 1:
            return f"step {s + 1}, of {facts['kind']} at {facts['at']}"
        return f"step {s + 1}"


def merge(sketches):
    """Return {name: (norm, projection)} of a run, from the sketches of its ranks."""
    merged = {}
    for name, (*_, shards) in sketches[0].items():
        each = [ranks[name] for ranks in sketches if name in ranks]
        each = each[:1] if shards == 1 else each
        copies = max(len(each) / shards, 1 / shards)
        squares, projections = sum(s[0] for s in each), sum(s[1] for s in each)
        merged[name] = sqrt(squares / copies), projections / copies
    shards = [name for name in merged if name.startswith("all ")]
    if shards:  # of all tensors together, whole ones and shards
        each = [merged.pop(name) for name in shards]
        merged["all"] = sqrt(sum(s[0] ** 2 for s in each)), sum(s[1] for s in each)
    return merged


def distances(one, other):
    """Return {name: how far they are apart}, relative to the norm of all together."""
    total = sqrt(sum(norm**2 for norm, _ in one.values())) or 1
    apart = {}
    for name in one.keys() | other.keys():
        if name not in one or name not in other:
            apart[name] = inf
            continue
        each = [abs(a - b) for a, b in zip(one[name], other[name], strict=True)]
        apart[name] = max(each) / total if all(map(isfinite, each)) else inf
    order = {name: place for place, name in enumerate([*one, *other])}
    return dict(sorted(apart.items(), key=lambda item: order[item[0]]))


def unequal(one, other):
    return [name for name, apart in distances(one, other).items() if apart > ROUNDING]


def unequal_between_ranks(sketches):
    """Return the names of tensors that every rank has whole, and not the same."""
    whole = [{n: s for n, s in each.items() if s[2] == 1} for each in sketches]
    merged = [merge([each]) for each in whole]
    names = [name for other in merged[1:] for name in unequal(merged[0], other)]
    return list(dict.fromkeys(names))


def name_them(names):
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


# ---- differences ---------------------------------------------------------------------
class Difference(SimpleNamespace):
    """The first place where something differs.

    kind: one of ORDER. step: from 1, or 0 for before the training. seen: what is
    printed. silent: whether it is a mistake also if the weights are equal. between:
    whether it is between ranks, and not only from one process. facts: what the causes
    look at.
    """

    silent = between = False
    because = None
    names = ()

    def __init__(self, kind, step, seen, **facts):
        super().__init__(kind=kind, step=step, seen=seen, **facts)


def sets_have_another_order(c):
    """One process that is started again trains on other numbers.

    Each start of Python orders its sets differently.
    """
    if c.one or c.rehashed is None:
        return
    steps = zip(c.ranks[0].steps, c.rehashed.steps, strict=False)
    for s, (one, other) in enumerate(steps, start=1):
        for kind in ("model", "loader"):
            if one.samples(kind) != other.samples(kind):
                seen = f"step {s}: one process, started again, trains on other numbers"
                yield Difference("set order", s, seen, silent=True)
                return


def weights_untied(c):
    """Names that shared a tensor before fully_shard or to_empty train apart."""
    for event in c.ranks[0].kept["untied"][:1]:
        names, by = " and ".join(event["names"]), event["by"]
        seen = (
            f"{names} were one tensor before {by} ({event['at']}), and are several now"
        )
        yield Difference("untied", 0, seen, silent=True, by=by)


def order_repeats(c):
    """A pass over the data has the order of the one before, and that is shuffled."""
    trace = c.ranks[0]
    if not any(loader["epochs"] for loader in trace.trained()):
        return  # no sampler that could have been told
    orders = [[i for b in each for i in b["index"] or ()] for each in trace.passes]
    for number, (one, other) in enumerate(pairwise(orders), start=2):
        size = min(len(one), len(other))
        shuffled = one[:size] != sorted(one[:size])
        if size > 2 and shuffled and one[:size] == other[:size]:
            numbers = [step.number for step in trace.steps]
            step = numbers.index(number) + 1 if number in numbers else 1
            seen = f"step {step}: pass {number} has the order of the one before"
            yield Difference("order", step, seen, silent=True)
            return


def samples_differ(c):
    """The ranks' samples in a step are not those of one process, or the same on all.

    They are told by what the model gets. If that differs, and what the loader returned
    does not, or its index, then it is the inputs that differ. If it never differs, what
    is random in it was drawn alike, and dealt out: then nothing is random by rank.
    """
    found = set()
    for s in range(c.steps):
        steps = [trace.steps[s] for trace in c.ranks]
        alone = c.one.steps[s] if s < c.common else None
        base = find_base(alone, steps)
        if base is None:  # a step without a forward pass, for instance
            continue
        each = [step.samples(base) for step in steps]
        matched = alone and find_match(alone, steps)
        found.add(matched)
        if matched in ("model", "columns"):
            c.inputs_equal = c.inputs_equal or s == 0
        elif c.n > 1 and not matched and all(set(x) == set(each[0]) for x in each):
            seen = (
                f"{c.label(s)}: all ranks train on the same {each[0].total()} samples"
            )
            facts = {"s": s, "same": True, "each": each, "base": base}
            yield Difference("samples", s + 1, seen, silent=True, **facts)
            return
        elif matched and has_samples("model", alone, steps):
            what = "what the model gets" if matched == "loader" else "what is read"
            seen = f"{c.label(s)}: {what} for the same samples"
            seen += " is not what it is on one process"
            yield Difference("inputs", s + 1, seen, s=s, base=matched)
            return
        elif alone and not matched:
            wanted, got = alone.samples(base), sum(each, Counter())
            seen = f"{wanted.total()} samples on one process, {got.total()} on {c.n}"
            if wanted.total() == got.total():
                known = (wanted & got).total()
                seen = f"{known} of the {got.total()} samples are those of one process"
            facts = {"s": s, "same": False, "each": each, "base": base}
            seen = f"{c.label(s)}: {seen}"
            yield Difference("samples", s + 1, seen, wanted=wanted, **facts)
            return
    if found and found <= {"model", "columns"}:
        c.inputs_random, c.random = False, c.model_random


def find_base(alone, steps):
    """Return what samples can be told by on all ranks, or None."""
    kinds = ("loader", "index", "model")
    return next((k for k in kinds if has_samples(k, alone or steps[0], steps)), None)


def has_samples(kind, alone, steps):
    return all(step.samples(kind) for step in (alone, *steps))


def find_match(alone, steps):
    """Return by what the ranks' samples are those of one process, or None."""
    for kind in ("model", "columns", "loader", "index"):
        wanted = alone.samples(kind)
        if wanted and wanted == sum((x.samples(kind) for x in steps), Counter()):
            return kind
    return None


def draws_are_equal(c):
    """All ranks' generators are in the same state, and something is drawn from them."""
    if c.n == 1 or not c.steps:
        return
    forwards = [trace.steps[0].forwards for trace in c.ranks]
    if not all(forwards):
        return
    for number, name in enumerate(("torch", "random", "NumPy")):
        states = [each[0]["states"][number : number + 1] for each in forwards]
        if not states[0] or any(state != states[0] for state in states):
            continue
        what = None
        if name == "torch" and any(forward["drops"] for forward in forwards[0]):
            what = "the same dropout, which is off here,"
        elif c.random and any(moves_in_a_pass(trace, number) for trace in c.ranks):
            what = "the same numbers"
        if what:
            seen = f"step 1: all ranks draw {what} from {name}"
            yield Difference("draws", 1, seen, silent=True, generator=name)
            return


def the_model_draws(c):
    """The first loss is another one after other random numbers."""
    if c.model_random:
        seen = "step 1: the model draws random numbers"
        yield Difference("noise", 1, seen)


def moves_in_a_pass(trace, number):
    """Return whether a generator is used between two steps of a pass over the data."""
    for a, b in pairwise(trace.steps):
        if (
            a.number == b.number
            and a.facts["states"][number] != b.facts["states"][number]
        ):
            return True
    return False


def first_weights_differ(c):
    """The weights before step 1 differ between ranks, or from those of one process."""
    for number, start in c.ranks[0].starts.items():
        starts = [trace.starts.get(number, {}) for trace in c.ranks]
        alone = c.one.starts.get(number) if c.one else None
        if names := unequal_between_ranks(starts):
            seen = f"before step 1, {name_them(names)} differs between the ranks"
            yield Difference("start", 1, seen, between=True, only=False)
        elif alone and alone.keys() != start.keys():
            only = [
                name for name in [*alone, *start] if (name in alone) != (name in start)
            ]
            where = "one process" if only[0] in alone else f"{c.n} processes"
            seen = f"{name_them(only)} is trained on {where} only"
            yield Difference("start", 1, seen, only=True)
        elif alone and (names := unequal(merge([alone]), merge(starts))):
            seen = f"before step 1, {name_them(names)} is not that of one process"
            yield Difference("start", 1, seen, only=False)


def operations_differ(c):
    """In step 1 an operation computes something else for a sample than on one process.

    It is the first one of which the line in the script is known. A mistake between two
    modules, or in the loss, is found in this way only.
    """
    one, rank = c.one_by_operations, c.by_operations
    if not (one and rank and c.inputs_equal) or c.random:
        return
    known = {
        (e["name"], e["at"], e["call"], sample): (e["width"], *values)
        for e in one.operations
        for sample, *values in e["rows"]
    }
    for e in rank.operations:
        for sample, *values in e["rows"]:
            width, *wanted = known.get(
                (e["name"], e["at"], e["call"], sample), (e["width"], *values)
            )
            if e["width"] == width and all(map(is_close, wanted, values)):
                continue
            seen = f"step 1: what {e['name']} ({e['at']}) computes for a sample "
            seen += "is not what it is on one process"
            if e["width"] != width:
                seen += f": {e['width']} numbers, and there {width}"
            facts = {"module": e["name"], "wider": e["width"] != width}
            yield Difference("operations", 1, seen, **facts)
            return


def outputs_differ(c):
    """In step 1 a module computes something else for a sample than on one process."""
    if not (c.inputs_equal and c.common) or c.random:
        return
    alone, first = c.one.steps[0], c.ranks[0].steps[0]
    known = {key: values for _, key, values in outputs_of(alone)}
    for module, key, values in outputs_of(first):
        if key in known and not all(map(is_close, known[key], values)):
            name = key[0] or "the model"
            seen = (
                f"step 1: the output of {name} ({module}) for a sample is not what it "
            )
            yield Difference("outputs", 1, seen + "is on one process", module=module)
            return


def outputs_of(step):
    """Yield a module's class, (its name, its call, the sample), and the two numbers."""
    for forward in step.forwards:
        calls = Counter()
        for name, module, samples in forward.get("outputs", ()):
            calls[name] += 1
            for sample, *values in samples:
                yield module, (name, calls[name], sample), values


def is_close(a, b):
    return isclose(a, b, rel_tol=1e-7, abs_tol=1e-9)


def gradients_differ_between_ranks(c):
    """Each rank has a gradient of its own when the optimizer uses it."""
    for s in range(c.steps):
        steps = [trace.steps[s] for trace in c.ranks]
        if steps[0].facts["closure"]:
            continue  # they are computed in the step
        if names := unequal_between_ranks([step.facts["gradients"] for step in steps]):
            which = name_them(names)
            seen = f"{c.label(s)}: the gradient of {which} differs between the ranks"
            facts = {"between": True, "names": names, "s": s}
            yield Difference("own gradients", s + 1, seen, **facts)
            return


def gradients_differ_from_one(c):
    """The averaged gradient is not that of one process, and rounding is not why."""
    if c.random:
        return
    before = 0
    for s, alone, steps in c.pairs():
        if alone.facts["closure"]:
            continue
        one, other = merge([alone.gradients]), merge([x.gradients for x in steps])
        names, before = jump(one, other, before)
        if names:
            which = name_them(names)
            seen = f"{c.label(s)}: the gradient of {which} is not that of one process"
            facts = {"names": names, "s": s, "one": one, "other": other}
            yield Difference("gradients", s + 1, seen, **facts)
            return


def jump(one, other, before):
    """Return the names that are apart by more than rounding, and how far the most.

    before: the same of the step before. What grows slowly is rounding.
    """
    apart = distances(one, other)
    largest = max(apart.values(), default=0)
    names = [name for name, far in apart.items() if far > ROUNDING]
    return names if largest > GROWS * before else [], max(largest, ROUNDING / GROWS)


def nothing_is_trained(c):
    """The weights of an optimizer at the end are those at the beginning."""
    trace = c.ranks[0]
    for number, last in trace.lasts.items():
        first = trace.starts[number]
        shared = [name for name in first if name in last]
        if shared and all(first[name] == last[name] for name in shared):
            seen = "no weight changes in the whole training"
            yield Difference("nothing", 1, seen, silent=True, s=c.steps - 1)
            return


def options_differ(c):
    """A learning rate, or another number of an optimizer's group, differs."""
    for rank, trace in enumerate(c.ranks[1:], start=1):
        runs = ("rank 0", c.ranks[0]), (f"rank {rank}", trace)
        if found := compare_options(c, runs, c.steps):
            found.between = True
            yield found
            return
    if c.one:
        runs = ("one process", c.one), (f"{c.n} processes", c.ranks[0])
        if found := compare_options(c, runs, c.common):
            yield found


def compare_options(c, runs, steps):
    (one, alone), (other, trace) = runs
    for s in range(steps):
        pair = alone.steps[s].facts["options"], trace.steps[s].facts["options"]
        for a, b in zip(*pair, strict=False):
            for name in a.keys() & b.keys():
                if not isclose(a[name], b[name], rel_tol=1e-12):
                    values = f"{a[name]:.6g} on {one} and {b[name]:.6g} on {other}"
                    factor = b[name] / a[name] if a[name] else inf
                    seen = f"{c.label(s)}: {name} is {values}"
                    return Difference("options", s + 1, seen, name=name, factor=factor)
    return None


def states_differ(c):
    """An optimizer's state, such as its momentum, differs between the ranks."""
    for s in range(c.steps):
        facts = [trace.steps[s].facts for trace in c.ranks]
        entries = [each["entries"] for each in facts]
        if len(set(entries)) > 1 or unequal_between_ranks([x["state"] for x in facts]):
            kind = facts[0]["kind"]
            seen = f"{c.label(s)}: the state of {kind} differs between the ranks"
            if len(set(entries)) > 1:
                each = ", ".join(
                    f"{n} tensors on rank {r}" for r, n in enumerate(entries)
                )
                seen += f": {each}"
            yield Difference("state", s + 1, seen, between=True)
            return


def weights_differ(c):
    """The weights after a step differ between ranks, or from those of one process."""
    for s in range(c.steps):
        each = [trace.steps[s].weights for trace in c.ranks]
        if None not in each and (names := unequal_between_ranks(each)):
            seen = f"after {c.label(s)}, {name_them(names)} differs between the ranks"
            yield Difference("own weights", s + 1, seen, between=True)
            break
    before = 0
    for s, alone, steps in [] if c.random else c.pairs():
        each = [step.weights for step in steps]
        if alone.weights is None or None in each:
            return
        names, before = jump(merge([alone.weights]), merge(each), before)
        if names:
            seen = f"after {c.label(s)}, {name_them(names)} is not that of one process"
            yield Difference("weights", s + 1, seen)
            return


def numbers_of_steps_differ(c):
    """The ranks take different numbers of steps, or another number than one process."""
    counts = [len(trace.steps) for trace in c.ranks]
    if len(set(counts)) > 1:
        each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        seen = f"the ranks take different numbers of steps: {each}"
        step = min(counts) + 1
        yield Difference("steps", step, seen, silent=True, between=True)
    elif c.one and counts[0] != len(c.one.steps):
        alone = len(c.one.steps)
        seen = f"one process takes {alone} steps, and {c.n} processes take {counts[0]}"
        yield Difference("steps", min(counts[0], alone) + 1, seen)


def a_parameter_has_no_optimizer(c):
    """A group of an optimizer is empty, and perhaps parameters are in none."""
    trace = c.ranks[0]
    groups = [o["parameters"] for s in trace.steps[:1] for o in s.facts["options"]]
    unowned = trace.end.get("unowned", [])
    if 0 in groups:
        seen = f"group {groups.index(0)} of the optimizer has no parameters"
        seen += f", and {name_them(unowned)} is in no group" if unowned else ""
        yield Difference("unowned", 1, seen, silent=True, unowned=unowned)


def evaluations_differ(c):
    """Together, the ranks evaluate a sample more often than one process, or never.

    That all of them, or rank 0 alone, evaluate what one process does is not wrong. Nor
    are samples that come twice and do not count: what is printed is then the same.
    """
    prints = any(re.search(r"\d", line) for line in c.one_out)
    if not c.equal or (prints and not any(printed_numbers_differ(c))):
        return
    if c.one is None or {len(t.steps) for t in c.ranks} != {len(c.one.steps)}:
        return
    for key, wanted in evaluated_samples(c.one).items():
        each = [evaluated_samples(trace).get(key, Counter()) for trace in c.ranks]
        each = [counts for counts in each if counts]
        got = sum(each, Counter())
        fits = got == wanted or all(counts == wanted for counts in each)
        if fits or not each or set(got) - set(wanted):  # the last are padded, or drawn
            continue
        twice, never = (got - wanted).total(), (wanted - got).total()
        what = f"{twice} come twice" if twice else f"{never} are left out"
        seen = f"{find_line(c.ranks, key)}, after step {key[0]}: of {wanted.total()} "
        seen += f"samples that are evaluated, {what}"
        facts = {"twice": twice, "ranks": len(each)}
        yield Difference("evaluation", key[0], seen, silent=True, **facts)
        return


def evaluated_samples(trace):
    """Return {(steps before, model): samples} of the evaluations."""
    found = {}
    for steps, event in trace.evaluations:
        counts = found.setdefault((steps, event["model"]), Counter())
        counts.update(event["rows"])
    return found


def find_line(ranks, key):
    each = [e["at"] for t in ranks for s, e in t.evaluations if (s, e["model"]) == key]
    return each[0]


def evaluated_weights_differ(c):
    """The ranks evaluate models of the same class and different weights."""
    each = [
        {(s, e["model"]): e for s, e in reversed(trace.evaluations) if "weights" in e}
        for trace in c.ranks
    ]
    for key, event in sorted(each[0].items(), key=lambda item: item[0][0]):
        others = [x[key]["weights"] for x in each[1:] if key in x]
        if unequal_between_ranks([event["weights"], *others]):
            seen = (
                f"{event['at']}, after step {key[0]}: the {key[1]} that is evaluated "
            )
            seen += "has different weights on each rank"
            facts = {"silent": True, "between": True}
            yield Difference("evaluated", key[0], seen, **facts)
            return


def files_are_shared(c):
    """Several ranks write a file of the same name."""
    writes = [{e["file"]: e["at"] for e in trace.kept["write"]} for trace in c.ranks]
    for (a, one), (b, other) in combinations(enumerate(writes), 2):
        for file in one.keys() & other.keys():
            seen = f"ranks {a} and {b} both write {file} ({one[file]})"
            yield Difference("files", c.steps, seen, silent=True)
            return


def printed_numbers_differ(c):
    """The weights are equal, and rank 0 prints other numbers than one process."""
    if not (c.equal and c.one_out and c.out):
        return
    lines = zip(c.one_out, c.out[0], c.again_out or c.one_out, strict=False)
    for one, other, again in lines:
        is_a_time = not numbers_equal(one, again)
        if not is_a_time and not numbers_equal(one, other):
            seen = f'rank 0 prints "{other.strip()}", and one process "{one.strip()}"'
            yield Difference("printed", c.steps, seen, silent=True)
            return


def numbers_equal(one, other):
    """Return whether the numbers of two lines are equal; true of different words.

    Their last digit can be rounded differently.
    """
    pattern = r"-?\d+(?:\.(\d+))?(?:e[+-]?\d+)?"
    if re.sub(pattern, "", one) != re.sub(pattern, "", other):
        return True
    pairs = zip(*(re.finditer(pattern, line) for line in (one, other)), strict=True)
    for a, b in pairs:
        digit = 1.01 * 10 ** -len(a[1]) if a[1] else 0
        if not isclose(float(a[0]), float(b[0]), rel_tol=1e-6, abs_tol=digit):
            return False
    return True


# In the order of calling: what samples_differ finds out, others ask.
SEARCHES = (
    sets_have_another_order,
    weights_untied,
    order_repeats,
    samples_differ,
    draws_are_equal,
    the_model_draws,
    first_weights_differ,
    operations_differ,
    outputs_differ,
    gradients_differ_between_ranks,
    gradients_differ_from_one,
    nothing_is_trained,
    options_differ,
    states_differ,
    weights_differ,
    numbers_of_steps_differ,
    a_parameter_has_no_optimizer,
    evaluations_differ,
    evaluated_weights_differ,
    files_are_shared,
    printed_numbers_differ,
)
