"""docs/symptoms.md: every row links to a section that shows its words."""

import re

import nbformat
import pytest

from tools.stages import ROOT

PAGE = ROOT / "docs/symptoms.md"

# What readers ask for most, and a pattern of the row that answers it.
WANTS = {
    "why does it hang": "in the middle of a run.*#when-it-hangs",
    "not equal to one GPU": "other weights than one.*#what-would-spoil-the-comparison",
    "batch size and learning rate": "global batch .* learning rate .*#3-data",
    "the exact accuracy from all GPUs": "accuracy .*#shards-combined-wrongly",
    "local_rank": "--local_rank.*---local_rank",
    "port in use": "EADDRINUSE.*#a-port-that-is-taken",
    "find_unused_parameters": "find_unused_parameters.*#a-parameter-that-the-loss",
    "set_epoch": "every epoch.*#set_epoch-forgotten",
    "downloads by all ranks": "all ranks download.*#3-data",
    "Slurm's ranks": "SLURM_PROCID.*#slurm_procid-as-the-number-of-the-gpu",
    "GPU 0's memory": "memory of GPU 0.*#2-processes",
    "spawn in notebooks": "AttributeError.*#a-function-from-a-notebooks-cell",
    "not faster": "brings little.*#why-it-is-not-faster",
    "no_sync": "no_sync.*#no_sync-around-backward-only",
    "order of mixed precision's calls": "in which order.*05_amp.ipynb#4-one-training",
    "resuming exactly": "resumed run.*#what-the-usual-checkpoint-forgets",
    "uneven inputs": "uneven inputs.*#one-batch-more-than-the-others",
    "collectives under rank 0": "if rank == 0.*#a-collective-under-if-rank--0",
    "the prefix module.": "module.0.weight.*#weights-that-nothing-else-can-load",
    "when SyncBatchNorm": "is SyncBatchNorm needed.*#1-flags",
    "augmentation per rank": "random crops.*#the-same-random-numbers-on-every-rank",
    "warnings at exit": "destroy_process_group.*#6-the-run",
    "texts that match the code": "snippet.*#the-script-section-by-section",
}


def lines():
    """Return the rows of the page's tables as lines, without their heads."""
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [line for line in table if line not in (table[0], "|---|---|---|")]


def rows():
    """Return, for each row, what you see and the link's text, notebook and section."""
    row = re.compile(r"\| (.+) \| .+ \| \[(.+)\]\(\.\./(\w+)/\3\.ipynb#(\S+)\) \|")
    found = [row.fullmatch(line) for line in lines()]
    assert all(found), "not a row: " + lines()[found.index(None)]
    return [match.groups() for match in found]


def slug(heading):
    """Return the name that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def shown(cell):
    """Return the lines that a cell shows: its source, and outputs without colors."""
    outputs = [
        output.get("text") or output.data.get("text/plain", "")
        for output in cell.get("outputs", [])
    ]
    text = "\n".join([cell.source, *outputs])
    return re.sub(r"\x1b\[\d+m", "", text).splitlines()


def sections(notebook):
    """Return {slug: (heading, lines)} of a notebook.

    A section's lines end at the next heading of its level. No two headings of a
    notebook may have the same slug.
    """
    found, inside = {}, []
    book = nbformat.read(ROOT / notebook / f"{notebook}.ipynb", as_version=4)
    for cell in book.cells:
        text = cell.cell_type == "markdown"
        fenced = False
        for line in shown(cell):
            fenced ^= line.startswith("```")
            if text and not fenced and (match := re.match(r"(#+) (.+)", line)):
                level, heading = len(match[1]), match[2]
                assert slug(heading) not in found, heading
                found[slug(heading)] = heading, []
                inside = [(depth, lines) for depth, lines in inside if depth < level]
                inside.append((level, found[slug(heading)][1]))
            for _, lines in inside:
                lines.append(line)
    return found


def test_the_page_is_long_enough_for_what_readers_want():
    assert len(WANTS) == 23
    assert len(rows()) >= 23


@pytest.mark.parametrize("want", WANTS)
def test_what_readers_want_has_a_row(want):
    assert any(re.search(WANTS[want], line) for line in lines())


@pytest.mark.parametrize("notebook", sorted({row[2] for row in rows()}))
def test_a_row_links_to_a_section_that_shows_its_words(notebook):
    there = sections(notebook)
    for see, label, _, anchor in [row for row in rows() if row[2] == notebook]:
        assert anchor in there, f"{notebook} has no section {anchor}"
        heading, text = there[anchor]
        assert label == f"{notebook[:2]}: {heading.removeprefix(f'{notebook[:2]} · ')}"
        for words in re.findall(r"`([^`]+)`", see):
            pattern = ".*".join(map(re.escape, words.split("...")))
            found = any(re.search(pattern, line) for line in text)
            assert found, f"{label} does not show: {words}"
