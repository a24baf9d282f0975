"""The limit: a model's forward, backward and step on a batch that is already on the device.

torchrun --standalone --nproc-per-node=2 benchmarks/limit.py --batch-sizes 60 120
python -m benchmarks.limit

Nothing is loaded, counted or evaluated here. Under torchrun the same steps are also taken with
DistributedDataParallel, in turns with those of the bare model: the difference is communication.
"""

import json
import os
import statistics
import sys
import time

from common import flags
from common.data import collate
from common.data import load_data
from common.model import make_model

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader


def parse_args():
    """Return the flags, checked: those of every stage, of which most decide nothing here."""
    parser = flags.Flags(__doc__)
    parser.set_defaults(epochs=6)
    amp = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    parser.add_argument("--amp", choices=amp, default="off", help="mixed precision")
    sizes = {"nargs": "+", "type": flags.number(int, 1), "metavar": "N"}
    parser.add_argument("--batch-sizes", **sizes, help="of all processes (default: --batch-size)")
    args = parser.parse_args()
    args.amp = amp[args.amp]
    args.batch_sizes = args.batch_sizes or [args.batch_size]
    return args


def steps_of(args, model, images, target):
    """Return a function that takes so many optimizer steps on one batch."""
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True
    )
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp is torch.float16)

    def take(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(args.device.type, args.amp, enabled=args.amp is not None):
                loss = nn.functional.cross_entropy(model(images), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return take


def seconds(args, take, steps):
    """Return how long it takes all processes, from a common start, to take so many steps."""
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
    """Return the images/s of all processes together, {"bare": [per window], "ddp": ...}.

    A window has as many steps as an epoch; there are --epochs of them, and the first warms up.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    flags.share(args, processes)
    loader = DataLoader(train_set, batch_size // processes, collate_fn=collate)
    images, target = next(iter(loader))
    images, target = images.to(args.device, args.dtype), target.to(args.device)
    models = {"bare": make_model(args, train_set).to(args.device, args.dtype)}
    if dist.is_initialized():
        copy = make_model(args, train_set).to(args.device, args.dtype)
        models["ddp"] = nn.parallel.DistributedDataParallel(copy)
    takes = {name: steps_of(args, model, images, target) for name, model in models.items()}
    rates = {name: [] for name in takes}
    steps = len(train_set) // batch_size
    for _ in range(args.epochs):
        for name, take in takes.items():
            rates[name].append(steps * batch_size / seconds(args, take, steps))
    return {name: rate[1:] for name, rate in rates.items()}


def run(args):
    """Measure each batch size, and print a line of JSON for each."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    args.batch_size = max(args.batch_sizes)  # the largest has to fit into the training set
    train_set, _ = load_data(args)
    for batch_size in args.batch_sizes:
        args.batch_size = batch_size
        rates = measure(args, train_set, batch_size)
        if main:
            print(json.dumps({"batch_size": batch_size, **rates}), flush=True)
            medians = {name: round(statistics.median(rate)) for name, rate in rates.items()}
            print(f"batch {batch_size}: images/s {medians}", file=sys.stderr)


def main():
    args = parse_args()
    launched = "RANK" in os.environ
    args.device = flags.nth_device(args, int(os.environ.get("LOCAL_RANK", 0)))
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    if launched:
        dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    run(args)
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
