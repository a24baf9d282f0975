"""The data sets: torchvision's, random images for benchmarks, and text.

Images are uint8 until they are on the device, where `normalize` makes floats of them.
A text is a sequence of bytes; a sample is a window of it.

A training set has an attribute `epoch`, which the training loop sets. The random crop
and flip of an image depend on the seed, the epoch and the image's index, and on nothing
else; where a text is cut into windows depends on the seed and the epoch. So both are
the same on any number of processes and of DataLoader workers.
"""

import functools
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torchvision
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from common.args import fail

# Mean and standard deviation of each set's training images, per channel, on the scale 0
# to 1.
STATISTICS = {
    "digits": ((0.3055,), (0.3759,)),
    "fashionmnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "fake": ((0.5, 0.5, 0.5), (0.2887, 0.2887, 0.2887)),
}


@functools.cache  # otherwise each batch waits for two tensors to be sent to the GPU
def statistics(name, device, dtype):
    """Return the mean and standard deviation of a set's pixels, 0 to 255: [C, 1, 1]."""
    on_device = torch.tensor(STATISTICS[name], dtype=dtype, device=device) * 255
    return on_device[:, :, None, None].unbind()


def normalize(args, images):
    """Return uint8 images [B, C, H, W] of --data as floats, on the device they are on.

    Each channel has mean 0 and standard deviation 1 over the training set.
    """
    mean, std = statistics(args.data, images.device, args.dtype)
    return (images.to(args.dtype) - mean) / std


def derive_seed(*key):
    """Return a seed, 0 to 2**32 - 1, that depends on all the integers of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


@contextmanager
def seeded(*key):
    """Draw from torch's CPU generator as if it had just been seeded with `key`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(*key))
        yield


def random_integers(n, *key, indices):
    """Return int64 [n, B]: `n` random numbers, 0 to 2**32 - 1, for each of B indices.

    They depend on the integers of `key` and on the index alone. This is a counter-based
    generator, SplitMix64 (Steele, Lea and Flood, 2014): drawing for a whole batch takes
    a few operations on arrays, whatever was drawn before.
    """
    start = np.random.SeedSequence(key).generate_state(1, np.uint64)
    first = np.asarray(indices, np.uint64) * np.uint64(n)
    x = first + np.arange(1, n + 1, dtype=np.uint64)[:, None]
    x = x * np.uint64(0x9E3779B97F4A7C15) + start
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(32)).astype(np.int64)


