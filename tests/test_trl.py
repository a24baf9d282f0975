"""TRL trains by GRPO on two processes, as its page says; `make trl` runs this."""

import re

import pytest

from nbtools import harness
from tests.neighbors_harness import Neighbor
from tests.neighbors_harness import docstring
from tools.stages import ROOT

PAGE = (ROOT / "docs/other_libraries.md").read_text()
NOT_DIVISIBLE = "generation_batch_size (16) must be divisible by num_generations (3)"
RISES = 'text.count("a") / max(len(text), 1)'


@pytest.fixture(scope="module")
def trl():
    return Neighbor("trl")


def train(trl, folder, script=None, code=0):
    """Train by the command that the program shows; return its Done.

    script: another one in the program's place; code: the exit code that it should have.
    """
    _, *options, shown = docstring("trl_train.py")[0]
    words = [trl.environment / "bin/python", *options, script or ROOT / shown]
    variables = {"HOME": folder, "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
    return harness.run(words, folder, code, **variables)


def test_trl_trains_on_two_processes(trl, tmp_path, record_property):
    """The reward rises, and both processes have the same weights."""
    record_property("tested with", trl.version("trl"))
    screen = train(trl, tmp_path).stdout
    _, printed = docstring("trl_train.py")
    pattern = "\n".join(".*".join(map(re.escape, s.split("..."))) for s in printed)
    assert re.fullmatch(pattern + "\n", screen), screen


def test_a_reward_that_is_always_the_same_teaches_nothing(trl, tmp_path):
    script = trl.changed(tmp_path / "project", (RISES, "1.0"))
    assert "AssertionError: rewards: 1.0, 1.0" in train(trl, tmp_path, script, 1).stderr


def test_completions_that_make_no_whole_groups(trl, tmp_path):
    change = ("num_generations=4", "num_generations=3")
    script = trl.changed(tmp_path / "project", change)
    assert f"ValueError: {NOT_DIVISIBLE}" in train(trl, tmp_path, script, 1).stderr
    assert f"`ValueError: {NOT_DIVISIBLE}`" in PAGE


def test_the_defaults_of_the_page(trl):
    names = ["learning_rate", "lr_scheduler_type", "beta", "use_vllm", "vllm_mode"]
    code = "from trl import GRPOConfig as g; f = g.__dataclass_fields__\n"
    code += f"print(*(f[name].default for name in {names}))"
    done = harness.run([trl.environment / "bin/python", "-c", code])
    assert done.stdout.splitlines()[-1] == "1e-06 linear 0.0 False colocate"
