"""01_single_gpu/data_loading: a sample depends on seed, epoch and index alone.

And what common/data.py promises: sets are read as torchvision reads them, a damaged
image is named, and what can be downloaded is downloaded once.
"""

import contextlib
import http.server
import pickle
import re
import tarfile
import threading
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torchvision import datasets

from common import data
from common import loader
from common import text
from harness.stages import first_with
from tests.fault_injection import files_of_cifar
from tests.fault_injection import on_two_machines
from tests.training import run_stage

STATE = np.random.RandomState(0)
CIFAR = datasets.CIFAR10.base_folder
CPU = torch.device("cpu")


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """The folder of a CIFAR-10 of 40 training and 20 test images."""
    kind = datasets.CIFAR10
    folder = tmp_path / CIFAR
    folder.mkdir()
    for name, number in (("train", 40), ("test", 20)):
        labels = [i % 10 for i in range(number)]
        pixels = STATE.randint(256, size=(number, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    meta = {kind.meta["key"]: [str(i) for i in range(10)]}
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps(meta))
    for name, value in files_of_cifar().items():
        monkeypatch.setattr(kind, name, value)
    return tmp_path


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


def everything(samples):
    """Return the whole of a set, as one batch: images and labels."""
    return samples.__getitems__(list(range(len(samples))))


def test_digits_are_split_once_for_all():
    train_set, val_set = data.load("digits", seed=1)
    assert (len(train_set), len(val_set), train_set.num_classes) == (1440, 357, 10)
    images, labels = everything(train_set)
    assert torch.equal(images, everything(data.load("digits", seed=2)[0])[0])
    assert images.shape == (1440, 1, 8, 8) and images.dtype == torch.uint8
    inputs = data.normalize(images, "digits", torch.float32)
    assert inputs.shape == images.shape and inputs.dtype == torch.float32
    assert abs(inputs.mean()) < 1e-3 and abs(inputs.std() - 1) < 1e-3
    assert labels.bincount().min() > 100
    val_images, val_labels = everything(val_set)
    ours = torch.cat([images, val_images]).flatten(1) / 255 * 16
    ours = torch.cat([ours, torch.cat([labels, val_labels])[:, None]], 1)
    theirs = np.column_stack(load_digits(return_X_y=True)).astype(int).tolist()
    assert sorted(ours.round().int().tolist()) == sorted(theirs)
    pixels = {tuple(image.flatten().tolist()) for image in images}
    shared = sum(tuple(image.flatten().tolist()) in pixels for image in val_images)
    assert shared == 0


def test_augmentation_is_a_crop_of_the_padded_image_and_a_flip(cifar):
    train_set, val_set = data.load("cifar10", cifar)
    before, _ = everything(val_set)
    val_set.epoch.fill_(3)  # it is not augmented
    assert torch.equal(everything(val_set)[0], before)
    stored = pickle.loads((cifar / CIFAR / "train").read_bytes())
    pixels = torch.from_numpy(stored["data"]).reshape(40, 3, 32, 32)
    originals = torch.nn.functional.pad(pixels, [4] * 4)
    seen = set()
    for epoch in range(20):
        train_set.epoch.fill_(epoch)
        images, labels = everything(train_set)
        assert labels.tolist() == stored["labels"]
        for image, original in zip(images, originals, strict=True):
            crops = original.unfold(1, 32, 1).unfold(2, 32, 1)  # [C, 9, 9, 32, 32]
            for flip, one in enumerate((image, image.flip(2))):
                same = (crops == one[:, None, None]).all(-1).all(-1).all(0)
                seen |= {(flip, *place) for place in same.nonzero().tolist()}
    # 800 draws of 162 equally likely results: 161 are expected, and 150 for certain.
    assert len(seen) > 150


@pytest.fixture
def in_memory(cifar):
    return lambda seed=0: data.load("cifar10", cifar, seed=seed)[0]


@pytest.fixture
def in_files(folder_of_images):
    return lambda seed=0: data.load(
        "imagefolder", folder_of_images, image_size=32, seed=seed
    )[0]


@pytest.fixture
def of_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(250)))
    return lambda seed=0: text.load(path, 7, seed)[0]


