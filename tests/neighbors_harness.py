"""What the tests of the programs in recipes/neighbors share."""

import ast
import os
import shlex
import shutil

import pytest

from nbtools import harness
from nbtools.weights import max_abs_diff
from tests.training import DOUBLE
from tests.training import replace_once
from tests.training import train_in_forks
from tools.stages import ROOT
from tools.stages import first_with

STAGE = first_with("ddp")
FOLDER = ROOT / "recipes/neighbors"
FLAGS = (*DOUBLE, "--device", "cpu")


def docstring(program):
    """Return a program's last command as words, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / program).read_text()))
    shown = text.replace("\\\n", "").split("$ ")[-1]
    command, *printed = shown.splitlines()
    return shlex.split(command), printed


def train_stage_03(trained, *flags):
    """Train stage 03 on two processes with DOUBLE; return its Done.

    trained: the fixture.
    """
    return trained(STAGE, 2, *DOUBLE, *flags, how=train_in_forks)


def assert_trains_as_stage_03(done, folder, trained, prefix=""):
    """Assert that a run printed and trained what stage 03 does.

    done: the run's Done, in lines that begin with `prefix`; folder: where its `out` is.
    """
    reference = train_stage_03(trained)
    assert max_abs_diff(reference.weights, folder / "out/last.pt") <= 1e-10
    shown = [line.partition(", val")[0] for line in reference.epochs]
    assert done.stdout.splitlines() == [prefix + line for line in shown]


def assert_trains_other_weights(folder, trained):
    """Assert that the weights in `folder`/out are not those of stage 03."""
    reference = train_stage_03(trained)
    assert max_abs_diff(reference.weights, folder / "out/last.pt") > 1e-6


class Neighbor:
    """A library in .venv-NAME, and the program NAME_train.py that uses it.

    `make NAME` makes the environment. Without it, the tests that ask for the library
    are skipped, or fail if REQUIRE_NEIGHBORS is set.
    """

    def __init__(self, name):
        self.environment = ROOT / f".venv-{name}"
        self.script = f"recipes/neighbors/{name}_train.py"
        if not (self.environment / "installed").exists():
            assert "REQUIRE_NEIGHBORS" not in os.environ, f"type: make {name}"
            pytest.skip(f"{name} is not installed; type: make {name}")

    def version(self, package):
        """Return "PACKAGE VERSION" as the environment imports it."""
        code = f"import {package}, torch; print({package}.__version__)"
        done = harness.run([self.environment / "bin/python", "-c", code])
        return f"{package} {done.stdout.strip()}"

    def command(self, shown):
        """Return the words of a command that the program's docstring shows."""
        assert f"\n$ {shown}\n" in (ROOT / self.script).read_text()
        return shown.split()

    def changed(self, folder, *replacements):
        """Copy the program and common/, and replace texts that are there once."""
        script = folder / self.script
        script.parent.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "common", folder / "common", ignore=ignored)
        replace_once(ROOT / self.script, *replacements, target=script)
        return script
