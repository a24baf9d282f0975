"""The benchmark: it measures what it says, and the README shows what it measured."""

import json
import re
import sys

import pytest
import torch

from benchmarks import compare
from benchmarks import compare_text
from benchmarks import limit
from benchmarks.report import compared
from benchmarks.report import show
from common import text
from common.model import SmallResNet
from harness.commands import run
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import with_feature

HERE = ROOT / "benchmarks"
PAGE = (HERE / "README.md").read_text()
FIRST = first_with("images")


def measure(command, folder):
    """Run a benchmark; return its result, which it must have shown, too."""
    done = run(f"python -m benchmarks.{command} --json {folder}/results.json")
    result = json.loads((folder / "results.json").read_text())
    assert done.stdout == show(result) + "\n"
    return result


def test_the_first_stage_is_measured_against_the_limit(device, tmp_path):
    flags = f"--data digits --epochs 3 --batch-size 48 --device {device}"
    result = measure(f"compare {FIRST} {flags}", tmp_path)
    (row,) = result["stages"]
    assert (row["stage"], row["processes"], row["precision"]) == (FIRST, 1, "float32")
    for name in ("images_per_s", "limit_images_per_s", "evaluation_s", "loading"):
        assert 0 < row[name]["least"] <= row[name]["median"] <= row[name]["most"], name
    assert row["loading"]["most"] < 1
    counted = result["counted"][FIRST]
    assert counted["per_step"] == {} and counted["waits_per_step"] == 0


@pytest.mark.release
def test_several_processes_and_other_libraries_are_measured(two, device, tmp_path):
    """A step sends the gradient, once; spawned processes are not counted."""
    stages = [first_with("torchrun"), first_with("spawn")]
    flags = f"--epochs 2 --processes {two} --device {device}"
    result = measure(f"compare {' '.join(stages)} {flags}", tmp_path)
    assert [row["stage"] for row in result["stages"]] == stages
    size = sum(4 * parameter.numel() for parameter in SmallResNet(3, 10).parameters())
    (counted,) = result["counted"].values()
    assert counted["per_step"] == {"all_reduce": {"calls": 1, "bytes": size}}
    names = {row["program"] for row in result["libraries"]}
    assert device == "cuda" or names == set(compare.LIBRARIES)


@pytest.mark.release
def test_language_models_are_compared_at_one_work(several, device, tmp_path):
    """FSDP2 with one block, which is gathered for forward and for backward."""
    stage = first_with("shards")
    flags = f"--width 8 --depth 1 --heads 2 --epochs 2 --device {device}"
    result = measure(f"compare_text {stage} {flags} --processes {several}", tmp_path)
    (row,) = result["stages"]
    assert row["processes"] == several and row["tokens_per_s"]["least"] > 0
    counted = result["counted"][stage]
    assert counted["per_step"]["all_gather"]["calls"] == 3
    assert counted["waits_per_step"] == 0


def test_an_epoch_of_text_has_ten_steps(tmp_path, monkeypatch):
    for batch_size, length in ((8, 16), (2, 1), (4, 1024)):
        words = ["--batch-size", str(batch_size), "--context-length", str(length)]
        monkeypatch.setattr(sys, "argv", [compare_text.__file__, *words])
        args = compare_text.parse_args()
        (tmp_path / "text").write_bytes(compare_text.text_of_ten_steps(args))
        train_set, _ = text.load(tmp_path / "text", length, seed=0)
        assert len(train_set) // batch_size == 10


def test_a_step_of_the_limit_trains_the_model_of_the_stages():
    """On one batch: its loss falls to nothing, and the gradient is that of its mean."""
    args = limit.parse_args("", ["--device", "cpu", "--dtype", "float64"])
    model, inputs, targets = limit.make_work(args, 8)
    assert type(model) is SmallResNet and inputs.dtype == torch.float64
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    step = limit.make_step(args, model, inputs, targets)
    losses = [step().item() for _ in range(30)]
    assert losses[0] == loss.item() and losses[-1] < losses[0] / 10


