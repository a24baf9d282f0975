"""Pages and notebooks: links lead somewhere, files exist, and commands print the lines.

A link leads to a file, and behind # to a heading of it, as GitHub names headings.
"""

import functools
import re

import nbformat
import pytest

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release

FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file of this repository in a command or in a sentence.
FOLDERS = "[01][0-9]_[a-z_]+|common|docs|exercises|other_libraries|recipes|tools"
FOLDERS += "|your_own_script|check_yours|benchmarks|tests"
FILE = re.compile(
    rf"(?<![\w/.-])(?:{FOLDERS})/[\w/]+\.(?:py|sh|sbatch|md|ipynb|yaml)\b"
)
SKIPPED = (".venv", "_build", "node_modules")  # .venv-torch-2.11, too


def find(pattern):
    """Return the files with a pattern, without those that are made, and the Chinese."""
    found = (path for path in sorted(ROOT.rglob(pattern)) if path.is_file())
    paths = (path.relative_to(ROOT) for path in found if ".zh-CN." not in path.name)
    return [
        path.as_posix()
        for path in paths
        if not any(part.startswith(SKIPPED) for part in path.parts)
    ]


PAGES = find("*.md") + find("*.ipynb")


@functools.cache
def text_of(name):
    """Return the text of a page, or of the markdown cells of a notebook."""
    if name.endswith(".md"):
        return (ROOT / name).read_text()
    cells = nbformat.read(ROOT / name, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@functools.cache
def headings(name):
    """Return the names that GitHub gives to the headings of a page, in their order."""
    found = []
    for line in re.findall(r"^#+ (.+)", FENCED.sub("", text_of(name)), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).strip().lower()
        found.append(re.sub(r"[^\w -]", "", words).replace(" ", "-"))
    return found


def leads_somewhere(name, target):
    """Return whether a link on a page leads to a file, and to a heading of it."""
    file, _, heading = target.partition("#")
    path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
    if not heading:
        return path.exists()
    is_page = path.suffix in (".md", ".ipynb") and path.exists()
    return is_page and heading in headings(path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name):
    targets = LINK.findall(FENCED.sub("", text_of(name)))
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not leads_somewhere(name, target)] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_files_that_a_page_names_exist(name):
    missing = {
        file for file in FILE.findall(text_of(name)) if not (ROOT / file).exists()
    }
    assert missing == set()


# ---- what commands print -------------------------------------------------------------
BLOCK = re.compile(r"^```\n\$ ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = [
    (command, output)
    for name in PAGES
    if name.startswith("docs/") and name.endswith(".md")
    for command, output in BLOCK.findall(text_of(name))
    if "/demos/" in command
]


@pytest.mark.parametrize(
    "command, output",
    [
        only_in_release(command, output, unless="join" in command)
        for command, output in SHOWN
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


# ---- where check_yours sends a reader ------------------------------------------------
SENT_TO = {
    "Your own script": "your_own_script/README.md",
    "From DDP to FSDP2": "your_own_script/ddp_to_fsdp2.md",
    "Check yours": "check_yours/README.md",
    "Symptoms": "docs/symptoms.md",
    "First aid": "docs/first_aid.md",
}


def test_the_check_names_rows_and_headings_that_exist():
    causes = (ROOT / "check_yours/causes.txt").read_text()
    sees = {*re.findall("-> (.+)$", causes, re.MULTILINE)}
    assert len(sees) > 30
    for see in sees:
        page, *words = re.split("[,;:] ", see)
        text = (ROOT / SENT_TO[page]).read_text().replace("`", "")
        for word in words:
            rows = re.findall(r"\d+", word) if word.startswith("row") else []
            wanted = [f"\n| {number} | " for number in rows] or [word]
            assert all(each in text for each in wanted), see
