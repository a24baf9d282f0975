"""README.zh-CN.md has the headings, tables, links and commands of README.md."""

import re

import pytest

from tools.stages import ROOT

ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(text):
    return BLOCK.sub("", text)


def code(text):
    """Return the words in `this type`; of a table's row, once."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def links(text):
    """Return the targets of links and pictures, except from language to language."""
    targets = re.findall(r"\]\(([^)]+)\)", prose(text))
    return [target for target in targets if not target.startswith("README")]


def headings(text):
    return [len(level) for level in re.findall("^(#+) ", prose(text), re.MULTILINE)]


def tables(text):
    """Return the number of cells of each line of a table."""
    lines = [line for line in prose(text).splitlines() if line.startswith("|")]
    return [line.count("|") for line in lines]


def paragraphs(text):
    """Return how many paragraphs, lists and tables each section has."""
    parts = re.split("^#+ ", text, flags=re.MULTILINE)
    return [len(re.findall("\n\n+", part.strip())) for part in parts]


PARTS = [BLOCK.findall, code, links, headings, tables, paragraphs]


@pytest.mark.parametrize("part", PARTS)
def test_both_have_the_same(part):
    found = part(ENGLISH)
    assert len(found) >= 3
    assert part(CHINESE) == found


def test_each_leads_to_the_other_and_is_in_its_language():
    assert "](README.zh-CN.md)" in ENGLISH and "](README.md)" in CHINESE
    for line in prose(CHINESE).splitlines():
        bare = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        if len(bare) > 60:
            assert len(re.findall("[\u4e00-\u9fff]", bare)) > len(bare) / 3, line
