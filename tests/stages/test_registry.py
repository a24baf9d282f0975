"""stages.toml is true: CONTRIBUTING.md calls it the one list of the stages."""

import re

import pytest

from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import notebooks
from harness.stages import parts
from harness.stages import plain_command
from harness.stages import registry
from harness.stages import span
from harness.stages import stages
from harness.stages import with_feature

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
    found = [path for path in found if ".zh-CN" not in path.name]
    assert sorted(notebooks()) == found and len(found) > len(stages())
    names = [stage.name for part in parts().values() for stage in part]
    assert names == stages() and None not in parts()
    begin = [part[0] for part in parts().values()]
    assert [s for s in registry().values() if s.part] == begin


def test_the_features_are_those_that_stages_toml_explains():
    explained = re.findall(r"^# {15}(\w[\w, ]*?)  ", TOML, re.MULTILINE)
    explained = {word for words in explained for word in words.split(", ")}
    assert explained == set().union(*(s.features for s in registry().values()))


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
