"""The limit: a model's forward, backward and step on one batch on the device.

torchrun --standalone --nproc-per-node=2 -m benchmarks.limit --batch-sizes 60 120
python -m benchmarks.limit

Nothing is loaded, metered or evaluated here. Under torchrun, windows of the bare model
alternate with windows of DistributedDataParallel: the difference is communication.
"""

import json
import os
import statistics
import sys
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from common.args import ArgumentParser
from common.args import positive_int
from common.data import load_data
from common.launch import check_batch_size
from common.launch import get_device
from common.loader import collate
from common.model import make_model


def parse_args():
    """Parse and check the flags: those of every stage, most of which are not used."""
    parser = ArgumentParser(__doc__)
    parser.set_defaults(epochs=6)
    parser.add_argument(
        "--amp", choices=("off", "bf16", "fp16"), default="off", help="mixed precision"
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=positive_int,
        metavar="N",
        help="global batch sizes (default: --batch-size)",
    )
    args = parser.parse_args()
    args.batch_sizes = args.batch_sizes or [args.batch_size]
    return args


def steps_of(args, model, images, target):
    """Return a function of `steps` that takes as many optimizer steps on one batch."""
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
    dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[args.amp]

    def take(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(args.device.type, dtype, enabled=args.amp != "off"):
                loss = nn.functional.cross_entropy(model(images), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return take


def seconds(args, take, steps):
    """Return the seconds that all processes, started together, need for `steps`."""
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    take(steps)
    if args.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - begin


def measure(args, train_set, batch_size):
    """Return images/s of all processes together: {"bare": [per window], "ddp": ...}.

    A window has as many steps as an epoch. There are --epochs windows, and the first
    one warms up.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    check_batch_size(args, processes)
    loader = DataLoader(train_set, batch_size // processes, collate_fn=collate)
    images, target = next(iter(loader))
    images, target = images.to(args.device, args.dtype), target.to(args.device)
    models = {"bare": make_model(args, train_set).to(args.device, args.dtype)}
    if dist.is_initialized():
        copy = make_model(args, train_set).to(args.device, args.dtype)
        models["ddp"] = nn.parallel.DistributedDataParallel(copy)
    takes = {
        name: steps_of(args, model, images, target) for name, model in models.items()
    }
    rates = {name: [] for name in takes}
    steps = len(train_set) // batch_size
    for _ in range(args.epochs):
        for name, take in takes.items():
            rates[name].append(steps * batch_size / seconds(args, take, steps))
    return {name: rate[1:] for name, rate in rates.items()}


def run(args):
    """Measure each batch size, and print a line of JSON for each."""
    is_main_process = not dist.is_initialized() or dist.get_rank() == 0
    args.batch_size = max(args.batch_sizes)  # it must fit into the training set
    train_set, _ = load_data(args)
    for batch_size in args.batch_sizes:
        args.batch_size = batch_size
        rates = measure(args, train_set, batch_size)
        if is_main_process:
            print(json.dumps({"batch_size": batch_size, **rates}), flush=True)
            medians = {k: round(statistics.median(rate)) for k, rate in rates.items()}
            print(f"batch {batch_size}: images/s {medians}", file=sys.stderr)


def main():
    args = parse_args()
    launched = "RANK" in os.environ
    args.device = get_device(args, int(os.environ.get("LOCAL_RANK", 0)))
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    if launched:
        dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    run(args)
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
