"""What the tests of the neighbors with an environment of their own share."""

import os
import shutil

import pytest

from nbtools.lesson import max_abs_diff
from tests import harness
from tests.harness import ROOT

FOLDER = "recipes/neighbors"
DOUBLE = ("--dtype", "float64", "--epochs", "2", "--device", "cpu")


class Neighbor:
    """A library in .venv-NAME, and the program NAME_train.py that uses it.

    `make NAME` makes the environment. Without it, the tests that ask for the library
    are skipped, or fail if REQUIRE_NEIGHBORS is set.
    """

    def __init__(self, name):
        self.environment = ROOT / f".venv-{name}"
        self.python = self.environment / "bin/python"
        self.script = f"{FOLDER}/{name}_train.py"
        if not (self.environment / "installed").exists():
            assert "REQUIRE_NEIGHBORS" not in os.environ, f"type: make {name}"
            pytest.skip(f"{name} is not installed; type: make {name}")

    def version(self, package, folder):
        """Return the version of a package that the environment imports."""
        code = f"import {package}, torch; print({package}.__version__)"
        done = harness.run([self.python, "-c", code], folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def changed(self, folder, *replacements):
        """Copy the program and common/, and replace texts that are there once."""
        script = folder / self.script
        script.parent.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "common", folder / "common", ignore=ignored)
        harness.replace_once(ROOT / self.script, *replacements, target=script)
        return script


def assert_as_stage_03(neighbor, package, done, trained, folder, capsys, prefix=""):
    """Assert that a run printed and trained what stage 03 does; print how close.

    done: what `run` returned, in lines that begin with `prefix`; folder: where it ran.
    """
    assert done.returncode == 0, done.stdout + done.stderr
    off = difference_from_stage_03(trained, folder / "out/last.pt")
    version = neighbor.version(package, folder)
    with capsys.disabled():
        print(f"\n{package} {version}: largest difference of the weights {off:.1e}")
    assert off <= 1e-10
    reference = trained("03_ddp_launch", 2, *DOUBLE[:-2], how=harness.train_in_forks)
    shown = [line.partition(", val")[0] for line in reference.epochs]
    assert done.stdout.splitlines() == [prefix + line for line in shown]


def difference_from_stage_03(trained, weights, *flags):
    """Return the largest difference of weights from those of stage 03, two epochs.

    trained: the fixture; weights: a file.
    """
    stage = ("03_ddp_launch", 2, *DOUBLE[:-2], *flags)
    done = trained(*stage, how=harness.train_in_forks)
    return max_abs_diff(done.weights, weights)
