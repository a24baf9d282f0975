"""The rows of docs/symptoms.md, for test_symptoms.py and test_torch_names_it.py."""

import re

from harness.stages import ROOT

PAGE = ROOT / "docs/symptoms.md"


def lines():
    """Return the rows of the page's tables as lines, without their heads."""
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [line for line in table if line not in (table[0], "|---|---|---|---|")]


def rows():
    """Return, for each row, what you see, and its link's label, file and anchor.

    The cells between them say what it is, and what to do. A program has no anchors:
    then it is None.
    """
    link = r"\[(.+)\]\(([^#]*\.py|[^#]*(?=#))#?(\S+)?\)"
    row = re.compile(rf"\| ([^|]+) \| [^|]+ \| [^|]{{5,}} \| {link} \|")
    found = [row.fullmatch(line) for line in lines()]
    assert all(found), "not a row: " + lines()[found.index(None)]
    return [match.groups() for match in found]
