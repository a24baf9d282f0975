"""stages.toml is true, and one more stage needs an entry in it, and its folder."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import known_files
from harness.stages import notebooks
from harness.stages import parts
from harness.stages import plain_command
from harness.stages import registry
from harness.stages import span
from harness.stages import stages
from harness.stages import with_feature
from tests.training import replace_once
from tools.zh import translations

TOML = (ROOT / "stages.toml").read_text()
NUMBERS = [stage.number for stage in registry().values()]


# ---- stages.toml ---------------------------------------------------------------------
def test_the_stages_are_the_folders_and_have_numbers_without_a_gap():
    folders = [path.name for path in ROOT.glob("[0-9][0-9]_*") if path.is_dir()]
    assert stages() == sorted(folders)
    assert [*map(int, NUMBERS)] == [n for n, _ in enumerate(stages(), 1)]


@pytest.mark.parametrize("stage", stages())
def test_a_stage_has_its_files_and_builds_on_another(stage):
    for name in ("train.py", f"{stage}.ipynb"):
        assert (ROOT / stage / name).is_file()
    first, *_ = stages()
    assert (registry()[stage].builds_on is None) == (stage == first)
    assert all(stage in command for command in registry()[stage].commands)
    assert plain_command(stage).split()[0] in ("python", "torchrun")


def test_the_notebooks_are_those_of_the_folders_and_the_parts_have_all_stages():
    found = sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb"))
    found = [path for path in found if path not in translations()]
    assert sorted(notebooks()) == found and len(found) > len(stages())
    names = [stage.name for part in parts().values() for stage in part]
    assert names == stages() and None not in parts()
    begin = [part[0] for part in parts().values()]
    assert [s for s in registry().values() if s.part or s.part_zh] == begin
    assert all(stage.part_zh for stage in begin)


def test_the_features_are_those_that_stages_toml_explains():
    explained = re.findall(r"^# {15}(\w[\w, ]*?)  ", TOML, re.MULTILINE)
    explained = {word for words in explained for word in words.split(", ")}
    assert explained == set().union(*(s.features for s in registry().values()))


def test_nothing_is_left_to_be_written():
    """`make new-stage` marks it, in the stage's files and in stages.toml."""
    written = ("/train.py", "/solutions.py", ".ipynb", "stages.toml")
    names = [name for name in known_files() if name.endswith(written)]
    assert len(names) > 3 * len(stages())
    left = [name for name in names if "TODO" in text_of(name)]
    assert not left, f"TODO in {', '.join(left)}"


def test_tests_choose_stages_by_each_feature():
    """Otherwise a feature proves nothing."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for feature in set().union(*(s.features for s in registry().values())):
        assert f'"{feature}"' in tests, f"no test asks for the feature {feature}"


def test_an_unknown_key_feature_or_stage_is_an_error(tmp_path):
    path = tmp_path / "stages.toml"
    path.write_text(TOML.replace("teaches =", "teeches ="))
    with pytest.raises(TypeError, match="teeches"):
        registry(tmp_path)
    path.write_text(TOML.replace('builds_on = "', 'builds_on = "x'))
    with pytest.raises(ValueError, match="builds on x"):
        registry(tmp_path)
    with pytest.raises(ValueError, match="'checkpoint'"):
        with_feature("amp", "checkpoint")
    with pytest.raises(ValueError, match="amps"):
        with_feature(without=("amps",))


# ---- harness/stages.py ---------------------------------------------------------------
def test_some_stages_as_words():
    one, two, three, four, *others = stages()
    numbers = dict(zip(stages(), NUMBERS, strict=True))
    assert span(stages()) == "all"
    assert span([one]) == numbers[one]
    assert span([three, one, two]) == f"{numbers[one]} to {numbers[three]}"
    wanted = f"{numbers[one]}, from {numbers[four]} on"
    assert span([one, four, *others]) == wanted


def test_a_command_is_shown_for_the_number_of_processes_that_it_starts():
    for feature, flag in (("torchrun", "--nproc-per-node=3"), ("spawn", "--nproc=3")):
        stage = first_with(feature)
        words = plain_command(stage, 3).split()
        assert flag in words and f"{stage}/train.py" in words
    stage = first_with("images")
    assert plain_command(stage, 3) == registry()[stage].command


def text_of(name):
    """Return the text of a file; of a notebook, that of its cells' sources."""
    text = (ROOT / name).read_text()
    if not name.endswith(".ipynb"):
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


# ---- one more stage ------------------------------------------------------------------
def fill_in(root, new):
    """Write what `make new-stage` leaves to a person, in a copy of this repository."""
    line = f'    print(end="")  # [{new[:2]}] otherwise nothing is different\n'
    end = "    main()\n"
    title = ("] TODO", "] A stage that prints nothing.")
    replace_once(root / new / "train.py", title, (f":\n{end}", f":\n{line}{end}"))
    mistakes = "".join(
        f'    ("{new[:2]} exercise {n}", "= {n}", "= 0", "what is wrong"),\n'
        for n in (1, 2)
    )
    start = "MISTAKES = [\n"
    replace_once(
        root / "tests/stages/test_notebook_exercises.py", (start, start + mistakes)
    )
    files = (f"{new}/{new}.ipynb", f"{new}/solutions.py", "stages.toml")
    for path in (root / name for name in files):
        path.write_text(path.read_text().replace("TODO", "nothing"))
    words = ["python", "-m", "tools.notebooks", "--show", f"{new}/{new}.ipynb"]
    commands.run(words, cwd=root)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_one_more_stage_needs_its_folder_and_stages_toml_only(tmp_path):
    """`make new-stage` and a line: `make check` passes, and the stage has its tests."""
    root = tmp_path / "copy"
    for name in known_files():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    new = f"{len(stages()) + 1:02}_one_more"
    own = f"PY={sys.executable}"
    first = ["make", "new-stage", f"NAME={new}", own]
    commands.run(first, tmp_path / "new", cwd=root, seconds=300)
    done = commands.run(first, tmp_path / "again", cwd=root, code=2)
    assert f"{new}: the next stage is named" in done.stderr
    fill_in(root, new)
    for target in ("pages", "check"):
        commands.run(["make", target, own], tmp_path / target, cwd=root, seconds=1500)
    for module in ("same_weights", "resume", "preemption", "bad_input"):
        words = [f"tests/stages/test_{module}.py", "--release", "--collect-only", "-q"]
        collected = commands.run(["python", "-m", "pytest", *words], cwd=root).stdout
        assert f"[{new}" in collected or f"-{new}" in collected, module
