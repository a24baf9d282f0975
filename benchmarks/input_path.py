"""README's table of the input path: how many images does a core prepare per second?

python -m benchmarks.input_path [--images 20000]

Seconds are those of this process on a core, without waiting, and one thread is used.
Each row is the best of five passes over a data set in random order, in batches of 256.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import RandomSampler
from torchvision.transforms.v2 import functional

from benchmarks.report import table
from common import data
from common.args import positive_int
from common.loader import collate

BATCH_SIZE = 256
PASSES = 5


def images_per_second(train_set, images):
    """Return how many images per second of CPU time a loader delivers."""
    sampler = RandomSampler(train_set, num_samples=images)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, collate_fn=collate)
    seconds = []
    for _ in range(PASSES):
        begin = time.process_time()
        for _ in loader:
            pass
        seconds.append(time.process_time() - begin)
    return images / min(seconds)


def in_memory(images, size, padding):
    """Return a set of random images; with `padding` they are cropped and flipped."""
    made, _ = data.random_images(images, size, seed=0)
    return data.ImagesInMemory(*made, 10, padding)


def jpeg_files(folder, images):
    """Write random images of 500 x 375 pixels and 100 kB; return them as a set.

    Number of pixels and bytes are those of an average file of ImageNet.
    """
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        (folder / part / "class").mkdir(parents=True)
    for number in range(images):
        coarse = generator.integers(256, size=(3, 25, 34), dtype=np.uint8)
        image = functional.resize(torch.from_numpy(coarse), [375, 500]).numpy()
        noise = generator.normal(0, 16, image.shape[1:])
        image = np.clip(image + noise, 0, 255).astype(np.uint8)
        pixels = functional.to_pil_image(torch.from_numpy(image))
        pixels.save(folder / "train/class" / f"{number}.jpg", quality=90)
    pixels.save(folder / "val/class/0.jpg")
    train_set, _ = data.load("imagefolder", folder)
    return train_set


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=positive_int, default=20_000)
    images = parser.parse_args().images
    torch.set_num_threads(1)
    large = max(1, images // 10)
    files = max(1, images // 100)
    with tempfile.TemporaryDirectory() as folder:
        sets = {
            "32 px in memory": (in_memory(images, 32, 0), images),
            "32 px in memory, cropped and flipped": (in_memory(images, 32, 4), images),
            "224 px in memory": (in_memory(large, 224, 0), large),
            "JPEG of 500 x 375 to 224 px, cropped and flipped": (
                jpeg_files(Path(folder), files),
                files,
            ),
        }
        rows = [
            [name, f"{images_per_second(train_set, number):,.0f}"]
            for name, (train_set, number) in sets.items()
        ]
    print("\n".join(table(["images", "per second and core"], rows)))


if __name__ == "__main__":
    main()
