"""README.md: each stage is a small patch on an earlier one, explained line by line.

The form of the scripts is what CONTRIBUTING.md says under *What the tests guard*.
"""

import ast
import difflib
import re
from collections import Counter

import pytest

from harness.stages import ROOT
from harness.stages import ancestors
from harness.stages import registry
from harness.stages import stages
from harness.stages import steps

TITLES = [
    "1. flags",
    "2. processes",
    "3. data",
    "4. one training epoch",
    "5. evaluation",
    "6. the run",
]
TOKEN = re.compile(r"\w+|[^\w\s]")
TAG = re.compile(r"\[(\d\d)\]")
# What the stages teach, and what common/ must therefore neither use nor hide.
LESSONS = {"DistributedDataParallel", "DataParallel", "autocast", "GradScaler"}
LESSONS |= {"fully_shard", "MixedPrecisionPolicy", "init_device_mesh", "full_tensor"}
LESSONS |= {"no_sync", "set_requires_gradient_sync"}


def source(stage):
    """Return the text of a stage's script."""
    return (ROOT / stage / "train.py").read_text()


def script(stage):
    """Return the lines of a stage's script."""
    return source(stage).splitlines()


def comment(line):
    """Return the comment in a line, without its #; "" if there is none."""
    return f"  {line.strip()}".partition("  # ")[2]


def code(lines):
    """Return what is left of lines without their comments, except blank lines."""
    found = [f"  {line.strip()}".partition("  # ")[0] for line in lines]
    return [line for line in found if line.strip()]


# ---- the patches ---------------------------------------------------------------------
def hunks(before, after):
    """Return the hunks of `diff -U3` as (first line in `after`, changed lines)."""
    found = []
    for line in list(difflib.unified_diff(before, after, n=3, lineterm=""))[2:]:
        if line.startswith("@@"):
            found.append((int(re.search(r"\+(\d+)", line)[1]), []))
        elif line[0] in "+-" and line[1:].strip():
            found[-1][1].append(line)
    return found


def hands_on_a_value(removed, added):
    """Whether all that lines of code gain is the name of one more argument."""
    before, after = (
        Counter(TOKEN.findall(" ".join(each))) for each in (removed, added)
    )
    gained = set(after - before) - {","}
    return not before - after and len(gained) == 1 and gained.pop().isidentifier()


def flag_lines(stage):
    """Return the lines of a script's calls of add_argument, which have a help text."""
    found = set()
    for node in ast.walk(ast.parse(source(stage))):
        if isinstance(node, ast.Call) and dotted(node.func) == "parser.add_argument":
            found.update(script(stage)[node.lineno - 1 : node.end_lineno])
    return found


def without_a_reason(before, stage):
    """Return the hunks outside the header that do not say why, as text."""
    tag = f"[{registry()[stage].number}]"
    after = script(stage)
    earlier = {line for each in ancestors(stage) for line in script(each)}
    flags = flag_lines(before) | flag_lines(stage)
    first_banner = next(n for n, line in enumerate(after) if line.startswith("# ----"))
    found = []
    for start, lines in hunks(script(before), after):
        added = [line[1:] for line in lines if line[0] == "+"]
        removed = [line[1:] for line in lines if line[0] == "-"]
        says_why = any(tag in comment(line) for line in added)
        brought_back = bool(added) and earlier.issuperset(added)
        taken_away = not added and (
            any(TAG.search(line) for line in removed) or set(removed) <= set(after)
        )
        only_flags = flags.issuperset([*added, *removed])
        only_comments = code(added) == code(removed)
        handed_on = hands_on_a_value(code(removed), code(added))
        if start > first_banner and not (
            says_why
            or brought_back
            or taken_away
            or only_flags
            or only_comments
            or handed_on
        ):
            found.append("\n".join(lines))
    return found


@pytest.mark.parametrize("before, stage", steps())
def test_every_hunk_says_why(before, stage):
    """Outside the header, each hunk of `diff -U3` has a comment with the stage's tag.

    There are five others: a flag, which has a help text; an older comment that is
    reworded or dropped; lines of an earlier stage that come back word for word; a hunk
    that only removes, which cannot have a comment: it takes an earlier lesson away, or
    its lines are now in another place; one that only hands a value on, to where it is
    used.
    """
    assert without_a_reason(before, stage) == []


@pytest.mark.parametrize("stage", stages())
def test_a_tag_has_words_and_names_the_stage_or_one_that_it_builds_on(stage):
    numbers = {registry()[name].number for name in [stage, *ancestors(stage)]}
    _, *body = script(stage)  # the first line is the title
    for line in body:
        if tags := TAG.findall(line):
            assert re.match(r"\[\d\d\] \S", comment(line)), line
            assert numbers.issuperset(tags), line


# ---- the form ------------------------------------------------------------------------
@pytest.mark.parametrize("stage", stages())
def test_six_banners_in_order(stage):
    banners = [line for line in script(stage) if line.startswith("# ----")]
    assert [banner.strip("# -") for banner in banners] == TITLES
    assert {len(banner) for banner in banners} == {88}


@pytest.mark.parametrize("stage", stages())
def test_the_docstring_gives_the_title_and_the_commands(stage):
    title, empty, *commands = ast.get_docstring(ast.parse(source(stage))).split("\n")
    assert re.match(rf"\[{registry()[stage].number}\] [A-Z].*\.$", title) and not empty
    assert commands == registry()[stage].commands


# ---- common/ -------------------------------------------------------------------------
def dotted(node):
    """Return an expression like a.b.c as text; "" for any other."""
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def lessons_in(source):
    """Return what a file imports or calls of the things that the stages teach."""
    found = set()
    for node in ast.walk(ast.parse(source.replace("dist.", "torch.distributed."))):
        if isinstance(node, ast.Import):
            # `as dist`: then the calls decide
            names = [alias.name for alias in node.names if alias.asname != "dist"]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = [dotted(node.func)]
        else:
            continue
        for name in names:
            of_torch = f"{name}.".startswith("torch.distributed.")
            if of_torch or LESSONS & set(name.split(".")):
                found.add(name)
    return found


def test_common_holds_no_lesson():
    """Its imports and calls decide, and not its words: a docstring may say DDP."""
    assert (ROOT / "common/__init__.py").read_text() == ""
    for file in sorted((ROOT / "common").glob("*.py")):
        assert lessons_in(file.read_text()) == set(), file.name
    found = set().union(*(lessons_in(source(each)) for each in stages()))
    assert {"torch.distributed.all_reduce", "torch.autocast"} <= found
    assert {word for name in found for word in name.split(".")} >= LESSONS
