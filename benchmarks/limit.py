"""The limit: a model's forward, backward and step on one batch on the device.

Nothing is loaded, normalized, metered, checked or evaluated here. With several
processes there is a second limit, with DistributedDataParallel: the difference between
the two is communication.
"""

import contextlib
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from common import data
from common.loader import collate
from common.model import make_model


def make_step(args, model, images, target, fused=True):
    """Return a function that takes one optimizer step on a batch on the device.

    With --grad-accum-steps it runs as many forward and backward passes as the stage. It
    returns the last one's loss, which stays on the device.
    """
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
        fused=fused,
    )
    amp = getattr(args, "amp", "off")
    scaler = torch.amp.GradScaler(args.device.type, enabled=amp == "fp16")
    dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    micro_batches = getattr(args, "grad_accum_steps", 1)
    parts = list(
        zip(
            images.tensor_split(micro_batches),
            target.tensor_split(micro_batches),
            strict=True,
        )
    )
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)

    def step():
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(parts, start=1):
            last = number == micro_batches
            sync = contextlib.nullcontext() if last else no_sync()
            with sync, torch.autocast(args.device.type, dtype, enabled=amp != "off"):
                loss = nn.functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss / micro_batches).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def make_steps(args, data_set, local_batch_size, with_ddp):
    """Return {"bare": a function that takes a step} and, if `with_ddp`, "ddp", too."""
    loader = DataLoader(data_set, local_batch_size, collate_fn=collate)
    images, target = next(iter(loader))
    images = data.normalize(args, images.to(args.device))
    target = target.to(args.device)

    def model():
        made = make_model(args, data_set)
        return made.to(args.device, args.dtype, memory_format=args.memory_format)

    models = {"bare": model()}
    if with_ddp:
        models["ddp"] = nn.parallel.DistributedDataParallel(model())
    return {
        name: make_step(args, model, images, target) for name, model in models.items()
    }


def synchronize(args):
    """Wait for this process's GPU, if it has one, and then for the other processes."""
    if args.device.type == "cuda":
        torch.cuda.synchronize(args.device)
    if dist.is_initialized():
        dist.barrier()


def seconds(args, step, steps):
    """Return the seconds that all processes, started together, need for `steps`."""
    synchronize(args)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(args)
    return time.perf_counter() - begin
