"""A stage and common/, copied into an empty folder, run from anywhere."""

import shutil

from tests.running import run
from tools.stages import ROOT
from tools.stages import command
from tools.stages import stages
from tools.stages import takes_processes

import pytest


@pytest.mark.parametrize("stage", stages())
def test_a_copied_stage_runs_from_elsewhere(stage, tmp_path, device, several):
    project = tmp_path / "project"
    (project / stage).mkdir(parents=True)
    shutil.copy(ROOT / stage / "train.py", project / stage)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "common", project / "common", ignore=ignore)
    processes = several if takes_processes(stage) else 1
    flags = ["--epochs", "1", "--device", device]
    # Another package of the name `common`, found first by whoever looks at the working folder.
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").write_text("raise ImportError('the wrong common')")
    done = run([*command(stage, processes, project), *flags], tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: " in done.stdout
