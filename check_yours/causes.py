"""Why two runs of a script part: the table causes.txt, and what is printed of it.

compare.py finds the places where they part; the table begins with how each of them is
told. A row of the table begins with kinds of places, and behind the colon with what has
to be known of one ("not" of what must not be): names of attributes of a Finding. Behind
the arrow is where it is explained; below are the cause, and in the last line the cure.
The first row that applies is told, so the order matters: what is certain comes first.
Where no certain rule applies, the cause is "not known", and the row says where to look.
A row of notes is no mistake: what differs by nature.
"""

import re
from pathlib import Path
from typing import NamedTuple

from . import compare
from .compare import Finding

# What is told below another difference, because it does not follow from it.
INDEPENDENT = ("stopped", "order", "draws", "files")


class Row(NamedTuple):
    kinds: tuple
    when: tuple
    cause: str
    cure: str
    see: str
    note: bool


def read_table(text):
    """Return {place: how it is told}, and the Rows, of a table."""
    places, rows = {}, []
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, *lines = map(str.strip, block.strip().splitlines())
        kinds, when, see = re.fullmatch("(.*?):(.*?)(?:->(.*))?", head).groups()
        if kinds.startswith("place "):
            places[kinds.removeprefix("place ")] = " ".join(lines)
            continue
        when = tuple(x.strip() for x in when.split(",") if x.strip())
        kinds = tuple(kinds.split(", "))
        texts = " ".join(lines[:-1]), lines[-1], see.strip()
        rows.append(Row(kinds, when, *texts, "note" in kinds))
    return places, tuple(rows)


PLACES, ROWS = read_table(Path(__file__).with_suffix(".txt").read_text())


# ---- what is told --------------------------------------------------------------------
def diagnose(c):
    """Return the findings to be told, the first one first, and notes last."""
    foreign = {event["how"] for trace in c.ranks for event in trace.all["foreign"]}
    if foreign & {"parallelize_module", "FullyShardedDataParallel"}:
        return []
    if found := compare.one_process_differs(c):
        return [explain(c, found)]
    found = [each for search in compare.SILENT for each in search(c)]
    parting = compare.ranks_part(c)
    from_one = None if c.equal or not c.one else compare.parts_from_one(c)
    if from_one and parting and parting.s <= from_one.s:
        from_one = None
    found += [each for each in (parting, from_one) if each]
    if not (found or c.equal or c.grew or c.unread or any(c.codes)) and c.common:
        found.append(compare.saved_parts(c))
    if c.hangs:
        found.append(find_stop(c))
    if c.equal and c.one:
        found = [d for d in found if d.silent]
        found += compare.printed_numbers_differ(c)
    found = [explain(c, d) for d in found]
    found.sort(key=lambda d: (d.row.note, not d.explains, d.s))
    others = [d for d in found[1:] if d.row.note or d.kind in INDEPENDENT or d.between]
    return found[:1] + others[:3]


def explain(c, d):
    """Give a finding the row that applies first."""
    d.n, d.label = c.n, c.label(d.s)
    d.which = compare.name_them(d.names) if d.names else ""
    # why the weights are unequal, if they are
    off = d.kind in ("order", "files") or d.kind == "draws" and not d.drawn
    d.explains = c.equal or not off
    d.random = c.inputs_random or c.model_random and d.kind != "data"

    def applies(row):
        words = (word.split() for word in row.when)
        return d.kind in row.kinds and all(
            bool(d.get(word[-1])) != (word[0] == "not") for word in words
        )

    d.row = next(filter(applies, ROWS))
    return d


def find_stop(c):
    """Return where each rank is of a run that hangs, or whose connections broke."""
    counts = [len(trace.steps) + bool(trace.rest.forward) for trace in c.ranks]
    fewer, more = counts.index(min(counts)), counts.index(max(counts))
    each = [f"rank {rank} {place}" for rank, place in enumerate(c.stacks)]
    d = Finding("stopped", c.steps, silent=True, one=c.n == 1, places=", ".join(each))
    if fewer != more:
        d.more, d.fewer = f"rank {more}", f"rank {fewer}"
    return d


def find_notes(c):
    """Return what is worth knowing, and no mistake."""
    notes = []
    for event in [event for trace in c.ranks for event in trace.all["foreign"]][:1]:
        says = "the check compares the weights, and cannot say where they part"
        notes.append(f"{event['how']} ({event['at']}): {says}")
    for event in c.ranks[0].all["unseen"]:
        notes.append(f"with this version of torch the check cannot see {event['what']}")
    if not (c.steps or c.equal or any(c.codes)):
        says = "no step of torch.optim was seen: the check compares the weights, and"
        notes.append(f"{says} cannot say where they part")
    if c.dtype != "float64":
        notes.append(
            f"weights are in {c.dtype}: up to {c.rounding:g} is called rounding"
        )
    return notes


def has_trained_together(c):
    """Return whether the ranks share a training, which equal weights do not show."""
    shares = (trace.all["wrap"] or trace.all["collective"] for trace in c.ranks)
    return c.n == 1 or c.steps or all(shares)


def tell(found, notes=()):
    """Return the lines for what `diagnose` has found, and for notes."""
    lines = []
    for number, d in enumerate(found):
        seen, cause, cure = (
            text.format(**d)
            for text in (PLACES[d.place or d.kind], d.row.cause, d.row.cure)
        )
        if d.row.note or d.kind == "printed":
            lines += [("note", f"{seen}: {cause}"), ("", f"{cure} ({d.row.see})")]
        elif number or not d.explains:
            lines.append(("then", f"{seen}: {cause} ({d.row.see})"))
        else:
            lines += [("first", seen), ("cause", cause), ("cure", cure)]
            lines += [("see", d.row.see)]
    lines += [("note", text) for text in notes]
    return [f"  {f'{name}:' * bool(name):7}{text}" for name, text in lines]
