"""The data sets, in torchvision's own file formats, read by its own classes."""

import gzip
import http.server
import pickle
import struct
import threading
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision import datasets

from common import data
from common import loader
from common.args import ArgumentParser
from tests.conftest import only_in_sweep
from tests.fault_injection import use_mirror
from tests.training import run_stage
from tools.stages import first_with
from tools.stages import with_feature

STATE = np.random.RandomState(0)


def arguments(*words):
    return ArgumentParser("").parse_args(["--device", "cpu", *map(str, words)])


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """The folder of a CIFAR-10 and a CIFAR-100 of 40 training and 20 test images."""
    for kind, key, classes in (
        (datasets.CIFAR10, "labels", 10),
        (datasets.CIFAR100, "fine_labels", 100),
    ):
        folder = tmp_path / kind.base_folder
        folder.mkdir()
        for name, number in (("train", 40), ("test", 20)):
            labels = [i % classes for i in range(number)]
            pixels = STATE.randint(256, size=(number, 3072), dtype=np.uint8)
            (folder / name).write_bytes(pickle.dumps({"data": pixels, key: labels}))
        meta = {kind.meta["key"]: [str(i) for i in range(classes)]}
        (folder / kind.meta["filename"]).write_bytes(pickle.dumps(meta))
        # The class checks the MD5 of its files; ours have a different one.
        monkeypatch.setattr(kind, "train_list", [["train", None]])
        monkeypatch.setattr(kind, "test_list", [["test", None]])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    return tmp_path


