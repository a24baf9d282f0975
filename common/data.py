"""The data sets: torchvision's, and random images for benchmarks.

A training set has an attribute `epoch`, which the training loop sets. The random crop
and flip of an image depend on the seed, the epoch and the image's index, and on nothing
else. So they are the same on any number of processes and of DataLoader workers.
"""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
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


def make_normalize(name):
    """Return a transform of uint8 images [..., C, H, W] to normalized float32."""
    mean, std = STATISTICS[name]
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


def derive_seed(*key):
    """Return a seed, 0 to 2**32 - 1, that depends on all the integers of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


@contextmanager
def seeded(*key):
    """Draw from torch's CPU generator as if it had just been seeded with `key`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(*key))
        yield


class ImagesInMemory(Dataset):
    """A small data set, held as one uint8 tensor and fetched a batch at a time.

    images: uint8 [N, C, H, W]; labels: int64 [N]; classes: their number; normalize:
    applied to a whole batch; augment: applied to each training image, or None.
    """

    def __init__(self, images, labels, classes, normalize, augment=None, seed=0):
        self.images = images
        self.labels = labels
        self.classes = classes
        self.normalize = normalize
        self.augment = augment
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices):
        """Return a batch: images, float32 [B, C, H, W], and labels, int64 [B]."""
        if self.augment:
            images = torch.stack([self.augmented(index) for index in indices])
        else:
            images = self.images[indices]
        return self.normalize(images), self.labels[indices]

    def augmented(self, index):
        with seeded(self.seed, self.epoch, index):
            return self.augment(self.images[index])


class ImagesInFolder(datasets.ImageFolder):
    """torchvision's ImageFolder, its crops and flips drawn as described above."""

    def __init__(self, root, transform, seed=0):
        super().__init__(root, transform)
        self.seed = seed
        self.epoch = 0

    def __getitem__(self, index):
        with seeded(self.seed, self.epoch, index):
            return super().__getitem__(index)


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
    generator = torch.Generator().manual_seed(args.seed)

    def draw(n):
        shape = (n, 3, args.image_size, args.image_size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return images, torch.randint(10, (n,), generator=generator)

    return draw(args.images), draw(max(1, args.images // 5))


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
        images = (
            images[:, None]
            if images.dim() == 3
            else images.permute(0, 3, 1, 2).contiguous()
        )
        parts.append((images, torch.as_tensor(part.targets)))
    return parts


def image_folder(args):
    """Return the sets of a folder in ImageNet's layout: train/CLASS/*, val/CLASS/*."""
    finish = [v2.PILToTensor(), make_normalize(args.data)]
    augment = [v2.RandomResizedCrop(args.image_size), v2.RandomHorizontalFlip()]
    center = [v2.Resize(args.image_size * 8 // 7), v2.CenterCrop(args.image_size)]
    try:
        train_set = ImagesInFolder(
            args.data_dir / "train", v2.Compose(augment + finish), args.seed
        )
        val_set = ImagesInFolder(args.data_dir / "val", v2.Compose(center + finish))
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
        augment = None
        if args.data.startswith("cifar"):
            augment = v2.Compose(
                [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
            )
        normalize = make_normalize(args.data)
        train_set = ImagesInMemory(*train, classes, normalize, augment, args.seed)
        val_set = ImagesInMemory(*val, classes, normalize)
    if len(train_set) < args.batch_size:
        fail(
            f"--batch-size {args.batch_size}: the training set has only"
            f" {len(train_set)} images"
        )
    return train_set, val_set
