"""CONTRIBUTING.md: `common` is copied along with a stage, each module alone if need be.

And what its docstrings promise: flags, metrics, networks, and files of weights, which
are written atomically and loaded safely. test_data.py has the sets of images,
test_gpt.py the language model and its text.
"""

import functools
import importlib
import os
import pickle
import re
import resource
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from common import lr_schedule
from common import meters
from common import weights
from common.args import ArgumentParser
from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from tests.fault_injection import full_at_file
from tests.training import load_stage
from tests.training import run_stage
from tests.training import train_in_forks

FIRST = first_with("images")
CPU = torch.device("cpu")


def arguments(*words):
    return ArgumentParser("").parse_args(["--device", "cpu", *map(str, words)])


# ---- each module, copied alone -------------------------------------------------------
def use_alone(folder, name):
    """Be a process that finds nothing of ours except what is in a folder."""
    for each in [each for each in sys.modules if each.partition(".")[0] == "common"]:
        del sys.modules[each]
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p).resolve() != ROOT)]
    os.chdir(folder)
    source = Path("common", f"{name}.py").read_text()
    if not re.search("^(from|import) torchvision", source, re.MULTILINE):
        sys.modules["torchvision"] = None  # raises ImportError, as if not installed
    module = importlib.import_module(f"common.{name}")
    assert module.__file__ == str(folder / "common" / f"{name}.py")


def with_imports(name):
    """Return a module of common/, and those that it imports, directly or not."""
    found, todo = set(), {name}
    while todo:
        found |= todo
        sources = [(ROOT / "common" / f"{each}.py").read_text() for each in todo]
        imports = r"^from common(?: import |\.)(\w+)"
        todo = {*re.findall(imports, "\n".join(sources), re.MULTILINE)} - found
    return found


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "common").glob("[!_]*.py"))
)
def test_a_module_can_be_copied_with_what_it_imports(name, tmp_path):
    """It needs no torchvision, unless that is what the module is about."""
    (tmp_path / "common").mkdir()
    for each in with_imports(name):
        shutil.copy(ROOT / "common" / f"{each}.py", tmp_path / "common")
    commands.call_in_forks(use_alone, [(tmp_path, name)])


# ---- meters --------------------------------------------------------------------------
def test_accuracy_by_hand():
    outputs = torch.tensor([[9.0, 1, 0], [0, 9, 1], [1, 0, 9], [5, 9, 1]])
    targets = torch.tensor([0, 2, 1, 0])
    assert meters.num_correct(outputs, targets, topk=(1, 2, 3)).tolist() == [1, 3, 4]
    fewer_classes_than_k = meters.num_correct(outputs, targets, topk=(5,))
    assert fewer_classes_than_k.tolist() == [4]
    # The same as two windows of two tokens.
    windows = outputs.view(2, 2, 3), targets.view(2, 2)
    assert meters.num_correct(*windows, topk=(1, 2, 3)).tolist() == [1, 3, 4]


def test_meter_divides_sums_by_counts():
    """Batches of 3 and of 1: the average of their averages would be another number."""
    meter = meters.Meter("cpu")
    output, target = torch.eye(3), torch.tensor([0, 1, 0])
    meter.update(torch.tensor(1.0), output, target)
    meter.update(torch.tensor(5.0), output[:1], torch.tensor([2]))
    averages = meter.compute()
    assert averages["loss"] == (3 * 1 + 1 * 5) / 4
    assert averages["acc1"] == 100 * 2 / 4
    assert averages["count"] == 4
    assert meter.sums.dtype == torch.float64
    empty = nn.functional.cross_entropy(output[:0], target[:0])
    assert empty.isnan()
    meter.update(empty, output[:0], target[:0])
    assert meter.compute()["loss"] == averages["loss"]


