"""The stages form a chain: each script is a small patch on the one before it."""

import argparse
import ast
import difflib
import re

import pytest
from torch.distributed.run import get_args_parser

from common import args as common_args
from tests.harness import LAUNCHED
from tests.harness import load_stage
from tools.stages import ROOT
from tools.stages import changed_lines
from tools.stages import launcher
from tools.stages import shown_commands
from tools.stages import stages
from tools.stages import trains_on_text

STAGES = stages()
STEPS = list(zip(STAGES, STAGES[1:], strict=False))
TITLES = [
    "1. flags",
    "2. processes",
    "3. data",
    "4. one training epoch",
    "5. evaluation",
    "6. the run",
]
BUDGET = 60
OWN_FLAGS = {"--nproc"}  # a launcher's own: it goes when another launcher comes
TAG = re.compile(r"\[\d\d\]")
# What the stages teach, and what common/ must therefore neither use nor hide.
LESSONS = {"DistributedDataParallel", "DataParallel", "autocast", "GradScaler"}
LESSONS |= {"fully_shard", "MixedPrecisionPolicy", "init_device_mesh", "full_tensor"}
LESSONS |= {"no_sync", "set_requires_gradient_sync"}
# It reads and writes files, as common/ does for the stages.
PLUMBING = "torch.distributed.checkpoint."


def script(stage):
    """Return the lines of a stage's script."""
    return (ROOT / stage / "train.py").read_text().splitlines()


def comment(line):
    """Return the comment in a line, without its #; "" if there is none."""
    return f"  {line.strip()}".partition("  # ")[2]


def hunks(before, after):
    """Return the hunks of `diff -U3` as (first line in `after`, changed lines)."""
    found = []
    for line in list(difflib.unified_diff(before, after, n=3, lineterm=""))[2:]:
        if line.startswith("@@"):
            found.append((int(re.search(r"\+(\d+)", line)[1]), []))
        elif line[0] in "+-" and line[1:].strip():
            found[-1][1].append(line)
    return found


def flag_lines(lines):
    """Return the lines of a script's calls of add_argument, which have a help text."""
    found = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Call) and dotted(node.func) == "parser.add_argument":
            found.update(lines[node.lineno - 1 : node.end_lineno])
    return found


def without_a_reason(stage):
    """Return the hunks outside the header that do not say why, as text."""
    number = STAGES.index(stage)
    before, after = script(STAGES[number - 1]), script(stage)
    earlier = {line for one in STAGES[:number] for line in script(one)}
    flags = flag_lines(before) | flag_lines(after)
    first_banner = next(n for n, line in enumerate(after) if line.startswith("# ----"))
    found = []
    for start, lines in hunks(before, after):
        added = [line[1:] for line in lines if line[0] == "+"]
        removed = [line[1:] for line in lines if line[0] == "-"]
        says_why = any(f"[{stage[:2]}]" in comment(line) for line in added)
        brought_back = bool(added) and earlier.issuperset(added)
        taken_away = not added and (
            any(TAG.search(line) for line in removed) or set(removed) <= set(after)
        )
        only_flags = flags.issuperset([*added, *removed])
        if start > first_banner and not (
            says_why or brought_back or taken_away or only_flags
        ):
            found.append("\n".join(lines))
    return found


def dotted(node):
    """Return an expression like a.b.c as text; "" for any other."""
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def flags_of(stage, monkeypatch):
    """Return the flags that a stage's parser knows."""
    module, found = load_stage(stage), set()

    def look(parser, *_, **__):
        for action in parser._actions:
            found.update(action.option_strings)
        raise SystemExit

    monkeypatch.setattr(common_args.ArgumentParser, "parse_args", look)
    with pytest.raises(SystemExit):
        module.parse_args()
    return found - {"-h", "--help"}