class SharedEpoch:
    """Gives a data set an `epoch` that DataLoader workers see when it is set.

    Workers that live longer than an epoch have a copy of the data set from before. The
    number is therefore kept in memory that all of them share.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self):
        return int(self.shared.numpy())  # int(tensor) would count as a wait

    @epoch.setter
    def epoch(self, value):
        self.shared.fill_(value)


class ImagesInMemory(SharedEpoch, Dataset):
    """A small data set, held as one uint8 tensor and fetched a batch at a time.

    images: uint8 [N, C, H, W]; labels: int64 [N]; classes: their number; padding: zero
    pixels around an image before its random crop and flip; 0 for neither.
    """

    def __init__(self, images, labels, classes, padding=0, seed=0):
        super().__init__()
        # The order in memory is [N, H, W, C], torch's channels_last, so that the crop
        # of a batch copies whole rows of pixels.
        self.pixels = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
        if padding:
            border = (padding, padding)
            self.pixels = np.pad(self.pixels, ((0, 0), border, border, (0, 0)))
        height, width = images.shape[2:]
        inner = self.pixels[:, padding : padding + height, padding : padding + width]
        self.images = torch.from_numpy(inner).permute(0, 3, 1, 2)
        self.labels = labels
        self.classes = classes
        self.padding = padding
        self.seed = seed

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices):
        """Return a batch: images, uint8 [B, C, H, W], and labels, int64 [B]."""
        images = self.augmented(indices) if self.padding else self.pixels[indices]
        return torch.from_numpy(images).permute(0, 3, 1, 2), self.labels[indices]

    def augmented(self, indices):
        """Return a random crop of each image, half of them mirrored: [B, H, W, C]."""
        channels, height, width = self.images.shape[1:]
        down, right, flip = random_integers(3, self.seed, self.epoch, indices=indices)
        positions = 2 * self.padding + 1
        # Pixels and channels as one dimension: a row of a crop is one piece of memory.
        rows = self.pixels.reshape(*self.pixels.shape[:2], -1)
        crops = sliding_window_view(rows, (height, width * channels), axis=(1, 2))
        right = (right * positions >> 32) * channels
        images = crops[indices, down * positions >> 32, right]
        images = images.reshape(-1, height, width, channels)
        mirrored = np.flatnonzero(flip & 1)
        # Not images[mirrored, :, ::-1], with which NumPy takes five times as long.
        images[mirrored] = torch.from_numpy(images[mirrored]).flip(2).numpy()
        return images


def read_image(path):
    """Return the image in a file as uint8 [3, H, W]."""
    try:
        image = torchvision.io.decode_image(path, mode="RGB")  # faster than Pillow
    except (RuntimeError, AttributeError):
        # It does not read every format, and is to leave torchvision after 0.29.
        return v2.functional.pil_to_tensor(datasets.folder.pil_loader(path))
    return v2.functional.to_dtype(image, torch.uint8, scale=True)  # from 16 bits


class ImagesInFolder(SharedEpoch, datasets.ImageFolder):
    """torchvision's ImageFolder, its crops and flips drawn as described above."""

    def __init__(self, root, transform, seed=0):
        super().__init__(root, transform, None, read_image)
        self.seed = seed

    def __getitem__(self, index):
        with seeded(self.seed, self.epoch, index):
            return super().__getitem__(index)


class TextInMemory(SharedEpoch, Dataset):
    """A text, cut into windows; a language model predicts each window's next bytes.

    text: uint8 [N]; context_length: T, the length of a window; recut: cut every epoch
    at other places, as fits a training set. Then the first window begins at one of the
    first T bytes, at a different one in each of T epochs, so that a byte is not always
    predicted from the same part of what is before it. In an epoch, no byte is in the
    inputs twice, and none is a target twice. A rest that is too short is left out.

    classes: the number of tokens; each of a byte's 256 values is one.
    """

    classes = 256

    def __init__(self, text, context_length, recut=False, seed=0):
        super().__init__()
        self.text = text
        self.context_length = context_length
        # NumPy does not change what this generator draws.
        places = np.random.RandomState(seed).permutation(context_length)
        self.places = places if recut else places[:0]

    def __len__(self):
        # As many in every epoch, wherever its first window begins.
        most = max(len(self.places) - 1, 0)
        return max(len(self.text) - 1 - most, 0) // self.context_length

    def first(self):
        """Return where the first window of this epoch begins."""
        if len(self.places) == 0:
            return 0
        return int(self.places[self.epoch % len(self.places)])

    def __getitem__(self, index):
        tokens, target = self.__getitems__([index])
        return tokens[0], target[0]

    def __getitems__(self, indices):
        """Return a batch: tokens, and the token after each, both int64 [B, T]."""
        indices = torch.as_tensor(indices, dtype=torch.int64)  # there can be none
        starts = self.first() + indices * self.context_length
        positions = starts[:, None] + torch.arange(self.context_length + 1)
        windows = self.text[positions].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_text(args):
    """Return the training set, of nine tenths of --text-file, and the validation set.

    Without --text-file it is common/text.txt, which is taken from this tutorial. Any
    file will do: its bytes are the tokens. One that cannot be read, or that is too
    short for a global batch or for a window to validate on, ends the program with one
    line.
    """
    path = args.text_file or Path(__file__).with_name("text.txt")
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        fail(f"--text-file {path}: {error.strerror}")
    text = torch.from_numpy(content)
    end = len(text) * 9 // 10
    train_set = TextInMemory(text[:end], args.context_length, True, args.seed)
    val_set = TextInMemory(text[end:], args.context_length)
    windows = f"windows of --context-length {args.context_length}"
    if len(val_set) == 0:
        fail(f"--text-file {path}: {len(text)} bytes are too few for {windows}")
    if len(train_set) < args.batch_size:
        fail(
            f"--batch-size {args.batch_size}: the training part of --text-file {path}"
            f" has only {len(train_set)} {windows}"
        )
    return train_set, val_set


