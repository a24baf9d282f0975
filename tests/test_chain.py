"""The stages form a chain: each script is a small patch on the one before it."""

import ast
import difflib
import importlib.util
import re

from nbtools.lesson import HEAD
from nbtools.lesson import sections
from tools.stages import ROOT
from tools.stages import launcher
from tools.stages import shown_commands
from tools.stages import stages
from tools.stages import takes_processes

import pytest
from torch.distributed.run import get_args_parser

STAGES = stages()
STEPS = list(zip(STAGES, STAGES[1:], strict=False))
TITLES = [
    HEAD,
    "1. flags",
    "2. processes",
    "3. data",
    "4. one training epoch",
    "5. evaluation",
    "6. the run",
]
OWN_FLAGS = {"--nproc"}  # a launcher's own: it goes when another launcher comes
BUDGET = 45


def text(stage):
    return (ROOT / stage / "train.py").read_text()


def comment(line):
    """Return the comment at the end of a line, or the whole line if it has none."""
    return line.partition("  # ")[2] or line


def changed(old, new, context=0):
    """Return the unified diff of two stages' scripts, without its two lines of file names."""
    old, new = text(old).splitlines(), text(new).splitlines()
    return list(difflib.unified_diff(old, new, n=context, lineterm=""))[2:]


def load(stage):
    """Return a stage's script as a module, without running it."""
    spec = importlib.util.spec_from_file_location(f"stage_{stage}", ROOT / stage / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags_of(stage, monkeypatch):
    """Return the flags that a stage's parser knows."""
    module, found = load(stage), set()

    def look(parser, *_, **__):
        found.update(flag for action in parser._actions for flag in action.option_strings)
        raise SystemExit

    monkeypatch.setattr(module.flags.Flags, "parse_args", look)
    with pytest.raises(SystemExit):
        module.parse_args()
    return found - {"-h", "--help"}


def test_the_stages_found_are_numbered_without_a_gap():
    assert len(STAGES) >= 4
    assert [int(stage[:2]) for stage in STAGES] == list(range(1, len(STAGES) + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_sections_stand_in_order_with_the_same_banners(stage):
    assert list(sections(stage)) == TITLES
    banners = [line for line in text(stage).splitlines() if line.startswith("# ---- ")]
    assert banners == [line for line in text(STAGES[0]).splitlines() if line.startswith("# ---- ")]


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_lines_give_title_and_command(stage):
    title, *_ = ast.get_docstring(ast.parse(text(stage))).splitlines()
    assert re.match(rf"\[{stage[:2]}\] [A-Z].*\.$", title)
    assert all(stage in command for command in shown_commands(stage))
    assert f"{stage}/train.py" in shown_commands(stage)[-1]


@pytest.mark.parametrize("before, after", STEPS)
def test_a_step_changes_at_most_45_lines(before, after):
    lines = [line for line in changed(before, after) if line[0] in "+-"]
    assert 0 < len(lines) <= BUDGET


@pytest.mark.parametrize("before, after", STEPS)
def test_every_change_bears_its_stages_tag_and_no_other(before, after):
    """Outside the imports, each hunk of `diff -u` holds the tag; no line brings a foreign one.

    A hunk that adds nothing takes an earlier lesson away: it removes a line with that one's tag.
    A line that moves keeps its comment, word for word, and so an earlier tag.
    """
    tag = f"[{after[:2]}]"
    inherited = {comment(line) for line in text(before).splitlines()}
    hunks, first_banner = [], text(after).splitlines().index(TITLE_LINE)
    for line in changed(before, after, context=3):
        if line.startswith("@@"):
            hunks.append((int(re.search(r"\+(\d+)", line)[1]), []))
        else:
            hunks[-1][1].append(line)
    assert hunks
    for start, lines in hunks:
        added = [line for line in lines if line.startswith("+")]
        if start > first_banner and added:
            assert any(tag in line for line in added), "\n".join(lines)
        elif start > first_banner:
            assert any(re.match(r"-.*\[\d\d\]", line) for line in lines), "\n".join(lines)
        new = [line for line in added if comment(line) not in inherited]
        tags = {found for line in new for found in re.findall(r"\[\d\d\]", line)}
        assert tags <= {tag}, "\n".join(lines)


TITLE_LINE = next(line for line in text(STAGES[0]).splitlines() if line.startswith("# ---- 1"))


@pytest.mark.parametrize("before, after", STEPS)
def test_an_inherited_line_keeps_its_tag(before, after):
    """No line differs from one of the stage before in nothing but its comment."""
    comments = {"-": {}, "+": {}}
    for line in changed(before, after):
        if line[0] in comments:
            code, _, comment = line[1:].partition("  # ")
            comments[line[0]].setdefault(code, comment)
    for code in comments["-"].keys() & comments["+"].keys():
        assert comments["-"][code] == comments["+"][code], code


@pytest.mark.parametrize("before, after", STEPS)
def test_a_stage_has_the_flags_of_the_one_before(before, after, monkeypatch):
    old = flags_of(before, monkeypatch) - OWN_FLAGS
    assert len(old) >= 17
    assert old <= flags_of(after, monkeypatch)


@pytest.mark.parametrize("stage", [s for s in STAGES if launcher(s) == "torchrun"])
def test_torchrun_swallows_none_of_the_flags(stage, monkeypatch):
    theirs = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    for flag in flags_of(stage, monkeypatch):
        assert not any(other.startswith(flag) for other in theirs), flag


def test_some_stage_is_launched_by_torchrun_and_some_by_itself():
    launched = [launcher(stage) for stage in STAGES if takes_processes(stage)]
    assert {"torchrun", "python"} <= set(launched)


def test_common_knows_no_processes():
    files = sorted((ROOT / "common").glob("*.py"))
    assert len(files) >= 8
    assert (ROOT / "common/__init__.py").read_text() == ""
    for file in files:
        words = re.findall(r"torch\.distributed|\bRANK\b|DataParallel|autocast", file.read_text())
        assert not words, f"{file.name}: {words}"


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_line_finds_common(stage):
    line = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
    assert text(stage).splitlines().count(line) == 1
