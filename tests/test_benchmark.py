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
from common import text
from common.args import ArgumentParser
from common.model import SmallResNet
from tools.harness import run
from tools.stages import ROOT
from tools.stages import first_with
from tools.stages import with_feature

HERE = ROOT / "benchmarks"
STORED, STORED_TEXT = HERE / "two_cores.json", HERE / "two_cores_text.json"
FIRST = first_with("images")


@pytest.fixture(scope="module")
def measured(device, tmp_path_factory):
    """The first stage on little work: what the command printed, and what it wrote."""
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    flags = [FIRST, "--data", "digits", "--scaling", "--batch-sizes"]
    flags += ["--epochs", "6", "--processes", "1", "--batch-size", "48"]
    flags += ["--device", device, "--json", path]
    done = run(["python", "-m", "benchmarks.compare", *flags])
    return done.stdout, path


@pytest.fixture
def args(device, monkeypatch):
    """The flags of a benchmark of little work."""
    words = ["--data", "digits", "--scaling", "--batch-sizes"]
    words += ["--epochs", "6", "--device", device]
    monkeypatch.setattr(sys, "argv", [compare.__file__, *words])
    return compare.parse_args()


def test_every_number_is_of_the_work_that_was_done(measured):
    result = json.loads(measured[1].read_text())
    (row,) = result["stages"]
    assert (row["stage"], row["processes"]) == (FIRST, 1)
    assert 0 < row["images_per_s"]["least"] <= row["images_per_s"]["median"]
    assert row["images_per_s"]["median"] <= row["images_per_s"]["most"]
    seconds = 1440 / row["images_per_s"]["median"]
    assert row["epoch_s"]["median"] == pytest.approx(seconds)
    assert 0 < row["loading"]["median"] < 1
    assert row["bytes"]["most"] > 100 * 2**20  # torch itself
    assert 0 < row["of_limit"]["least"] <= row["of_limit"]["most"]
    assert "communication" not in row
    counted = result["counted"][FIRST]
    assert counted["per_step"] == {} and counted["waits_per_step"] == 0


def test_the_tables_can_be_shown_again(measured, monkeypatch, capsys):
    printed, path = measured
    assert printed == report.show(json.loads(path.read_text())) + "\n"
    assert f"\n{FIRST} " in printed and "least-most" in printed
    monkeypatch.setattr(sys, "argv", [compare.__file__, "--show", str(path)])
    compare.main()
    assert capsys.readouterr().out == printed
    with Image.open(path.with_suffix(".png")) as picture:
        assert min(picture.size) > 200