def digits():
    """Return (images, labels) of 1,500 training and 297 validation images, 8 x 8.

    These are scikit-learn's digits (E. Alpaydin and C. Kaynak, UCI, 1998, CC BY 4.0),
    kept in a file because importing scikit-learn takes seconds. The split does not
    depend on --seed, and no image is on both sides.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    # NumPy does not change what this generator draws.
    order = np.random.RandomState(0).permutation(len(images))
    images = torch.from_numpy((images / 16 * 255).round().astype(np.uint8)[order])
    images, labels = images.reshape(-1, 1, 8, 8), torch.from_numpy(labels[order])
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def fake(args):
    """Return (images, labels) for training, and a fifth as many for validation."""
    generator = np.random.default_rng(args.seed)

    def make(n):
        shape = (n, args.image_size, args.image_size, 3)
        images = generator.integers(256, size=shape, dtype=np.uint8)
        labels = generator.integers(10, size=n)
        return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)

    return make(args.images), make(max(1, args.images // 5))


def downloaded(kind, args):
    """Return (images, labels) of a torchvision data set: training, then test."""
    parts = []
    for train in (True, False):
        try:
            part = kind(args.data_dir, train=train, download=args.download)
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            fail(f"--data {args.data}: not readable in {args.data_dir} ({reason})")
        images = torch.as_tensor(part.data)
        if images.dim() == 3:
            images = images[..., None]
        images = images.permute(0, 3, 1, 2)
        parts.append((images, torch.as_tensor(part.targets)))
    return parts


def image_folder(args):
    """Return the sets of a folder in ImageNet's layout: train/CLASS/*, val/CLASS/*."""
    augment = [v2.RandomResizedCrop(args.image_size), v2.RandomHorizontalFlip()]
    center = [v2.Resize(args.image_size * 8 // 7), v2.CenterCrop(args.image_size)]
    try:
        train_set = ImagesInFolder(
            args.data_dir / "train", v2.Compose(augment), args.seed
        )
        val_set = ImagesInFolder(args.data_dir / "val", v2.Compose(center))
    except OSError as error:
        fail(f"--data-dir {args.data_dir}: {error}".splitlines()[0])
    if train_set.classes != val_set.classes:
        fail(f"--data-dir {args.data_dir}: train and val do not have the same classes")
    train_set.classes = val_set.classes = len(train_set.classes)
    return train_set, val_set


def load_data(args):
    """Return the training and the validation set that the flags name.

    Both have `classes`, the number of classes. Nothing is downloaded without
    --download. A folder that is missing or corrupt, or a training set smaller than one
    global batch, ends the program with one line.
    """
    if args.data == "imagefolder":
        train_set, val_set = image_folder(args)
    else:
        kinds = {
            "fashionmnist": datasets.FashionMNIST,
            "cifar10": datasets.CIFAR10,
            "cifar100": datasets.CIFAR100,
        }
        if args.data == "digits":
            train, val = digits()
        elif args.data == "fake":
            train, val = fake(args)
        else:
            train, val = downloaded(kinds[args.data], args)
        classes = 100 if args.data == "cifar100" else 10
        padding = 4 if args.data.startswith("cifar") else 0
        train_set = ImagesInMemory(*train, classes, padding, args.seed)
        val_set = ImagesInMemory(*val, classes)
    if len(train_set) < args.batch_size:
        fail(
            f"--batch-size {args.batch_size}: the training set has only"
            f" {len(train_set)} images"
        )
    return train_set, val_set
