"""The benchmark: it measures what it says, and the README shows what it measured."""

import json
import re
import sys

import pytest
import torch
from PIL import Image

from benchmarks import compare
from benchmarks import compare_text
from benchmarks import limit
from benchmarks import report
from common import data
from common.args import ArgumentParser
from common.model import SmallResNet
from common.model import make_model
from tests.harness import fork
from tests.harness import run
from tools.stages import ROOT
from tools.stages import stages
from tools.stages import trains_on_text

COMPARE = ROOT / "benchmarks/compare.py"
COMPARE_TEXT = ROOT / "benchmarks/compare_text.py"
STORED = ROOT / "benchmarks/two_cores.json"
STORED_TEXT = ROOT / "benchmarks/two_cores_text.json"


@pytest.fixture(scope="module")
def measured(device, tmp_path_factory):
    """Stage 01 on little work: what the command printed, and the file that it wrote."""
    folder = tmp_path_factory.mktemp("benchmark")
    flags = ["01_single_gpu", "--data", "digits", "--scaling", "--batch-sizes"]
    flags += ["--images", "1500", "--epochs", "6", "--processes", "1"]
    flags += ["--batch-size", "60"]
    flags += ["--device", device, "--json", str(folder / "results.json")]
    command = [sys.executable, "-m", "benchmarks.compare", *flags]
    done = run(command, folder, seconds=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "results.json"


@pytest.fixture
def args(device, monkeypatch):
    """The flags of a benchmark of little work."""
    words = ["--data", "digits", "--images", "1500", "--scaling", "--batch-sizes"]
    words += ["--epochs", "6", "--device", device]
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
    assert 0 < row["of_limit"]["least"] <= row["of_limit"]["most"]
    assert "communication" not in row
    counted = result["counted"]["01_single_gpu"]
    assert counted["per_step"] == {} and counted["waits_per_step"] == 0


def test_the_tables_can_be_shown_again(measured, tmp_path):
    printed, path = measured
    assert printed == report.show(json.loads(path.read_text())) + "\n"
    assert "\n01_single_gpu " in printed and "least-most" in printed
    again = fork(COMPARE, ["--show", path], tmp_path)()
    assert again.returncode == 0 and again.stdout == printed
    with Image.open(path.with_suffix(".png")) as picture:
        assert min(picture.size) > 200


@pytest.mark.sweep
def test_each_epoch_is_compared_with_the_limit_around_it(args, two):
    row, counted = compare.train(args, "03_ddp_launch", two, 60, "ddp")
    epochs = args.epochs - 1  # the first warms up
    for name in ("images_per_s", "limit_images_per_s", "of_limit", "communication"):
        assert len(row[name]) == epochs, name
    rates = row["images_per_s"], row["limit_images_per_s"], row["of_limit"]
    for rate, limit_rate, ratio in zip(*rates, strict=True):
        assert ratio == pytest.approx(rate / limit_rate)
    assert max(row["communication"]) < 1  # noise can make it negative
    assert counted["waits_per_step"] == 0


def test_the_limit_does_what_the_stage_does(monkeypatch):
    """As many forward passes and optimizer steps, and the same gradient."""
    args = ArgumentParser("").parse_args(["--device", "cpu", "--dtype", "float64"])
    args.grad_accum_steps, args.lr = 3, 0.0  # so a step leaves the weights as they are
    train_set, _ = data.load_data(args)
    steps = []
    sgd = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self: (steps.append(self), sgd(self))
    )
    limit.make_steps(args, train_set, 60, with_ddp=False)["bare"]()
    (optimizer,) = steps
    (group,) = optimizer.param_groups
    model = make_model(args, train_set).to(dtype=args.dtype)
    for ours, theirs in zip(model.parameters(), group["params"], strict=True):
        ours.data.copy_(theirs.data)
    images, target = train_set.__getitems__(list(range(60)))
    output = model(data.normalize(args, images))
    torch.nn.functional.cross_entropy(output, target).backward()
    for ours, theirs in zip(model.parameters(), group["params"], strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_neighbors_in_time():
    assert compare.between([2.0, 4.0, 10.0]) == [3.0, 7.0]


def test_what_overlaps_is_not_distinguishable():
    slow = {"median": 10.0, "least": 8.0, "most": 12.0}
    fast = {"median": 20.0, "least": 12.5, "most": 21.0}
    assert report.compared(fast, slow) == "2.00"
    assert report.compared(slow, {**fast, "least": 11.0}) == "not distinguishable"
    assert report.communication({"communication": slow | {"least": 0.0}}) == (
        "not distinguishable"
    )
    assert report.communication({}) == "none"


def test_windows_of_equal_rows_are_pooled():
    rows = [{"stage": "a", "n": 2, "s": [1.0, 5.0]}, {"stage": "b", "n": 2, "s": [7.0]}]
    rows.append({"stage": "a", "n": 2, "s": [3.0]})
    first, second = compare.pooled(rows)
    pooled = {"median": 3.0, "least": 1.0, "most": 5.0}
    assert first == {"stage": "a", "n": 2, "s": pooled}
    assert second["s"] == {"median": 7.0, "least": 7.0, "most": 7.0}


@pytest.mark.sweep
def test_the_collectives_are_counted(args, several):
    """Stage 04 sends its gradient, in one bucket, and nothing else while it trains."""
    _, counted = compare.train(args, "04_ddp_spawn", several, 60)
    size = sum(4 * parameter.numel() for parameter in SmallResNet(1, 10).parameters())
    assert counted["per_step"] == {"all_reduce": {"calls": 1, "bytes": size}}


@pytest.mark.sweep
def test_language_models_are_compared_at_one_work(several, device, tmp_path):
    """Stage 12 with one block: gathered for forward and backward, or for both."""
    path = tmp_path / "results.json"
    flags = ["12_fsdp", "--width", "8", "--depth", "1", "--heads", "2"]
    flags += ["--batch-size", str(2 * several), "--processes", str(several)]
    flags += ["--epochs", "2", "--rounds", "1", "--device", device, "--json", path]
    done = run([sys.executable, "-m", "benchmarks.compare_text", *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert done.stdout == compare_text.show(result) + "\n"
    variants = ["12_fsdp", "12_fsdp --keep-unsharded"]
    assert [row["stage"] for row in result["stages"]] == variants
    for row in result["stages"]:
        assert row["processes"] == several and row["tokens_per_s"]["least"] > 0
        assert 0 < row["bytes"]["least"] < 2**30
    counted = [result["counted"][name] for name in variants]
    gathers = [one["per_step"]["all_gather"]["calls"] for one in counted]
    assert gathers == [3, 2] and counted[0]["waits_per_step"] == 1


def test_a_text_of_ten_steps_has_ten(monkeypatch, tmp_path):
    for batch_size, length in ((8, 16), (2, 1), (4, 1024)):
        words = ["--batch-size", str(batch_size), "--context-length", str(length)]
        monkeypatch.setattr(sys, "argv", [str(COMPARE_TEXT), *words, "--processes=1"])
        args = compare_text.parse_args()
        args.text_file = tmp_path / "text"
        args.text_file.write_bytes(compare_text.text_of_ten_steps(args))
        train_set, _ = data.load_text(args)
        assert len(train_set) // batch_size == 10


def test_the_readme_shows_what_is_stored():
    result = json.loads(STORED.read_text())
    on_images = [stage for stage in stages() if not trains_on_text(stage)]
    assert [row["stage"] for row in result["stages"]] == on_images
    assert int(result["work"]["rounds"]) * (int(result["work"]["epochs"]) - 1) >= 5
    page = (ROOT / "benchmarks/README.md").read_text()
    assert f"```\n{report.show(result)}\n```" in page
    with Image.open(STORED.with_suffix(".png")) as picture:
        assert picture.text["Description"] == report.medians(result)


def test_the_readme_shows_what_is_stored_of_language_models():
    result = json.loads(STORED_TEXT.read_text())
    on_text = {stage for stage in stages() if trains_on_text(stage)}
    assert {row["stage"].split()[0] for row in result["stages"]} == on_text
    assert int(result["work"]["rounds"]) * (int(result["work"]["epochs"]) - 1) >= 5
    page = (ROOT / "benchmarks/README.md").read_text()
    assert f"```\n{compare_text.show(result)}\n```" in page


@pytest.mark.parametrize(
    ("script", "flags", "named"),
    [
        (COMPARE, ["--epochs", "2"], "--epochs"),
        (COMPARE, ["--images", "300"], "--images 300"),
        (COMPARE, ["--batch-size", "61"], "--batch-size 61"),
        (COMPARE, ["08"], "there is no stage 08; the stages are"),
        (COMPARE, ["--processes", "0"], "--processes"),
        (COMPARE, ["--show", "nowhere.json"], "nowhere.json"),
        (COMPARE_TEXT, ["--epochs", "1"], "--epochs"),
        (COMPARE_TEXT, ["--text-file", str(ROOT / "LICENSE")], "8 steps"),
        (COMPARE_TEXT, ["--batch-size", "9", "--processes", "1", "2"], "--batch-size"),
        (COMPARE_TEXT, ["03_ddp_launch"], "there is no stage 03_ddp_launch"),
    ],
)
def test_bad_input_gets_one_line(script, flags, named, tmp_path):
    done = fork(script, [*flags, "--json", tmp_path / "x.json"], tmp_path / "screen")()
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script.name}: error: ") and named in line
    assert not (tmp_path / "x.json").exists()


@pytest.mark.sweep
def test_the_cost_of_a_vote_is_measured_both_ways(tmp_path):
    done = run([sys.executable, "-m", "benchmarks.vote_cost", "20"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(.*): \d+\.\d\d ms per step$", done.stdout, re.MULTILINE)
    assert found == ["looked at a step later", "waited for at once"]


def test_the_rates_of_the_input_path_are_printed(tmp_path):
    words = ["-m", "benchmarks.input_path", "--images", "300"]
    done = run([sys.executable, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    title, *rows = done.stdout.splitlines()
    assert title.split() == ["images", "per", "second", "and", "core"]
    assert len(rows) == 4 and all(re.search(r" [1-9][\d,]*$", row) for row in rows)


@pytest.mark.sweep
def test_what_a_step_waits_for_is_printed(several, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    module = [f"--nproc-per-node={several}", "-m", "benchmarks.communication"]
    flags = ["--images", "120", "--epochs", "3", "--device", "cpu"]
    done = run([sys.executable, *launcher, *module, *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    row = r"^(nothing|one number|the gradient) +\d+\.\d +[\d.]+-[\d.]+ +(\d+\.\d\d)$"
    found = re.findall(row, done.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["nothing", "one number", "the gradient"]
    assert found[0][1] == "1.00"
