"""The parts that all stages share: meters, model, schedule, files."""

import fcntl
import os
import pickle
import resource
import struct
import sys
import termios

import pytest
import torch
import torchvision
from torch import nn

from common import checkpoint
from common import data
from common import launch
from common import lr_schedule
from common import meters
from common.args import ArgumentParser
from common.model import make_model
from tests.training import assert_one_error_line
from tests.training import load_stage
from tests.training import run_stage
from tests.training import train_in_forks
from tools.stages import first_with

FIRST = first_with("images")


def arguments(*words):
    return ArgumentParser("").parse_args(["--device", "cpu", *map(str, words)])


def test_accuracy_by_hand():
    output = torch.tensor([[9.0, 1, 0], [0, 9, 1], [1, 0, 9], [5, 9, 1]])
    target = torch.tensor([0, 2, 1, 0])
    assert meters.num_correct(output, target, topk=(1, 2, 3)).tolist() == [1, 3, 4]
    assert meters.accuracy(output, target, topk=(1, 2)).tolist() == [25, 75]
    fewer_classes_than_k = meters.num_correct(output, target, topk=(5,))
    assert fewer_classes_than_k.tolist() == [4]


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


def test_progress_goes_to_standard_error_and_only_where_asked(capsys):
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    meter = meters.Meter("cpu")
    for show in (True, False):
        for _ in meters.progress(loader, "epoch 7", meter, show=show):
            meter.update(torch.tensor(1.0), torch.eye(3), torch.arange(3))
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("epoch 7 3/3  data ") and " loss 1.000 acc@1 100.00" in line


def test_a_terminal_gets_a_bar(monkeypatch):
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for _ in meters.progress(loader, "epoch 1", meters.Meter("cpu")):
            pass
        screen = os.read(ours, 1000)
    os.close(ours)
    assert b"epoch 1:   0%|" in screen


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