def idx(array):
    """Return an array of bytes in MNIST's idx format."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def fashion_files():
    """Return {name: content} of a FashionMNIST of 120 training and 30 test images."""
    files = {}
    for name, number in (("train", 120), ("t10k", 30)):
        images = STATE.randint(256, size=(number, 28, 28), dtype=np.uint8)
        files[f"{name}-images-idx3-ubyte"] = idx(images)
        files[f"{name}-labels-idx1-ubyte"] = idx(np.arange(number, dtype=np.uint8) % 10)
    return files


@pytest.fixture
def folder_of_images(tmp_path):
    """An image folder in ImageNet's layout: two classes, images of several sizes."""
    for part, number in (("train", 12), ("val", 5)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = STATE.randint(256, size=(20 + i, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def test_digits_are_split_once_for_all():
    args = arguments("--seed", 1)
    train_set, val_set = data.load_data(args)
    assert (len(train_set), len(val_set), train_set.classes) == (1500, 297, 10)
    again, _ = data.load_data(arguments("--seed", 2))
    assert torch.equal(train_set.images, again.images)
    images, labels = train_set.__getitems__(list(range(1500)))
    assert images.shape == (1500, 1, 8, 8) and images.dtype == torch.uint8
    inputs = data.normalize(args, images)
    assert inputs.shape == images.shape and inputs.dtype == torch.float32
    assert abs(inputs.mean()) < 1e-3 and abs(inputs.std() - 1) < 1e-3
    assert labels.bincount().min() > 100
    ours = torch.cat([train_set.images, val_set.images]).flatten(1) / 255 * 16
    ours = torch.cat([ours, torch.cat([train_set.labels, val_set.labels])[:, None]], 1)
    theirs = np.column_stack(load_digits(return_X_y=True)).astype(int).tolist()
    assert sorted(ours.round().int().tolist()) == sorted(theirs)
    pixels = {tuple(image.flatten().tolist()) for image in train_set.images}
    shared = sum(tuple(image.flatten().tolist()) in pixels for image in val_set.images)
    assert shared == 0


@pytest.mark.parametrize("name, classes", [("cifar10", 10), ("cifar100", 100)])
def test_cifar(name, classes, cifar):
    options = ("--data", name, "--data-dir", cifar, "--batch-size", 10)
    args = arguments(*options, "--dtype", "float64")
    train_set, val_set = data.load_data(args)
    assert (len(train_set), len(val_set), train_set.classes) == (40, 20, classes)
    assert train_set.images.dtype == torch.uint8
    assert train_set.images.shape == (40, 3, 32, 32)
    images, labels = val_set.__getitems__([3, 0])
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [3, 0]
    mean, std = data.STATISTICS[name]
    red = val_set.images[3, 0].double() / 255
    inputs = data.normalize(args, images)
    assert inputs.dtype == torch.float64
    assert torch.allclose(inputs[0, 0], (red - mean[0]) / std[0], atol=1e-12)


def test_augmentation_is_a_crop_of_the_padded_image_and_a_flip(cifar):
    options = ("--data", "cifar10", "--data-dir", cifar, "--batch-size", 10)
    train_set, _ = data.load_data(arguments(*options))
    originals = torch.nn.functional.pad(train_set.images, [4] * 4)
    seen = set()
    for epoch in range(20):
        train_set.epoch = epoch
        images, labels = train_set.__getitems__(list(range(40)))
        assert labels.tolist() == train_set.labels.tolist()
        for image, original in zip(images, originals, strict=True):
            crops = original.unfold(1, 32, 1).unfold(2, 32, 1)  # [C, 9, 9, 32, 32]
            for flip, one in enumerate((image, image.flip(2))):
                same = (crops == one[:, None, None]).all(-1).all(-1).all(0)
                seen |= {(flip, *place) for place in same.nonzero().tolist()}
    # 800 draws of 162 equally likely results: 161 are expected, and 150 for certain.
    assert len(seen) > 150


def test_random_integers_are_uniform_and_independent():
    numbers = data.random_integers(3, 5, 1, indices=range(20_000)) / 2**32
    assert numbers.shape == (3, 20_000) and numbers.min() >= 0 and numbers.max() < 1
    # Standard errors are 0.002 and 0.007 here.
    assert abs(numbers.mean(axis=1) - 0.5).max() < 0.01
    assert abs(numbers.var(axis=1) - 1 / 12).max() < 0.003
    rows = [*numbers, *data.random_integers(3, 5, 2, indices=range(20_000))]
    correlations = np.corrcoef([*rows, np.roll(numbers[0], 1)])
    assert abs(correlations - np.eye(7)).max() < 0.035
    again = data.random_integers(3, 5, 1, indices=[7, 19_999])
    assert (again / 2**32 == numbers[:, [7, 19_999]]).all()


def test_augmentation_depends_on_seed_epoch_and_index_alone(cifar):
    options = ("--data", "cifar10", "--data-dir", cifar, "--batch-size", 10)
    train_set, _ = data.load_data(arguments(*options))
    images, _ = train_set.__getitems__(list(range(40)))
    torch.rand(7)  # whatever is drawn in between
    other_order, _ = train_set.__getitems__([5, 3])
    assert torch.equal(other_order, images[[5, 3]])
    before = torch.default_generator.get_state()
    train_set.epoch = 1
    next_epoch, _ = train_set.__getitems__(list(range(40)))
    assert torch.equal(before, torch.default_generator.get_state())
    assert sum(torch.equal(a, b) for a, b in zip(images, next_epoch, strict=True)) < 10
    other_set, _ = data.load_data(arguments(*options, "--seed", 1))
    other_seed, _ = other_set.__getitems__(list(range(40)))
    assert sum(torch.equal(a, b) for a, b in zip(images, other_seed, strict=True)) < 10


@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_change_nothing(cifar, kind, workers):
    """Workers live longer than an epoch, and see the number of the next one."""
    args = arguments("--data", "cifar10", "--data-dir", cifar, "--batch-size", 10)
    args.workers = workers
    train_set, _ = data.load_data(args)
    if kind == "text":
        text = torch.arange(210, dtype=torch.uint8)
        train_set = data.TextInMemory(text, 5, recut=True)
    options = loader.loader_options(args)
    assert options["persistent_workers"] == (workers > 0)
    batches = torch.utils.data.DataLoader(train_set, batch_size=10, **options)
    for epoch in (3, 4):
        train_set.epoch = epoch
        samples = torch.cat([batch for batch, _ in batches])
        expected, _ = train_set.__getitems__(list(range(len(train_set))))
        assert torch.equal(samples, expected)


def test_workers_by_default(monkeypatch):
    cpu, args = arguments(), arguments()
    assert loader.num_workers(cpu) == 0
    args.device = torch.device("cuda")
    assert loader.num_workers(args) == 0  # one core gathers more than a GPU trains on
    args.data = cpu.data = "imagefolder"
    assert loader.num_workers(cpu) == 0
    monkeypatch.setattr(loader.os, "sched_getaffinity", lambda _: range(16))
    for processes, workers in (("1", 8), ("4", 3), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert loader.num_workers(args) == workers
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    args.nproc = 4  # of a stage that starts the processes itself
    assert loader.num_workers(args) == 3
    args.workers = 5
    assert loader.num_workers(args) == 5


@pytest.mark.parametrize(
    "name, mode", [("a.jpg", "RGB"), ("a.png", "L"), ("a.png", "I;16"), ("a.tiff", "L")]
)
def test_an_image_file_of_any_kind_is_read(name, mode, tmp_path):
    """A gray one has three equal channels; one of 16 bits keeps the upper 8."""
    gray = np.linspace(0, 255, 12 * 8).round().reshape(12, 8).astype(np.uint8)
    pixels = {"RGB": np.stack([gray] * 3, -1), "L": gray, "I;16": gray * np.uint16(257)}
    Image.fromarray(pixels[mode]).save(tmp_path / name)
    image = data.read_image(str(tmp_path / name))
    assert image.shape == (3, 12, 8) and image.dtype == torch.uint8
    worst = (image.int() - torch.from_numpy(gray.astype(int))).abs().max()
    assert worst <= (6 if name.endswith("jpg") else 0)


def test_fashionmnist_by_the_script(tmp_path, device):
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for name, content in fashion_files().items():
        (raw / name).write_bytes(content)
    flags = ["--data", "fashionmnist", "--data-dir", tmp_path, "--epochs", "1"]
    flags += ["--device", device]
    done = run_stage(first_with("images"), 1, flags, tmp_path / "run")
    assert "epoch 1 2/2" in done.stderr


def test_image_folder_by_the_script(folder_of_images, tmp_path, device):
    flags = ["--data", "imagefolder", "--data-dir", folder_of_images, "--epochs", "1"]
    flags += ["--image-size", "32", "--batch-size", "12", "--workers", "1"]
    flags += ["--device", device]
    done = run_stage(first_with("images"), 1, flags, tmp_path / "run")
    assert "epoch 1 2/2" in done.stderr


def test_image_folder_is_cropped_at_random_but_reproducibly(folder_of_images):
    options = ["--data", "imagefolder", "--data-dir", folder_of_images]
    options += ["--image-size", 32]
    train_set, val_set = data.load_data(arguments(*options, "--batch-size", 12))
    assert (len(train_set), len(val_set), val_set.classes) == (24, 10, 2)
    image, label = train_set[20]
    assert image.shape == (3, 32, 32) and image.dtype == torch.uint8 and label == 1
    assert torch.equal(image, train_set[20][0])
    train_set.epoch = 1
    assert not torch.equal(image, train_set[20][0])


def test_fake_images_have_the_size_and_number_asked_for():
    options = ("--data", "fake", "--image-size", 16, "--images", 100)
    train_set, val_set = data.load_data(arguments(*options))
    assert train_set.images.shape == (100, 3, 16, 16) and len(val_set) == 20
    assert train_set.images.unique().numel() == 256


class Counter(http.server.SimpleHTTPRequestHandler):
    """Serves files and notes the name of each that it is asked for."""

    asked = []

    def do_GET(self):
        self.asked.append(self.path.rpartition("/")[2])
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    "stage",
    [
        only_in_sweep(stage, unless=stage == first_with("torchrun"))
        for stage in with_feature("images", "torchrun")
    ],
)
def test_three_ranks_download_once(stage, tmp_path):
    """From a server on this machine, which counts what it is asked for."""
    Counter.asked.clear()
    (tmp_path / "site").mkdir()
    for name, content in fashion_files().items():
        (tmp_path / "site" / f"{name}.gz").write_bytes(gzip.compress(content))
    handler = partial(Counter, directory=tmp_path / "site")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        flags = ["--data", "fashionmnist", "--data-dir", tmp_path / "data"]
        flags += ["--download", "--epochs", "1", "--device", "cpu"]
        prepare = partial(use_mirror, url)
        done = run_stage(stage, 3, flags, tmp_path / "run", prepare=prepare)
        server.shutdown()
    assert "3 processes on gloo" in done.ranks[0].stdout
    assert not any(one.stdout for one in done.ranks[1:])
    # torchvision asks twice for a file that it downloads once: the first time to see
    # where the address leads.
    assert sorted(Counter.asked) == sorted(
        2 * [f"{name}.gz" for name in fashion_files()]
    )
