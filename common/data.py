"""The sets of images: digits, CIFAR-10, a folder of files, and random ones.

Images are uint8 until they are on the device, where `normalize` makes floats of them.
The random crop and flip of an image depend on the seed, the epoch and the image's index
alone: they are the same on any number of processes and of DataLoader workers. The epoch
is a number in shared memory, so that workers see it change: `train_set.epoch.fill_(3)`.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from common.loader import SampleError
from common.loader import derive_seed
from common.loader import shared_epoch

# Mean and standard deviation of each set's training images, per channel, on the scale 0
# to 1.
STATISTICS = {
    "digits": ((0.3055,), (0.3759,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "fake": ((0.5, 0.5, 0.5), (0.2887, 0.2887, 0.2887)),
}


@functools.cache  # otherwise each batch waits for two tensors to be sent to the GPU
def statistics(name, device, dtype):
    """Return the mean and standard deviation of a set's pixels, 0 to 255: [C, 1, 1]."""
    on_device = torch.tensor(STATISTICS[name], dtype=dtype, device=device) * 255
    return on_device[:, :, None, None].unbind()


def normalize(images, name, dtype):
    """Return uint8 images [B, C, H, W] of a set as floats, on the device they are on.

    Each channel has mean 0 and standard deviation 1 over the training set.
    """
    mean, std = statistics(name, images.device, dtype)
    return (images.to(dtype) - mean) / std


class ImagesInMemory(Dataset):
    """A small data set, held as one uint8 array and fetched a batch at a time.

    images: uint8 [N, C, H, W]; labels: int64 [N]; padding: zero pixels around an image
    before its random crop and flip; 0 for neither.
    """

    def __init__(self, images, labels, num_classes, padding=0, seed=0):
        # The order in memory is [N, H, W, C], torch's channels_last: a row of a crop is
        # one piece.
        pixels = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
        height, width, channels = pixels.shape[1:]
        self.image_shape = (channels, height, width)
        border = (padding, padding)
        self.pixels = np.pad(pixels, ((0, 0), border, border, (0, 0)))
        self.labels = labels
        self.num_classes = num_classes
        self.padding = padding
        self.seed = seed
        self.epoch = shared_epoch()
        self.drawn_epoch = None

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices):
        """Return a batch: images, uint8 [B, C, H, W], and labels, int64 [B]."""
        images = self.augmented(indices) if self.padding else self.pixels[indices]
        return torch.from_numpy(images).permute(0, 3, 1, 2), self.labels[indices]

    def fingerprint(self):
        """Return a text that differs if an image or a label does."""
        found = hashlib.sha256(self.pixels)
        found.update(self.labels.numpy())
        return found.hexdigest()

    def offsets(self):
        """Return this epoch's int64 [N, 3]: rows and columns to cut off, and mirroring.

        It is drawn for the whole set, so that an image's row does not depend on the
        batch or the process that the image is in.
        """
        epoch = int(self.epoch.numpy())
        if epoch != self.drawn_epoch:
            generator = np.random.default_rng((self.seed, epoch))
            ends = [2 * self.padding + 1, 2 * self.padding + 1, 2]
            self.table = generator.integers(ends, size=(len(self), 3))
            self.drawn_epoch = epoch
        return self.table

    def augmented(self, indices):
        """Return a random crop of each image, half of them mirrored: [B, H, W, C]."""
        channels, height, width = self.image_shape
        offsets = self.offsets()[indices]
        images = np.empty((len(indices), height, width, channels), np.uint8)
        crops = zip(images, indices, offsets.tolist(), strict=True)
        for image, index, (down, right, _) in crops:
            image[:] = self.pixels[index, down : down + height, right : right + width]
        mirrored = np.flatnonzero(offsets[:, 2])
        # Not images[mirrored, :, ::-1], with which NumPy takes five times as long.
        images[mirrored] = torch.from_numpy(images[mirrored]).flip(2).numpy()
        return images


