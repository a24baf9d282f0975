"""Measure single choices on a GPU: the README's tables of steps and copies.

python -m benchmarks.gpu_probe [steps] [copies]
"""

import argparse
import gc
import itertools
import statistics
import time

import torch

from benchmarks import limit
from benchmarks.report import table
from common.args import fail

BF16 = ["--amp", "bf16"]
ANY_ALGORITHM = ["--no-deterministic"]
# A stage's flags, and what it has no flag for. The first is what a script has that sets
# nothing: TF32 in convolutions alone.
VARIANTS = {
    "torch's defaults": (ANY_ALGORITHM, {"conv_tf32": True, "contiguous": True}),
    "TF32": (["--tf32"], {}),
    "bf16": (BF16, {}),
    "bf16, contiguous": (BF16, {"contiguous": True}),
    "bf16, fused": (BF16, {"fused": True}),
    "bf16, not deterministic": ([*BF16, *ANY_ALGORITHM], {}),
    "bf16, a wait per step": (BF16, {"wait": True}),
    "float32, as the stages": ([], {}),
    "contiguous": ([], {"contiguous": True}),
    "fused": ([], {"fused": True}),
    "not deterministic": (ANY_ALGORITHM, {}),
    "not deterministic, cudnn.benchmark": (ANY_ALGORITHM, {"benchmark": True}),
}


def milliseconds(values):
    """Return the median of seconds as text, in milliseconds."""
    return f"{1e3 * statistics.median(values):.2f}"


def steps(device, arch, size, batch_size):
    """Return the table of VARIANTS: five windows of four steps, with nothing else."""
    work = {"device": device, "arch": arch, "image-size": size, "images": batch_size}
    work |= {"lr": 0.001, "batch-size": batch_size}
    words = [word for k, v in work.items() for word in (f"--{k}", str(v))]
    rows, first = [], None
    for name, (flags, options) in VARIANTS.items():
        args = limit.parse_args("", [*words, *flags])
        limit.set_backends(args.tf32, args.deterministic)
        if options.get("conv_tf32"):
            torch.backends.cudnn.conv.fp32_precision = "tf32"
        torch.backends.cudnn.benchmark = options.get("benchmark", False)
        contiguous = options.get("contiguous", False)
        order = torch.contiguous_format if contiguous else torch.channels_last
        step = limit.make_step(
            args, *limit.make_work(args, batch_size, order), fused=options.get("fused")
        )
        one = (lambda step=step: step().item()) if options.get("wait") else step
        limit.seconds_per_step(args.device, one, 2)  # warms up
        taken = [limit.seconds_per_step(args.device, one, 4) for _ in range(5)]
        del step, one
        gc.collect()
        median = statistics.median(taken)
        first = first or median
        spread = f"{1e3 * min(taken):.2f}-{1e3 * max(taken):.2f}"
        cells = [name, milliseconds(taken), spread, f"{batch_size / median:,.0f}"]
        rows.append([*cells, f"{first / median:.2f}"])
    titles = ["variant", "ms per step", "least-most", "images/s", "vs first"]
    return table(titles, rows)


def copies(device, batch_size, size):
    """Return a table: how long a batch is on its way, and how long Python waits."""
    rows = []
    pinned = (False, True) if device.type == "cuda" else (False,)
    for kind, pin in itertools.product((torch.float32, torch.uint8), pinned):
        batch = torch.zeros((batch_size, 3, size, size), dtype=kind)
        batch = batch.pin_memory() if pin else batch
        waited, taken = [], []
        for _ in range(11):
            limit.synchronize(device)
            begin = time.perf_counter()
            batch.to(device, non_blocking=True)
            waited.append(time.perf_counter() - begin)
            limit.synchronize(device)
            taken.append(time.perf_counter() - begin)
        cells = [str(kind).removeprefix("torch."), str(pin)]
        rows.append([*cells, milliseconds(taken[1:]), milliseconds(waited[1:])])
    return table(["type", "pinned", "ms", "ms until Python continues"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("steps", "copies")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=" ".join(names))
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny work")
    args = parser.parse_args()
    if unknown := sorted(set(args.sections) - set(names)):
        fail(f"there is no section {unknown[0]}; the sections are {' '.join(names)}")
    if not args.dry_run and not torch.cuda.is_available():
        fail("no GPU is visible; --dry-run does without one")
    device, work, size = torch.device("cuda"), ("resnet50", 224, 256), 224
    if args.dry_run:
        torch.set_num_threads(1)
        device, work, size = torch.device("cpu"), ("small", 8, 4), 32
    sections = args.sections or names
    if "steps" in sections:
        print("steps of {}, {} px, batch {}:".format(*work))
        print("\n".join(steps(device, *work)), flush=True)
    if "copies" in sections:
        print("\ncopies: How long is a batch on its way to the device,", end=" ")
        print("and how long does Python wait?")
        print("\n".join(copies(device, work[2], size)), flush=True)


if __name__ == "__main__":
    main()
