"""README.zh-CN.md has the headings, lists, links and commands of README.md.

They are compared section by section, as counts: their order would impose the one
language's word order on the other.
"""

import re
from collections import Counter

import pytest

from tools.stages import ROOT

ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(text):
    return BLOCK.sub("", text)


def sections(text):
    return re.split("^#+ ", prose(text), flags=re.MULTILINE)


def code(text):
    """Return how often each word in `this type` occurs in each section."""
    return [Counter(re.findall(r"`([^`\n]+)`", part)) for part in sections(text)]


def links(text):
    """Return the targets in each section, except from language to language."""
    text = text.replace("questions.zh-CN.md", "questions.md")
    found = [re.findall(r"\]\(([^)]+)\)", part) for part in sections(text)]
    return [Counter(t for t in part if not t.startswith("README")) for part in found]


def headings(text):
    return [len(level) for level in re.findall("^(#+) ", prose(text), re.MULTILINE)]


def items(text):
    """Return how many items the lists of each section have."""
    return [len(re.findall("^- ", part, re.MULTILINE)) for part in sections(text)]


PARTS = [BLOCK.findall, code, links, headings, items]


@pytest.mark.parametrize("part", PARTS)
def test_both_have_the_same(part):
    found = part(ENGLISH)
    assert len(found) >= 2
    assert part(CHINESE) == found


def test_both_pages_of_questions_lead_to_the_same():
    english, chinese = (
        (ROOT / f"docs/questions{language}.md").read_text()
        for language in ("", ".zh-CN")
    )
    assert len(links(english)[-1]) >= 10 and links(english) == links(chinese)


def test_each_leads_to_the_other_and_is_in_its_language():
    assert "](README.zh-CN.md)" in ENGLISH and "](README.md)" in CHINESE
    for line in prose(CHINESE).splitlines():
        bare = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        if len(bare) > 60:
            assert len(re.findall("[\u4e00-\u9fff]", bare)) > len(bare) / 5, line
