"""CONTRIBUTING.md: stages.toml is the one list of the stages, and of their features."""

import re

from harness.stages import ROOT
from harness.stages import notebooks
from harness.stages import parts
from harness.stages import registry
from harness.stages import stages

TOML = (ROOT / "stages.toml").read_text()


def test_the_stages_are_the_folders_and_have_numbers_without_a_gap():
    folders = [path.name for path in ROOT.glob("[0-9][0-9]_*") if path.is_dir()]
    assert stages() == sorted(folders)
    numbers = [int(stage.number) for stage in registry().values()]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert [s for s in stages() if registry()[s].builds_on is None] == stages()[:1]
    assert [stage.name for part in parts().values() for stage in part] == stages()


def test_the_notebooks_are_those_of_the_folders():
    found = sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb"))
    assert sorted(notebooks()) == found
    assert {*found}.issuperset(ROOT / stage / f"{stage}.ipynb" for stage in stages())


def test_the_features_are_those_that_stages_toml_explains():
    explained = re.findall(r"^# {15}(\w[\w, ]*?)  ", TOML, re.MULTILINE)
    explained = {word for words in explained for word in words.split(", ")}
    assert explained == set().union(*(s.features for s in registry().values()))
