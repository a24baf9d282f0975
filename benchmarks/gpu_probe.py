"""Measure single choices on a GPU: a step's variants, repeatability, copies, loaders.

python -m benchmarks.gpu_probe [--seconds 480] [--dry-run]

Each section prints a table. A section that would begin after --seconds is left out,
with a line that says so. --dry-run runs on the CPU with a tiny model.
"""

import argparse
import gc
import statistics
import sys
import time

import torch
from torch.utils.data import DataLoader
from torch.utils.data import RandomSampler

from benchmarks import limit
from benchmarks.report import table
from common import data
from common.args import ArgumentParser
from common.loader import loader_options


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


class Probe:
    """What is measured on, and how large it is."""

    def __init__(self, args):
        self.dry_run = args.dry_run
        self.end = time.perf_counter() + args.seconds
        self.device = torch.device("cpu" if args.dry_run else "cuda")

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def flags(self, **values):
        """Return a stage's flags on this device, as they are parsed."""
        values = {"data": "fake", "device": self.device.type, **values}
        words = [
            word
            for name, value in values.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return ArgumentParser("").parse_args(words)

    def stepper(
        self, arch, size, batch_size, bf16=False, fused=None, channels_last=True
    ):
        """Return a model and a function that takes optimizer steps on one batch."""
        args = self.flags(
            arch=arch,
            image_size=size,
            images=batch_size,
            batch_size=batch_size,
            lr=0.001,
            memory_format="channels_last" if channels_last else "contiguous",
        )
        args.amp = "bf16" if bf16 else "off"
        train_set = limit.load_train_set(args)
        inputs, targets = train_set.__getitems__(list(range(batch_size)))
        inputs = data.normalize(inputs.to(self.device), args.data, args.dtype)
        inputs = inputs.contiguous(memory_format=args.memory_format)
        torch.manual_seed(0)
        model = limit.make_network(args, train_set)
        targets = targets.to(self.device)
        step = limit.make_step(args, model, inputs, targets, fused=fused)

        def take(steps, wait=False):
            for _ in range(steps):
                loss = step()
                if wait:
                    loss.item()

        return model, take


def set_backends(tf32=False, deterministic=True, benchmark=False):
    """Set what --tf32 and --deterministic set, and cudnn.benchmark."""
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark


BACKENDS = ("tf32", "deterministic", "benchmark")
STEPS = {
    "float32, as the stages": {},
    "contiguous": {"channels_last": False},
    "fused": {"fused": True},
    "not deterministic": {"deterministic": False},
    "not deterministic, cudnn.benchmark": {"deterministic": False, "benchmark": True},
    "TF32": {"tf32": True},
    "bf16": {"bf16": True},
    "bf16, contiguous": {"bf16": True, "channels_last": False},
    "bf16, fused": {"bf16": True, "fused": True},
    "bf16, not deterministic": {"bf16": True, "deterministic": False},
    "bf16, a wait per step": {"bf16": True, "wait": True},
}


def steps_on(arch, size, batch_size, steps):
    """Return a section that measures STEPS on one kind of work."""

    def section(probe):
        rows, first = [], None
        work, count = (arch, size, batch_size), steps
        if probe.dry_run:
            work, count = ("small", 8, 4), 1
        for name, options in STEPS.items():
            set_backends(**{k: v for k, v in options.items() if k in BACKENDS})
            own = {k: v for k, v in options.items() if k not in (*BACKENDS, "wait")}
            _, take = probe.stepper(*work, **own)
            wait = options.get("wait", False)
            take(2, wait)
            windows = []
            for _ in range(2 if probe.dry_run else 5):
                probe.synchronize()
                begin = time.perf_counter()
                take(count, wait)
                probe.synchronize()
                windows.append((time.perf_counter() - begin) / count)
            del take
            gc.collect()
            median = statistics.median(windows)
            first = first or median
            spread = f"{1e3 * min(windows):.2f}-{1e3 * max(windows):.2f}"
            cells = [name, f"{1e3 * median:.2f}", spread]
            rows.append([*cells, f"{work[2] / median:,.0f}", f"{first / median:.2f}"])
        titles = ["variant", "ms per step", "least-most", "images/s", "vs first"]
        return table(titles, rows)

    section.__name__ = f"steps of {arch}, {size} px, batch {batch_size}"
    return section


def repeatability(probe):
    """Do three equal runs of 25 steps end with the same bits?"""
    rows = []
    for arch, size, batch_size in (
        ("small", 8, 60),
        ("small", 32, 120),
        ("resnet18", 32, 128),
        ("resnet18", 224, 64),
    ):
        work = ("small", 8, 4) if probe.dry_run else (arch, size, batch_size)
        for bf16 in (False, True):
            for deterministic in (True, False):
                set_backends(deterministic=deterministic)
                ends = []
                for _ in range(3):
                    model, take = probe.stepper(*work, bf16=bf16)
                    take(1 if probe.dry_run else 25)
                    weights = [p.detach().flatten() for p in model.parameters()]
                    ends.append(torch.cat(weights).cpu())
                furthest = max((ends[0] - end).abs().max().item() for end in ends[1:])
                kind = "bf16" if bf16 else "float32"
                how = "deterministic" if deterministic else "any algorithm"
                rows.append([f"{arch} {size} px", kind, how, f"{furthest:.1e}"])
    return table(["model", "precision", "cuDNN", "largest difference"], rows)


def copies(probe):
    """How long is a batch on its way to the device, and how long does Python wait?"""
    shape = (8, 3, 32, 32) if probe.dry_run else (256, 3, 224, 224)
    pinned = (False,) if probe.device.type == "cpu" else (False, True)
    rows = []
    for kind in (torch.float32, torch.uint8):
        for pin in pinned:
            batch = torch.zeros(shape, dtype=kind)
            batch = batch.pin_memory() if pin else batch
            waited, taken = [], []
            for _ in range(11):
                probe.synchronize()
                begin = time.perf_counter()
                batch.to(probe.device, non_blocking=True)
                waited.append(time.perf_counter() - begin)
                probe.synchronize()
                taken.append(time.perf_counter() - begin)
            cells = [str(kind).removeprefix("torch."), str(pin)]
            ms = [f"{1e3 * statistics.median(one[1:]):.2f}" for one in (taken, waited)]
            rows.append([*cells, *ms])
    return table(["type", "pinned", "ms", "ms until Python continues"], rows)


def loaders(probe):
    """How many images/s does a loader of the stages deliver, alone?"""
    rows = []
    works = {"fake": (224, 5120, 256), "cifar10": (32, 50_000, 1024)}
    if probe.dry_run:
        works = {"fake": (32, 40, 8), "cifar10": (32, 40, 8)}
    for name, (size, images, batch_size) in works.items():
        for workers in (0, 1) if probe.dry_run else (0, 2, 8):
            made, _ = data.random_images(images, size, seed=0)
            padding = 4 if name == "cifar10" else 0
            train_set = data.ImagesInMemory(*made, 10, padding)
            options = loader_options(probe.device, workers)
            sampler = RandomSampler(train_set)
            loader = DataLoader(train_set, batch_size, sampler=sampler, **options)
            rates = []
            for _ in range(3):
                begin = time.perf_counter()
                for batch in loader:
                    batch[0].to(probe.device, non_blocking=True)
                probe.synchronize()
                rates.append(images / (time.perf_counter() - begin))
            rows.append([name, str(workers), f"{statistics.median(rates[1:]):,.0f}"])
    return table(["images like", "workers", "images/s"], rows)


SECTIONS = (
    repeatability,
    steps_on("small", 32, 120, 100),
    steps_on("resnet50", 224, 256, 10),
    copies,
    loaders,
    steps_on("resnet18", 32, 1024, 20),
)


def main():
    args = parse_args()
    if args.dry_run:
        torch.set_num_threads(1)
    probe = Probe(args)
    failed = False
    for section in SECTIONS:
        print(f"\n{section.__name__}: {section.__doc__ or ''}".rstrip(), flush=True)
        if time.perf_counter() > probe.end - 20 and not args.dry_run:
            print("left out: the time is over")
            continue
        try:
            print("\n".join(section(probe)), flush=True)
        except RuntimeError as error:  # out of memory, for instance; go on without it
            failed = True
            print(f"failed: {' '.join(str(error).split())[:300]}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