def test_the_default_model_has_nothing_that_a_split_batch_changes():
    model = make_model(arguments(), data.load_data(arguments())[0])
    batch_norm = nn.modules.batchnorm._BatchNorm
    assert not [m for m in model.modules() if isinstance(m, batch_norm)]
    assert not [m for m in model.modules() if isinstance(m, (nn.Dropout, nn.ReLU))]
    model.double()
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    halves = torch.cat([model(images[:2]), model(images[2:])])
    assert torch.allclose(model(images), halves)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_stage_sets_what_the_flags_say_of_a_gpu(tf32, deterministic):
    """By default no TF32, and the same bits every time."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32
    flags = [*(["--tf32"] * tf32), *(["--no-deterministic"] * (not deterministic))]
    try:
        load_stage(FIRST).setup(arguments(*flags))
        assert cudnn.deterministic == deterministic
        assert cudnn.allow_tf32 == matmul.allow_tf32 == tf32
    finally:
        cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before


@pytest.mark.parametrize("name", ["channels_last", "contiguous"])
def test_a_stage_trains_in_the_memory_format_asked_for(name, device, tmp_path):
    flags = ["--epochs", "1", "--memory-format", name, "--device", device]
    done = train_in_forks(FIRST, 1, flags, tmp_path)
    weights = checkpoint.load(done.weights).values()
    kernels = [w for w in weights if w.dim() == 4 and w.shape[1] > 1 and w.shape[2] > 1]
    assert len(kernels) == 6  # a kernel of one channel, or of one pixel, is both
    for kernel in kernels:
        assert kernel.is_contiguous() == (name == "contiguous")
        is_last = kernel.is_contiguous(memory_format=torch.channels_last)
        assert is_last == (name == "channels_last")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_that_tensors_free_is_kept():
    """Ten tensors of 4 MB, ten times, are 100,000 pages if each is fetched anew."""
    launch.keep_freed_memory()

    def fill():
        return [torch.ones(2**20) for _ in range(10)]

    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        fill()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000


@pytest.mark.parametrize(
    "arch", ["resnet18", "mobilenet_v3_small", "squeezenet1_1", "vit_b_32"]
)
def test_torchvision_models_by_name(arch):
    fake = ("--data", "fake", "--image-size", 64, "--images", 60)
    args = arguments("--arch", arch, *fake)
    train_set, _ = data.load_data(args)
    images = data.normalize(args, train_set.__getitems__([0, 1])[0])
    assert make_model(args, train_set).eval()(images).shape == (2, 10)


def test_a_resnet_for_small_gray_images_keeps_their_size():
    model = make_model(arguments("--arch", "resnet18"), data.load_data(arguments())[0])
    assert model.conv1.in_channels == 1 and model.conv1.stride == (1, 1)
    features = model.layer1(model.maxpool(model.conv1(torch.zeros(1, 1, 8, 8))))
    assert features.shape[2:] == (8, 8)


def test_pretrained_keeps_all_but_the_last_layer(monkeypatch):
    """Without a network: torchvision's download is replaced by weights made here."""
    source = torchvision.models.resnet18()
    monkeypatch.setattr(
        torchvision.models._api.WeightsEnum,
        "get_state_dict",
        lambda *_, **__: source.state_dict(),
    )
    args = arguments("--arch", "resnet18", "--pretrained")
    model = make_model(args, data.load_data(args)[0])
    assert model.fc.out_features == 10
    assert torch.equal(model.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    gray = source.conv1.weight.sum(dim=1, keepdim=True)  # the image, in three channels
    assert torch.allclose(model.conv1.weight, gray, atol=1e-6)


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
        weights = torch.load(path, weights_only=True)
        assert not [name for name in weights if name.startswith("module.")]
        assert all(tensor.device.type == "cpu" for tensor in weights.values())


def test_evaluate_only_evaluates(done, tmp_path, device):
    best = max(done.rows, key=lambda row: row["val"]["acc1"])["val"]
    flags = ["--evaluate", done.weights.parent / "best.pt", "--device", device]
    flags += ["--out-dir", tmp_path / "out"]
    again = run_stage(FIRST, 1, flags, tmp_path)
    assert again.stdout == f"val {meters.format_metrics(best)}\n"
    assert not (tmp_path / "out").exists()


def test_a_prefix_of_a_wrapper_is_named(tmp_path):
    checkpoint.save({"module.weight": torch.zeros(3, 2)}, tmp_path / "wrapped.pt")
    flags = ["--evaluate", tmp_path / "wrapped.pt", "--device", "cpu"]
    done = run_stage(FIRST, 1, flags, tmp_path, code=2)
    assert_one_error_line(done, "its names begin with 'module.'")


def save_epoch(folder, epoch, acc1):
    metrics, weights = (
        {"loss": 1.0, "acc1": acc1},
        {"w": torch.full((2,), float(epoch))},
    )
    checkpoint.save_epoch(folder, epoch, metrics, metrics, weights)


def test_save_epoch_keeps_the_best_and_drops_what_an_earlier_run_left(tmp_path):
    for epoch, acc1 in ((1, 50.0), (2, 70.0), (3, 60.0)):
        save_epoch(tmp_path, epoch, acc1)
    assert checkpoint.load(tmp_path / "best.pt")["w"].tolist() == [2, 2]
    assert checkpoint.load(tmp_path / "last.pt")["w"].tolist() == [3, 3]
    save_epoch(tmp_path, 1, 40.0)
    assert [row["epoch"] for row in checkpoint.read_metrics(tmp_path)] == [1]
    assert checkpoint.load(tmp_path / "best.pt")["w"].tolist() == [1, 1]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "last.pt", "metrics.jsonl"]


def test_a_write_that_fails_leaves_the_old_file_unchanged(tmp_path):
    path = tmp_path / "last.pt"
    checkpoint.save({"w": torch.zeros(10)}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What a full disk does, without a disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            checkpoint.save({"w": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load(path)["w"].tolist() == [0] * 10
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


class Spy:
    def __reduce__(self):
        return os.mkdir, ("was-run",)


def test_loading_runs_no_code_from_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Spy(), "zip.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Spy(), protocol=2))
    for name in ("zip.pt", "pickle.pt", "none.pt"):
        with pytest.raises(ValueError, match=f"{name} is missing, truncated"):
            checkpoint.load(name)
    assert not (tmp_path / "was-run").exists()
