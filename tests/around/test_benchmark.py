"""benchmarks/README.md shows what was measured, by what `make benchmark` measures."""

import json
import sys

import pytest

from benchmarks import compare
from benchmarks.report import show
from harness.commands import run
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import with_feature

HERE = ROOT / "benchmarks"
PAGE = (HERE / "README.md").read_text()


@pytest.mark.release
def test_stages_are_measured_against_the_limit(several, device, tmp_path):
    stages = [first_with("images"), first_with("torchrun")]
    flags = f"--data digits --epochs 2 --processes {several} --device {device}"
    file = tmp_path / "results.json"
    done = run(f"python -m benchmarks.compare {' '.join(stages)} {flags} --json {file}")
    result = json.loads(file.read_text())
    assert done.stdout == show(result) + "\n"
    assert [row["stage"] for row in result["stages"]] == stages
    for row in result["stages"]:
        for name in ("images_per_s", "limit_images_per_s", "evaluation_s", "loading"):
            assert 0 < row[name]["least"] <= row[name]["median"] <= row[name]["most"]


@pytest.mark.parametrize("name", ["two_cores", "one_h100", "one_h100_text"])
def test_the_readme_shows_what_is_stored(name):
    result = json.loads((HERE / f"{name}.json").read_text())
    assert f"```\n{show(result)}\n```" in PAGE
    measured = {row["stage"] for row in result["stages"]}
    assert name != "two_cores" or measured == {*with_feature("images")}


def test_the_readme_shows_what_is_stored_of_the_probe():
    stored = [(HERE / f"one_{name}_probe.txt").read_text() for name in ("h200", "h100")]
    assert all(f"```\n{text.strip()}\n```" in PAGE for text in stored)


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--epochs", "1"], "--epochs"),
        (["--processes", "2", "--batch-size", "61"], "--batch-size 61"),
        (["08"], "there is no stage 08; the stages are"),
    ],
)
def test_bad_input_gets_one_line(flags, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [compare.__file__, *flags])
    with pytest.raises(SystemExit, match="^2$"):
        compare.main()
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("compare.py: error: ") and named in line
    assert printed.out == ""