@pytest.mark.release
def test_each_epoch_is_compared_with_the_limit_around_it(args, two):
    kinds = ["bare", "in_step", "ddp"]
    row, counted = compare.train(args, first_with("ddp"), two, 48, kinds)
    epochs = args.epochs - 1  # the first warms up
    names = ("images_per_s", "limit_images_per_s", "of_limit", "communication")
    for name in (*names, "of_limit_in_step", "between_steps"):
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
    train_set = limit.load_train_set(args)
    steps = []
    sgd = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self: (steps.append(self), sgd(self))
    )
    limit.make_steps(args, train_set, 48, ["bare"])["bare"]()
    (optimizer,) = steps
    (group,) = optimizer.param_groups
    assert group["foreach"] is group["fused"] is None  # so torch chooses
    model = limit.make_network(args, train_set)
    for ours, theirs in zip(model.parameters(), group["params"], strict=True):
        ours.data.copy_(theirs.data)
    inputs, targets = train_set.__getitems__(list(range(48)))
    outputs = model(data.normalize(inputs, args.data, args.dtype))
    torch.nn.functional.cross_entropy(outputs, targets).backward()
    for ours, theirs in zip(model.parameters(), group["params"], strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_windows_of_the_limit_are_no_part_of_an_epoch(args, monkeypatch):
    """They are taken in its last step, while the script's clock goes on."""
    lines = [f"epoch {n} 30/30  data 1.0 ms  batch 50.0 ms  loss\n" for n in (1, 2, 3)]
    epoch = {"train": {"seconds": 1.25, "count": 1440}, "val": {"seconds": 0.1}}
    kinds = {"bare": [0.5, 0.7, 0.9], "in_step": [0.7, 0.9, 1.1]}
    counted = {"limit": kinds, "spent": [9.0, 0.25, 0.25], "between": [9.0, 0.87, 1.45]}
    ran = "".join(lines), [epoch] * 3, {**counted, "bytes": 1}
    monkeypatch.setattr(compare, "train_instrumented", lambda *_: ran)
    row, _ = compare.train(args, FIRST, 1, 48)
    assert row["epoch_s"] == [1.0, 1.0] and row["images_per_s"] == [1440, 1440]
    assert row["of_limit"] == pytest.approx([0.6, 0.8])
    assert row["of_limit_in_step"] == pytest.approx([0.8, 1.0])
    assert row["between_steps"] == pytest.approx([1392 / 0.87, 1392 / 1.45])
    assert row["loading"] == pytest.approx([1 / (50 - 250 / 30)] * 2)


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


@pytest.mark.release
@pytest.mark.parametrize("name", compare.LIBRARIES)
def test_other_libraries_are_measured_on_the_same_work(args, device, name):
    if device == "cuda":
        pytest.skip("the programs have not been tried on GPUs")
    row = compare.train_by_library(args, name, 2, 48)
    assert row["program"] == name and row["processes"] == 2
    assert len(row["images_per_s"]) == args.epochs - 1
    assert min(row["images_per_s"]) > 0


@pytest.mark.release
def test_spawned_processes_are_measured_too(args, several):
    """Each sends its gradient, in one bucket, and nothing else while it trains."""
    row, counted = compare.train(args, first_with("spawn"), several, 48)
    size = sum(4 * parameter.numel() for parameter in SmallResNet(1, 10).parameters())
    assert counted["per_step"] == {"all_reduce": {"calls": 1, "bytes": size}}
    assert counted["waits_per_step"] == 0
    assert len(row["of_limit"]) == args.epochs - 1


@pytest.mark.release
def test_language_models_are_compared_at_one_work(several, device, tmp_path):
    """FSDP2 with one block, which is gathered for forward and for backward."""
    path, stage = tmp_path / "results.json", first_with("shards")
    flags = [stage, "--width", "8", "--depth", "1", "--heads", "2"]
    flags += ["--batch-size", str(2 * several), "--processes", str(several)]
    flags += ["--epochs", "2", "--rounds", "1", "--device", device, "--json", path]
    done = run(["python", "-m", "benchmarks.compare_text", *flags])
    result = json.loads(path.read_text())
    assert done.stdout == compare_text.show(result) + "\n"
    (row,) = result["stages"]
    assert row["stage"] == stage and row["processes"] == several
    assert row["tokens_per_s"]["least"] > 0 and 0 < row["bytes"]["least"] < 2**30
    counted = result["counted"][stage]
    assert counted["per_step"]["all_gather"]["calls"] == 3
    assert counted["waits_per_step"] == 0


def test_a_text_of_ten_steps_has_ten(monkeypatch, tmp_path):
    for batch_size, length in ((8, 16), (2, 1), (4, 1024)):
        words = ["--batch-size", str(batch_size), "--context-length", str(length)]
        monkeypatch.setattr(
            sys, "argv", [compare_text.__file__, *words, "--processes=1"]
        )
        args = compare_text.parse_args()
        args.text_file = tmp_path / "text"
        args.text_file.write_bytes(compare_text.text_of_ten_steps(args))
        train_set, _ = text.load(args.text_file, args.context_length, args.seed)
        assert len(train_set) // batch_size == 10


def test_the_readme_shows_what_is_stored():
    result = json.loads(STORED.read_text())
    assert [row["stage"] for row in result["stages"]] == with_feature("images")
    assert int(result["work"]["rounds"]) * (int(result["work"]["epochs"]) - 1) >= 5
    page = (HERE / "README.md").read_text()
    assert f"```\n{report.show(result)}\n```" in page
    with Image.open(STORED.with_suffix(".png")) as picture:
        assert picture.text["Description"] == report.medians(result)


def test_the_readme_shows_what_is_stored_of_language_models():
    result = json.loads(STORED_TEXT.read_text())
    measured = {row["stage"].split()[0] for row in result["stages"]}
    assert measured == set(with_feature("text"))
    assert int(result["work"]["rounds"]) * (int(result["work"]["epochs"]) - 1) >= 5
    page = (HERE / "README.md").read_text()
    assert f"```\n{compare_text.show(result)}\n```" in page


def test_the_readme_shows_what_is_stored_of_one_gpu():
    """The first tables of two commands, and three sections of a third."""
    images = json.loads((HERE / "one_h100.json").read_text())
    text = json.loads((HERE / "one_h100_text.json").read_text())
    shown = [report.show(images).split("\n\nof limit")[0]]
    shown.append(compare_text.show(text).split("\n\nWhat a process")[0])
    sections = (HERE / "one_h100_probe.txt").read_text().strip().split("\n\n")
    assert len(sections) == 3
    page = (HERE / "README.md").read_text()
    for table in (*shown, *sections):
        assert f"```\n{table}\n```" in page
    for row in images["stages"]:
        assert images["counted"][row["stage"]]["waits_per_step"] == 0


@pytest.mark.parametrize(
    "program, flags, named",
    [
        (compare, ["--epochs", "2"], "--epochs"),
        (compare, ["--images", "300"], "--images 300"),
        (compare, ["--processes", "2", "--batch-size", "61"], "--batch-size 61"),
        (compare, ["08"], "there is no stage 08; the stages are"),
        (compare, ["--processes", "0"], "--processes"),
        (compare, ["--show", "nowhere.json"], "nowhere.json"),
        (compare_text, ["--epochs", "1"], "--epochs"),
        (compare_text, ["--text-file", str(ROOT / "LICENSE")], "8 steps"),
        (compare_text, ["--batch-size", "9", "--processes", "2"], "--batch-size"),
        (compare_text, [FIRST], f"there is no stage {FIRST}"),
    ],
)
def test_bad_input_gets_one_line(program, flags, named, monkeypatch, capsys, tmp_path):
    words = [*flags, "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", [program.__file__, *words])
    with pytest.raises(SystemExit, match="^2$"):
        program.main()
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    name = program.__name__.rpartition(".")[2]
    assert line.startswith(f"{name}.py: error: ") and named in line
    assert printed.out == "" and not (tmp_path / "x.json").exists()


def test_the_rates_of_the_input_path_are_printed():
    done = run("python -m benchmarks.input_path --images 300")
    title, *rows = done.stdout.splitlines()
    assert title.split() == ["images", "per", "second", "and", "core"]
    assert len(rows) == 4 and all(re.search(r" [1-9][\d,]*$", row) for row in rows)


@pytest.mark.release
def test_what_a_step_waits_for_is_printed(several):
    launcher = f"torchrun --standalone --nproc-per-node={several}"
    flags = "--images 120 --epochs 3 --device cpu"
    done = run(f"{launcher} -m benchmarks.communication {flags}")
    row = r"^(nothing|one number|the gradient) +\d+\.\d +[\d.]+-[\d.]+ +(\d+\.\d\d)$"
    found = re.findall(row, done.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["nothing", "one number", "the gradient"]
    assert found[0][1] == "1.00"
