"""The pages in docs/: the commands that they show print what they show."""

import re

import pytest

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release

BLOCK = re.compile(r"^```\n\$ ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = [
    (path.stem, command, output)
    for path in sorted((ROOT / "docs").glob("*.md"))
    for command, output in BLOCK.findall(path.read_text())
    if "/demos/" in command or "/memory.py" in command
]


def test_the_pages_show_commands():
    assert len(SHOWN) >= 5
    assert {page for page, _, _ in SHOWN} >= {"old_ways", "uneven_inputs"}


@pytest.mark.parametrize(
    "command, output",
    [
        only_in_release(
            command, output, unless="join" in command or "/memory.py" in command
        )
        for _, command, output in SHOWN
    ],
)
def test_a_command_prints_the_lines_that_its_page_shows(command, output):
    """In any order, since several ranks print; `...` stands for anything."""
    done = commands.run(command, code=None, forks=True)
    printed = (done.stdout + done.stderr).splitlines()
    for line in filter(None, output.splitlines()):
        if line != "...":
            pattern = ".*".join(map(re.escape, line.split("...")))
            assert any(re.fullmatch(pattern, one) for one in printed), line
