"""A replica group dies, and the other trains on; `make torchft` runs this."""

import json
import re

import pytest

from nbtools import harness
from tests.neighbors_harness import Neighbor
from tests.neighbors_harness import docstring
from tools.stages import ROOT

REQUIREMENTS = ROOT / "recipes/neighbors/requirements-torchft.txt"
NOTEBOOK = ROOT / "09_resume/elastic_nodes.ipynb"
FORGETS_MOMENTUM = ('        optimizer.load_state_dict(state["optimizer"])\n', "")
AVERAGES_OVER_TWO = (
    "(batch_loss(model, step, group) / groups)",
    "(batch_loss(model, step, group) / 2)",
)


@pytest.fixture(scope="module")
def torchft():
    return Neighbor("torchft")


def run(torchft, folder, script=None):
    """Run the program by the command that it shows; return the lines that it prints."""
    (python, shown), _ = docstring("torchft_train.py")
    assert shown == torchft.script
    done = harness.run([ROOT / python, script or ROOT / shown], folder, TMPDIR=folder)
    return done.stdout.splitlines()


def but_when(lines):
    """Leave out the step in which group 1 is back: that depends on how soon it can."""
    return [re.sub(r"(took step|to) 1\d", r"\1 N", line) for line in lines]


def test_the_other_group_trains_on(torchft, tmp_path, record_property):
    """With the lines that the program and the notebook show."""
    (required,) = REQUIREMENTS.read_text().splitlines()[-1:]  # one fixed version
    record_property("tested with", required)
    _, printed = docstring("torchft_train.py")
    assert but_when(run(torchft, tmp_path)) == but_when(printed)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert "\n".join(printed) in "".join(
        line for cell in cells for line in cell["source"]
    )


@pytest.mark.parametrize(
    ("change", "off"),
    [(FORGETS_MOMENTUM, "those of group 1"), (AVERAGES_OVER_TWO, "one process")],
)
def test_a_changed_line_gives_other_weights(torchft, tmp_path, change, off):
    script = torchft.changed(tmp_path / "project", change)
    (line,) = [line for line in run(torchft, tmp_path, script) if off in line]
    assert float(line.split()[-1]) > 1e-6