def test_schedule_warms_up_and_ends_at_zero():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = lr_schedule.warmup_cosine(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert max(rates) == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert scheduler.get_last_lr()[0] == pytest.approx(0)


# ---- a run ---------------------------------------------------------------------------
@pytest.mark.parametrize("tf32, deterministic", [(False, True), (True, False)])
def test_a_stage_sets_what_the_flags_say_of_a_gpu(tf32, deterministic):
    """By default no TF32, and the same bits every time."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.conv.fp32_precision, matmul.fp32_precision
    flags = [*(["--tf32"] * tf32), *(["--no-deterministic"] * (not deterministic))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the old names are not to be mixed with
            load_stage(FIRST).setup(arguments(*flags))
        assert cudnn.deterministic == deterministic
        precision = "tf32" if tf32 else "ieee"
        assert cudnn.conv.fp32_precision == matmul.fp32_precision == precision
    finally:
        cudnn.deterministic, cudnn.conv.fp32_precision, matmul.fp32_precision = before


@pytest.fixture
def done(trained):
    """The first stage, trained for three epochs."""
    return trained(FIRST, 1, "--epochs", "3", how=train_in_forks)


def test_out_dir_holds_metrics_and_weights_that_load_safely(done, trained):
    names = {path.name for path in done.weights.parent.iterdir()}
    assert names == {"metrics.jsonl", "last.pt", "best.pt"}
    assert [row["epoch"] for row in done.rows] == [1, 2, 3]
    assert {"epoch", "train", "val"} == set(done.rows[0])
    metrics = {"loss", "acc1", "acc5", "count", "seconds"}
    assert metrics == set(done.rows[0]["train"]) == set(done.rows[0]["val"])
    stage = first_with("dataparallel")
    wrapped = trained(stage, 1, "--epochs", "1", how=train_in_forks)
    for path in (done.weights, wrapped.weights):
        saved = torch.load(path, weights_only=True)
        assert not [name for name in saved if name.startswith("module.")]
        assert all(tensor.device.type == "cpu" for tensor in saved.values())


def test_evaluate_only_evaluates(done, tmp_path, device):
    best = max(done.rows, key=lambda row: row["val"]["acc1"])["val"]
    flags = ["--evaluate", done.weights.parent / "best.pt", "--device", device]
    flags += ["--out-dir", tmp_path / "out"]
    again = run_stage(FIRST, 1, flags, tmp_path)
    assert again.stdout == f"val {meters.format_metrics(best)}\n"
    assert not (tmp_path / "out").exists()


def test_an_epoch_that_was_not_written_counts_in_the_exit_code(tmp_path, device):
    """Also if the later ones were."""
    flags = ["--epochs", "2", "--out-dir", tmp_path / "out", "--device", device]
    full = functools.partial(full_at_file, "os.rename", "*/best.pt")
    done = run_stage(FIRST, 1, flags, tmp_path / "run", code=1, prepare=full)
    assert f"epoch 1: {tmp_path}/out not written ([Errno 28] No space" in done.stderr
    rows = weights.read_metrics(tmp_path / "out")
    assert [row["epoch"] for row in rows] == [2]


# ---- files ---------------------------------------------------------------------------
def save_epoch(folder, epoch, acc1, trained=10):
    metrics = {"loss": 1.0, "acc1": acc1, "count": 10}
    train, state = (
        {**metrics, "count": trained},
        {"w": torch.full((2000,), float(epoch))},
    )
    return weights.save_epoch(folder, epoch, train, metrics, state)


def test_save_epoch_keeps_the_best_and_drops_what_an_earlier_run_left(tmp_path):
    for epoch, acc1 in ((1, 50.0), (2, 70.0), (3, 60.0)):
        save_epoch(tmp_path, epoch, acc1)
    assert weights.load(tmp_path / "best.pt")["w"].unique() == 2
    assert weights.load(tmp_path / "last.pt")["w"].unique() == 3
    save_epoch(tmp_path, 1, 40.0)
    assert [row["epoch"] for row in weights.read_metrics(tmp_path)] == [1]
    assert weights.load(tmp_path / "best.pt")["w"].unique() == 1
    save_epoch(tmp_path, 1, 40.0, trained=0)  # a run that resumed after its last step
    assert weights.read_metrics(tmp_path)[0]["train"]["count"] == 10
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "last.pt", "metrics.jsonl"]


def test_an_epoch_that_cannot_be_written_is_one_line(tmp_path, capsys):
    """And leaves what is there, and the run can try again after the next one."""
    assert save_epoch(tmp_path, 1, 50.0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        assert not save_epoch(tmp_path, 2, 60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    why = "File too large"  # torch's own words are "unexpected pos 768 vs 662"
    assert re.fullmatch(rf"epoch 2: {tmp_path} not written \(.*{why}\)", line)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert save_epoch(tmp_path, 3, 60.0)
    assert [row["epoch"] for row in weights.read_metrics(tmp_path)] == [1, 3]


class Spy:
    def __reduce__(self):
        return os.mkdir, ("was-run",)


def test_loading_runs_no_code_from_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Spy(), "zip.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Spy(), protocol=2))
    for name in ("zip.pt", "pickle.pt", "none.pt"):
        said = rf"^{name} (is missing|holds more than weights \(\S+mkdir)"
        with pytest.raises(ValueError, match=said):
            weights.load(name)
    assert not (tmp_path / "was-run").exists()


def test_the_processes_of_a_machine_share_a_file_of_weights(tmp_path, monkeypatch):
    """It is mapped into their memory: otherwise each holds all of it for a moment."""
    path = tmp_path / "last.pt"
    model, mapped = nn.Linear(3, 2), []
    weights.save(model.state_dict(), path)

    def load(state):
        mapped.append(str(path) in Path("/proc/self/maps").read_text())
        nn.Module.load_state_dict(model, state)

    monkeypatch.setattr(model, "load_state_dict", load)
    weights.load_weights(model, path)
    assert mapped == [True]


def test_weights_of_another_model_are_a_value_error(tmp_path):
    path = tmp_path / "last.pt"
    model, before = nn.Linear(3, 2), nn.Linear(3, 2)
    model.load_state_dict(before.state_dict())
    for state, said in (
        (nn.Linear(3, 4).state_dict(), "holds another model's weights"),
        ({"module.weight": torch.zeros(2, 3)}, "names begin with 'module.'"),
        ({"_orig_mod.weight": torch.zeros(2, 3)}, "names contain '_orig_mod.'"),
        ({"step": 3, "model": model.state_dict()}, "its entry 'model' may be them"),
        ([1, 2], "holds another model's weights"),
    ):
        weights.save(state, path)
        with pytest.raises(ValueError, match=f"last.pt .*{said}"):
            weights.load_weights(model, path)
    with pytest.raises(ValueError, match="none.pt is missing"):
        weights.load_weights(model, tmp_path / "none.pt")
    weights.save(before.state_dict(), path)
    weights.load_weights(model, path)
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)