def test_stages_are_numbered_without_a_gap():
    assert len(STAGES) >= 10
    assert [int(stage[:2]) for stage in STAGES] == list(range(1, len(STAGES) + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_six_banners_in_order(stage):
    banners = [line for line in script(stage) if line.startswith("# ----")]
    assert [banner.strip("# -") for banner in banners] == TITLES
    assert {len(banner) for banner in banners} == {88}


@pytest.mark.parametrize("stage", STAGES)
def test_docstring_gives_title_and_command(stage):
    title, empty, *_ = ast.get_docstring(ast.parse("\n".join(script(stage)))).split(
        "\n"
    )
    assert re.match(rf"\[{stage[:2]}\] [A-Z].*\.$", title) and not empty
    assert all(stage in command for command in shown_commands(stage))
    assert f"{stage}/train.py" in shown_commands(stage)[-1]


@pytest.mark.parametrize("before, after", STEPS)
def test_a_step_changes_at_most_60_lines(before, after):
    """Outside docstring and help texts; README counts with the same function."""
    assert 0 < changed_lines(before, after) <= BUDGET


@pytest.mark.parametrize("stage", STAGES[1:])
def test_every_hunk_says_why(stage):
    """Outside the header, each hunk of `diff -U3` has a comment with the stage's tag.

    There are three others: a flag, which has a help text; lines of an earlier stage
    that come back word for word; a hunk that only removes, which cannot have a comment:
    it takes an earlier lesson away, or its lines are now in another place.
    """
    assert without_a_reason(stage) == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_tag_has_words_and_is_inherited_or_the_stages_own(stage):
    number = STAGES.index(stage)
    inherited = {comment(line) for one in STAGES[:number] for line in script(one)}
    _, *body = script(stage)  # the first line is the title
    for line in body:
        tags = TAG.findall(line)
        if tags:
            assert re.match(r"\[\d\d\] \S", comment(line)), line
            assert tags == [f"[{stage[:2]}]"] or comment(line) in inherited, line


@pytest.mark.parametrize("before, after", STEPS)
def test_inherited_lines_keep_their_comments(before, after):
    """Neither a comment at a line's end nor the one above it changes alone."""
    old, new = (comments_of(script(stage)) for stage in (before, after))
    shared = old.keys() & new.keys()
    assert len(shared) > 50
    for code in shared:
        assert set(old[code]) <= set(new[code]), code


def comments_of(lines):
    """Return {line of code: its comments} for the lines that a script has once."""
    found, pending, seen = {}, [], set()
    for line in lines:
        if line.lstrip().startswith("# ") and not line.startswith("# ----"):
            pending.append(comment(line))
        elif line.strip():
            code = line.partition("  # ")[0].strip()
            found[code] = [*pending, *filter(None, [comment(line)])]
            if code in seen:
                del found[code]
            seen.add(code)
            pending = []
    return found


def data_flags(parser_class):
    """Return the flags of the data and the model: they go when other data come."""
    parser = argparse.ArgumentParser(add_help=False)
    parser_class.add_data_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("before, after", STEPS)
def test_a_stage_has_the_flags_of_the_one_before(before, after, monkeypatch):
    old = flags_of(before, monkeypatch) - OWN_FLAGS
    new = flags_of(after, monkeypatch)
    kinds = [
        common_args.TextArgumentParser
        if trains_on_text(stage)
        else common_args.ArgumentParser
        for stage in (before, after)
    ]
    assert data_flags(kinds[1]) <= new
    if kinds[0] != kinds[1]:
        assert new.isdisjoint(data_flags(kinds[0]))
        old -= data_flags(kinds[0])
    assert len(old) >= 12
    assert old <= new


@pytest.mark.parametrize("stage", [s for s in STAGES if launcher(s) == "torchrun"])
def test_torchrun_takes_none_of_the_flags_for_its_own(stage, monkeypatch):
    actions = get_args_parser()._actions
    theirs = [flag for action in actions for flag in action.option_strings]
    for flag in flags_of(stage, monkeypatch):
        assert not any(other.startswith(flag) for other in theirs), flag


def test_some_stages_are_launched_by_torchrun_and_some_launch_themselves():
    assert {launcher(stage) for stage in LAUNCHED} == {"torchrun", "python"}


@pytest.mark.parametrize("stage", STAGES)
def test_one_line_finds_common_and_third_party_imports_come_first(stage):
    line = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
    assert script(stage).count(line) == 1
    found = script(stage).index(line) + 1
    imports = [
        (node.lineno, node.module if isinstance(node, ast.ImportFrom) else alias.name)
        for node in ast.parse("\n".join(script(stage))).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    for number, name in imports:
        assert (number > found) == (name.split(".")[0] == "common"), name


@pytest.mark.parametrize("stage", STAGES)
def test_no_line_is_longer_than_88_columns(stage):
    assert max(map(len, script(stage))) <= 88


def lessons_in(source):
    """Return what a file imports or calls of the things that the stages teach."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = [dotted(node.func)]
        else:
            continue
        found += [
            name
            for name in names
            if (
                f"{name}.".startswith("torch.distributed.")
                and not name.startswith(PLUMBING)
            )
            or LESSONS & set(name.split("."))
        ]
    return found


def test_common_holds_no_lesson():
    """Its imports and calls decide, and not its words: a docstring may say DDP."""
    files = sorted((ROOT / "common").glob("*.py"))
    assert len(files) >= 8
    assert (ROOT / "common/__init__.py").read_text() == ""
    for file in files:
        assert lessons_in(file.read_text()) == [], file.name
    stage = "\n".join(script(STAGES[-1])).replace("dist.", "torch.distributed.")
    found = lessons_in(stage)
    assert {"torch.distributed.all_reduce", "torch.autocast"} <= set(found)
    words = {word for name in found for word in name.split(".")}
    assert words >= LESSONS - {"DistributedDataParallel", "DataParallel", "no_sync"}