KINDS = ["in_memory", "in_files", "of_text"]


@pytest.fixture
def make_set(request):
    """Return a function that makes a training set, of a seed: one of KINDS."""
    return request.getfixturevalue(request.param)


def epoch_of(train_set, epoch, processes=1, workers=0):
    """Return the samples of an epoch as they come to the ranks, in order: [N, ...]."""
    train_set.epoch.fill_(epoch)
    parts = []
    for rank in range(processes):
        sampler = DistributedSampler(train_set, processes, rank, shuffle=False)
        options = loader.loader_options(CPU, workers)
        batches = DataLoader(train_set, 4, sampler=sampler, **options)
        parts.append(torch.cat([samples for samples, _ in batches]))
    return torch.stack(parts, 1).flatten(0, 1)[: len(train_set)]


def number_equal(one, other):
    return sum(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make_set", KINDS, indirect=True)
def test_samples_depend_on_seed_epoch_and_index_alone(make_set):
    """However they are split over ranks and workers, and whatever else is drawn."""
    train_set = make_set()
    first = epoch_of(train_set, 1)
    second = epoch_of(train_set, 2)
    before = torch.default_generator.get_state()
    assert torch.equal(train_set[5][0], second[5])
    assert torch.equal(before, torch.default_generator.get_state())
    for processes, workers in ((2, 0), (3, 0), (1, 2), (2, 1)):
        assert torch.equal(epoch_of(train_set, 1, processes, workers), first)
    assert torch.equal(epoch_of(make_set(), 2), second)
    assert number_equal(first, second) < len(first) / 4
    others = [epoch_of(make_set(seed), 1) for seed in (1, 2, 3)]
    assert min(number_equal(first, other) for other in others) < len(first) / 4


@pytest.mark.parametrize("make_set", KINDS, indirect=True)
def test_workers_that_live_longer_than_an_epoch_see_the_next_one(make_set):
    train_set = make_set()
    options = loader.loader_options(CPU, 2)
    assert options["persistent_workers"]
    batches = DataLoader(train_set, 10, **options)
    for epoch in (3, 4):
        train_set.epoch.fill_(epoch)
        samples = torch.cat([samples for samples, _ in batches])
        assert torch.equal(samples, epoch_of(train_set, epoch))


GRAY = np.linspace(0, 255, 12 * 8).round().reshape(12, 8).astype(np.uint8)


@pytest.mark.parametrize(
    "name, mode",
    [("a.jpg", "RGB"), ("a.tiff", "L")],
)
def test_an_image_file_of_any_kind_is_read(name, mode, tmp_path):
    """A gray one has three equal channels."""
    gray = GRAY
    Image.fromarray(gray).convert(mode).save(tmp_path / name)
    image = data.read_image(str(tmp_path / name))
    assert image.shape == (3, 12, 8) and image.dtype == torch.uint8
    worst = (image.int() - torch.from_numpy(gray.astype(int))).abs().max()
    assert worst <= (6 if name.endswith("jpg") else 0)


def test_an_image_of_more_than_8_bits_is_refused_by_its_name(tmp_path):
    """Pillow would cut off what is above 255."""
    path = tmp_path / "a.tiff"
    Image.fromarray(GRAY.astype(np.uint16)).save(path)
    with pytest.raises(ValueError, match=rf"^{path}: save it with 8 bits"):
        data.read_image(str(path))


@pytest.mark.parametrize("part, workers", [("train", 0), ("val", 1)])
def test_a_damaged_image_is_one_line_with_its_name(
    part, workers, folder_of_images, tmp_path
):
    """Also the first one, and one that a loader's worker reads."""
    (path,) = sorted((folder_of_images / part).rglob("*.*"))[:1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    flags = ["--data", "imagefolder", "--data-dir", folder_of_images, "--device", "cpu"]
    flags += ["--image-size", "32", "--batch-size", "12", "--workers", workers]
    done = run_stage(first_with("images"), 1, flags, tmp_path / "run", code=2)
    *progress, line = done.stderr.splitlines()
    assert len(progress) == (part == "val")  # the line of the epoch
    assert line.startswith(f"train.py: error: --data: {path}: ")
    assert re.search("truncated|cannot identify", line)


def test_fingerprints_tell_training_sets_apart(cifar, folder_of_images, tmp_path):
    """Of images in memory each pixel and label counts, of files their names."""

    def of_cifar():
        return data.load("cifar10", cifar)[0].fingerprint()

    def of_files():
        return data.load("imagefolder", folder_of_images)[0].fingerprint()

    def of_text(content):
        (tmp_path / "text").write_bytes(content)
        return text.load(tmp_path / "text", 4)[0].fingerprint()

    assert of_cifar() == of_cifar() and of_files() == of_files()
    before = of_cifar(), of_files(), of_text(b"a" * 100)
    stored = pickle.loads((cifar / CIFAR / "train").read_bytes())
    stored["labels"][7] += 1
    (cifar / CIFAR / "train").write_bytes(pickle.dumps(stored))
    path = sorted((folder_of_images / "train").rglob("*.*"))[3]
    path.rename(path.with_name(f"another{path.suffix}"))
    after = of_cifar(), of_files(), of_text(b"a" * 88 + b"b" + b"a" * 11)
    assert not any(one == other for one, other in zip(before, after, strict=True))
    stored["labels"][7] -= 1
    stored["data"][7, 3000] += 1
    (cifar / CIFAR / "train").write_bytes(pickle.dumps(stored))
    assert of_cifar() not in (before[0], after[0])


def test_an_image_folder_has_a_class_per_folder(folder_of_images):
    train_set, val_set = data.load("imagefolder", folder_of_images, image_size=32)
    assert (len(train_set), len(val_set)) == (24, 10)
    assert train_set.num_classes == val_set.num_classes == 2
    for samples, index in ((train_set, 20), (val_set, 7)):
        image, label = samples[index]
        assert image.shape == (3, 32, 32) and image.dtype == torch.uint8 and label == 1
        assert samples.image_shape == image.shape
    val_set.epoch.fill_(1)
    assert torch.equal(val_set[7][0], image)


class Counter(http.server.SimpleHTTPRequestHandler):
    """Serves files and notes the name of each that it is asked for."""

    asked = []

    def do_GET(self):
        self.asked.append(self.path.rpartition("/")[2])
        super().do_GET()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(folder):
    """Serve a folder's files on this machine; yield the address."""
    Counter.asked.clear()
    handler = partial(Counter, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("disks", [1, 2])
def test_ranks_on_two_machines_download_once_for_each_disk(disks, cifar, tmp_path):
    """From a server on this machine, which counts what it is asked for."""
    archive = datasets.CIFAR10.filename
    with tarfile.open(cifar / archive, "w:gz") as file:
        file.add(cifar / CIFAR, CIFAR)
    folders = [tmp_path / f"disk{machine % disks}" for machine in range(2)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    with serving(cifar) as url:
        flags = ["--data", "cifar10", "--data-dir", "data", "--download"]
        flags += ["--batch-size", "12", "--epochs", "1", "--device", "cpu"]
        prepare = partial(on_two_machines, folders, url)
        done = run_stage(
            first_with("torchrun"), 4, flags, tmp_path / "run", prepare=prepare
        )
    assert "4 processes on gloo" in done.ranks[0].stdout
    assert not any(one.stdout for one in done.ranks[1:])
    # torchvision asks twice for a file that it downloads once: the first time to see
    # where the address leads.
    assert Counter.asked == [archive] * 2 * disks