def test_what_overlaps_is_not_distinguishable():
    slow = {"median": 10.0, "least": 8.0, "most": 12.0}
    fast = {"median": 20.0, "least": 12.5, "most": 21.0}
    assert compared(fast, slow) == "2.00"
    assert compared(slow, fast | {"least": 11.0}) == "not distinguishable"


@pytest.mark.parametrize(
    "name, end, feature",
    [
        ("two_cores", None, "images"),
        ("two_cores_text", None, "text"),
        ("one_h100", "\n\nWhat a step", None),
        ("one_h100_text", "\n\nWhat a step", None),
    ],
)
def test_the_readme_shows_what_is_stored(name, end, feature):
    """Of one GPU the first tables."""
    result = json.loads((HERE / f"{name}.json").read_text())
    assert f"```\n{show(result).split(end)[0] if end else show(result)}\n```" in PAGE
    measured = {row["stage"].split()[0] for row in result["stages"]}
    assert feature is None or measured == set(with_feature(feature))
    assert all(each["waits_per_step"] == 0 for each in result["counted"].values())


def test_the_readme_shows_what_is_stored_of_the_probe():
    stored = [(HERE / f"one_{name}_probe.txt").read_text() for name in ("h200", "h100")]
    sections = "\n".join(stored).strip().split("\n\n")
    assert len(sections) == 3
    assert all(f"```\n{section}\n```" in PAGE for section in sections)


@pytest.mark.parametrize(
    "program, flags, named",
    [
        (compare, ["--epochs", "1"], "--epochs"),
        (compare, ["--processes", "2", "--batch-size", "61"], "--batch-size 61"),
        (compare, [FIRST, "08"], "there is no stage 08; the stages are"),
        (compare_text, ["--processes", "0"], "--processes"),
        (compare_text, [FIRST], f"there is no stage {FIRST}"),
    ],
)
def test_bad_input_gets_one_line(program, flags, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program.__file__, *flags])
    with pytest.raises(SystemExit, match="^2$"):
        program.main()
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    name = program.__name__.rpartition(".")[2]
    assert line.startswith(f"{name}.py: error: ") and named in line
    assert printed.out == ""


def test_an_epoch_too_short_to_be_counted_is_refused(device):
    flags = f"{FIRST} --images 96 --batch-size 48 --epochs 2 --device {device}"
    said = run(f"python -m benchmarks.compare {flags}", code=2).stderr
    assert "error: an epoch has too few steps: 7 or more" in said.splitlines()[-1]


def test_the_rates_of_the_input_path_are_printed():
    title, *rows = run(
        "python -m benchmarks.input_path --images 300"
    ).stdout.splitlines()
    assert title.split() == ["images", "per", "second", "and", "core"]
    assert len(rows) == 4 and all(re.search(r" [1-9][\d,]*$", row) for row in rows)


@pytest.mark.release
def test_what_a_step_waits_for_is_printed(several):
    launcher = f"torchrun --standalone --nproc-per-node={several}"
    done = run(f"{launcher} -m benchmarks.communication --epochs 3 --device cpu")
    row = r"^(nothing|one number|the gradient) +\d+\.\d +[\d.]+-[\d.]+ +(\d+\.\d\d)$"
    found = re.findall(row, done.stdout, re.MULTILINE)
    assert [name for name, _ in found] == list(limit.KINDS)
    assert found[0][1] == "1.00"


@pytest.mark.release  # torchao's prototype
def test_float8_is_measured_against_bfloat16():
    pytest.importorskip("torchao", reason="torchao is not installed")
    done = run("python -m benchmarks.float8 --widths 16 32 --tokens 64")
    title, *rows = [line.split() for line in done.stdout.splitlines()]
    assert title[:3] == ["width", "bf16", "ms"]
    assert [row[0] for row in rows] == ["16", "32"]
    for row in rows:
        assert all(float(number) > 0 for number in row[1:3])
    done = run("python -m benchmarks.float8 --widths 24", code=2)
    assert done.stderr == (
        "float8.py: error: float8 needs widths and tokens that are multiples of 16\n"
    )
