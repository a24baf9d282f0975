"""The limit, for compare.py and gpu_probe.py: a model's steps and no more.

torchrun --standalone --nproc-per-node=1 -m benchmarks.limit
"""

import json
import os
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from common import data
from common import launch
from common.args import ArgumentParser
from common.args import check_batch_size
from common.args import one_line_errors
from common.loader import collate
from common.model import make_model

AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 10  # of a window


def parse_args(doc, words=None):
    """Parse a stage's flags, and --amp. --epochs is the number of windows."""
    parser = ArgumentParser(doc)
    parser.set_defaults(data="fake", image_size=32, epochs=20)
    parser.add_argument("--amp", choices=AMP, default="off", help="mixed precision")
    args = parser.parse_args(words)
    if args.epochs < 2:
        parser.error("--epochs must be at least 2, since the first warms up")
    return args


def set_backends(tf32=False, deterministic=True):
    """Set what a stage sets for --tf32 and --deterministic."""
    precision = "tf32" if tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    torch.backends.cudnn.deterministic = deterministic


def make_work(args, batch_size, memory_format=torch.channels_last):
    """Return a stage's model and one batch, normalized: all is on the device."""
    with one_line_errors(f"--data {args.data}:"):
        train_set, _ = data.load(
            args.data,
            args.data_dir,
            args.download,
            args.image_size,
            args.images,
            args.seed,
        )
    check_batch_size(batch_size, processes=1, samples=len(train_set))
    inputs, targets = next(iter(DataLoader(train_set, batch_size, collate_fn=collate)))
    inputs = data.normalize(inputs.to(args.device), args.data, args.dtype)
    inputs = inputs.contiguous(memory_format=memory_format)
    torch.manual_seed(args.seed)
    channels, image_size = inputs.shape[1:3]
    model = make_model(args.arch, channels, train_set.num_classes, image_size)
    model.to(args.device, args.dtype, memory_format=memory_format)
    return model, inputs, targets.to(args.device)


def make_step(args, model, inputs, targets, fused=None):
    """Return a function that takes an optimizer step on a batch and returns the loss.

    Nothing is loaded, normalized, metered, checked or evaluated in it, and it does not
    wait for the device. fused: of the optimizer; None: torch chooses, as in a stage.
    """
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
        fused=fused,
    )
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
    enabled = args.amp != "off"

    def step():
        optimizer.zero_grad()
        with torch.autocast(args.device.type, AMP[args.amp], enabled):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def synchronize(device):
    """Wait for this process's GPU, if it has one, and then for the other processes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def seconds_per_step(device, step, steps):
    """Return the seconds of a step, of `steps` that all processes begin together."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps


def main():
    """Print as JSON the seconds of a step in each window but the first, a warm-up.

    torchrun starts the processes, which begin each window together.
    """
    args = parse_args(__doc__)
    launch.check()
    args.device = launch.get_device(args.device, int(os.environ["LOCAL_RANK"]))
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    set_backends(args.tf32, args.deterministic)
    check_batch_size(args.batch_size, dist.get_world_size(), args.batch_size)
    work = make_work(args, args.batch_size // dist.get_world_size())
    step = make_step(args, *work)
    seconds = [seconds_per_step(args.device, step, STEPS) for _ in range(args.epochs)]
    if dist.get_rank() == 0:
        print(json.dumps(seconds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