def read_image(path):
    """Return the image in a file as uint8 [3, H, W].

    Raises SampleError, with the file's name, if it cannot.
    """
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would cut off what is above 255
                raise ValueError("save it with 8 bits per pixel and channel")
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise SampleError(f"{path}: {error}") from error


class ImagesInFolder(datasets.ImageFolder):
    """torchvision's ImageFolder, its crops and flips drawn as described above."""

    def __init__(self, root, transform, size, seed=0):
        super().__init__(root, transform, None, read_image)
        self.image_shape = (3, size, size)
        self.num_classes = len(self.classes)
        self.seed = seed
        self.epoch = shared_epoch()

    def fingerprint(self):
        """Return a text that differs if the name or the class of a file does."""
        names = (f"{Path(p).relative_to(self.root)} {n}\n" for p, n in self.samples)
        return hashlib.sha256(
            "".join(names).encode(errors="surrogateescape")
        ).hexdigest()

    def __getitem__(self, index):
        seed = derive_seed(self.seed, int(self.epoch.numpy()), index)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return super().__getitem__(index)


def digits():
    """Return (images, labels) of 1,440 training and 357 validation images, 8 x 8.

    These are scikit-learn's digits (E. Alpaydin and C. Kaynak, UCI, 1998, CC BY 4.0),
    kept in a file because importing scikit-learn takes seconds. The split is always the
    same, and no image is on both sides.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    # NumPy does not change what this generator draws.
    order = np.random.RandomState(0).permutation(len(images))
    images = torch.from_numpy((images / 16 * 255).round().astype(np.uint8)[order])
    images, labels = images.reshape(-1, 1, 8, 8), torch.from_numpy(labels[order])
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


def random_images(count, size, seed):
    """Return (images, labels) for training, and a fifth as many for validation."""
    generator = np.random.default_rng(seed)
    parts = []
    for n in (count, max(1, count // 5)):
        images = generator.integers(256, size=(n, size, size, 3), dtype=np.uint8)
        labels = torch.from_numpy(generator.integers(10, size=n))
        parts.append((torch.from_numpy(images).permute(0, 3, 1, 2), labels))
    return parts


def cifar10(folder, download):
    """Return (images, labels) of torchvision's CIFAR-10: training, then test."""
    parts = []
    for train in (True, False):
        try:
            part = datasets.CIFAR10(folder, train=train, download=download)
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"not readable in {folder} ({error!r})") from error
        images = torch.from_numpy(part.data).permute(0, 3, 1, 2)
        parts.append((images, torch.as_tensor(part.targets)))
    return parts


def image_folder(folder, size, seed):
    """Return the sets of a folder in ImageNet's layout: train/CLASS/*, val/CLASS/*."""
    augment = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    center = [v2.Resize(size * 8 // 7), v2.CenterCrop(size)]
    train_set = ImagesInFolder(Path(folder, "train"), v2.Compose(augment), size, seed)
    val_set = ImagesInFolder(Path(folder, "val"), v2.Compose(center), size)
    if train_set.classes != val_set.classes:
        raise ValueError(f"{folder}: train and val do not have the same classes")
    return train_set, val_set


def load(name, folder=None, download=False, image_size=224, num_images=1000, seed=0):
    """Return the training and the validation set of that name.

    name: a key of STATISTICS; folder: where its files are, or are downloaded to;
    image_size and num_images: of imagefolder and fake, in pixels and of fake. Raises
    OSError or ValueError if the files are missing or corrupt.
    """
    if name == "imagefolder":
        return image_folder(folder, image_size, seed)
    if name == "digits":
        train, val = digits()
    elif name == "fake":
        train, val = random_images(num_images, image_size, seed)
    else:
        train, val = cifar10(folder, download)
    padding = 4 if name == "cifar10" else 0
    train_set = ImagesInMemory(*train, 10, padding, seed)
    return train_set, ImagesInMemory(*val, 10)
