"""The benchmark: it measures what it says, and the README shows what it measured."""

import json
import re
import sys

import pytest
from PIL import Image

from benchmarks import compare
from benchmarks import report
from common.model import SmallResNet
from tests.harness import fork
from tests.harness import run
from tools.stages import ROOT
from tools.stages import stages

COMPARE = ROOT / "benchmarks/compare.py"
KINDS = ("bare", "ddp", "communication")
STORED = ROOT / "benchmarks/two_cores.json"


@pytest.fixture(scope="module")
def measured(device, tmp_path_factory):
    """Stage 01 on little work: what the command printed, and the file that it wrote."""
    folder = tmp_path_factory.mktemp("benchmark")
    flags = ["01_single_gpu", "--data", "digits", "--scaling", "--batch-sizes"]
    flags += ["--rounds", "1", "--epochs", "6"]
    flags += ["--device", device, "--json", str(folder / "results.json")]
    command = [sys.executable, "-m", "benchmarks.compare", *flags]
    done = run(command, folder, seconds=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "results.json"


@pytest.fixture
def args(device, monkeypatch):
    """The flags of a benchmark of little work."""
    words = ["--data", "digits", "--scaling", "--batch-sizes", "--device", device]
    monkeypatch.setattr(sys, "argv", [str(COMPARE), *words])
    return compare.parse_args()


def test_every_number_is_of_the_work_that_was_done(measured):
    result = json.loads(measured[1].read_text())
    (row,) = result["stages"]
    assert (row["stage"], row["processes"]) == ("01_single_gpu", 1)
    assert 0 < row["images_per_s"]["least"] <= row["images_per_s"]["median"]
    assert row["images_per_s"]["median"] <= row["images_per_s"]["most"]
    seconds = 1500 / row["images_per_s"]["median"]
    assert row["epoch_s"]["median"] == pytest.approx(seconds)
    assert 0 < row["loading"]["median"] < 1
    assert row["bytes"]["most"] > 100 * 2**20  # torch itself
    (limit,) = result["limits"]
    assert (limit["processes"], limit["batch_size"], "ddp" in limit) == (1, 60, False)
    assert result["counted"]["01_single_gpu"]["per_step"] == {}


def test_the_tables_can_be_shown_again(measured, tmp_path):
    printed, path = measured
    assert printed == report.show(json.loads(path.read_text())) + "\n"
    assert "\n01_single_gpu " in printed and "\nthe limit " in printed
    again = fork(COMPARE, ["--show", path], tmp_path)()
    assert again.returncode == 0 and again.stdout == printed
    with Image.open(path.with_suffix(".png")) as picture:
        assert min(picture.size) > 200


def test_the_limit_of_two_processes_with_and_without_communication(args, several):
    if several < 2:
        pytest.skip("a second process needs a second GPU")
    rows = compare.limits(args, 2, [60, 120], "off")
    works = [(row["processes"], row["batch_size"]) for row in rows]
    assert works == [(2, 60), (2, 120)]
    for row in rows:
        assert all(len(row[kind]) == 2 for kind in KINDS)
        # Communication is a difference of the two, which noise can make negative.
        assert min(*row["bare"], *row["ddp"]) > 0
        assert max(row["communication"]) < 1


def test_windows_of_equal_rows_are_pooled():
    rows = [{"stage": "a", "n": 2, "s": [1.0, 5.0]}, {"stage": "b", "n": 2, "s": [7.0]}]
    rows.append({"stage": "a", "n": 2, "s": [3.0]})
    first, second = compare.pooled(rows)
    pooled = {"median": 3.0, "least": 1.0, "most": 5.0}
    assert first == {"stage": "a", "n": 2, "s": pooled}
    assert second["s"] == {"median": 7.0, "least": 7.0, "most": 7.0}


def test_the_collectives_are_counted(args, several):
    """Stage 04 sends its gradient, in one bucket, and nothing else while it trains."""
    counted = compare.count(args, "04_ddp_spawn", several)
    size = sum(4 * parameter.numel() for parameter in SmallResNet(1, 10).parameters())
    assert counted["per_step"] == {"all_reduce": {"calls": 1, "bytes": size}}


def test_the_readme_shows_what_is_stored():
    result = json.loads(STORED.read_text())
    # Measured before stage 09 was split in two, as README says.
    measured = [*stages()[:8], "09_fault_tolerance"]
    assert [row["stage"] for row in result["stages"]] == measured
    assert int(result["work"]["rounds"]) * (int(result["work"]["epochs"]) - 1) >= 5
    for page in ("README.md", "README.zh-CN.md"):
        assert f"```\n{report.show(result)}\n```" in (ROOT / page).read_text(), page
    with Image.open(STORED.with_suffix(".png")) as picture:
        assert picture.text["Description"] == report.medians(result)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--epochs", "2"], "--epochs"),
        (["--batch-size", "61"], "--batch-size 61"),
        (["08"], "there is no stage 08; the stages are"),
        (["--processes", "0"], "--processes"),
        (["--show", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_gets_one_line(flags, named, tmp_path):
    done = fork(COMPARE, [*flags, "--json", tmp_path / "x.json"], tmp_path / "screen")()
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("compare.py: error: ") and named in line
    assert not (tmp_path / "x.json").exists()


def test_the_cost_of_a_vote_is_measured_both_ways(tmp_path):
    done = run([sys.executable, "-m", "benchmarks.vote_cost", "20"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(.*): \d+\.\d\d ms per step$", done.stdout, re.MULTILINE)
    assert found == ["looked at a step later", "waited for at once"]
