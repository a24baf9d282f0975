"""The limit: a model's forward, backward and step on one batch on the device.

Nothing is loaded, normalized, metered, checked or evaluated here. With several
processes there are more limits: the same in processes that wait for each other once a
step, as every distributed training has to, and the same with DistributedDataParallel.
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


def load_train_set(args):
    """Return the training set that the flags of a stage ask for."""
    train_set, _ = data.load(
        args.data,
        args.data_dir,
        args.download,
        args.image_size,
        args.images,
        args.seed,
    )
    return train_set


def make_network(args, train_set):
    """Return the model that a stage trains on these images, on its device."""
    channels, image_size, _ = train_set[0][0].shape
    model = make_model(
        args.arch, channels, train_set.num_classes, image_size, args.pretrained
    )
    return model.to(args.device, args.dtype, memory_format=args.memory_format)


def make_step(args, model, inputs, targets, fused=None):
    """Return a function that takes one optimizer step on a batch on the device.

    With --grad-accum-steps it runs as many forward and backward passes as the stage. It
    returns the last one's loss, which stays on the device. fused: of the optimizer;
    with None torch chooses, as in a stage.
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
            inputs.tensor_split(micro_batches),
            targets.tensor_split(micro_batches),
            strict=True,
        )
    )
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)

    def step():
        optimizer.zero_grad()
        for number, (part, labels) in enumerate(parts, start=1):
            last = number == micro_batches
            sync = contextlib.nullcontext() if last else no_sync()
            with sync, torch.autocast(args.device.type, dtype, enabled=amp != "off"):
                loss = nn.functional.cross_entropy(model(part), labels)
            scaler.scale(loss / micro_batches).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def make_steps(args, data_set, local_batch_size, kinds):
    """Return {kind: a function that takes a step} for each of `kinds`.

    "bare" is the model alone; "in_step" averages one number over the processes after
    each step, so that each waits for the slowest; "ddp" averages the gradient.
    """
    loader = DataLoader(data_set, local_batch_size, collate_fn=collate)
    inputs, targets = next(iter(loader))
    inputs = data.normalize(inputs.to(args.device), args.data, args.dtype)
    targets = targets.to(args.device)
    bare = make_step(args, make_network(args, data_set), inputs, targets)
    number = torch.zeros(1, device=args.device)

    def in_step():
        bare()
        dist.all_reduce(number)

    steps = {"bare": bare, "in_step": in_step}
    if "ddp" in kinds:
        model = nn.parallel.DistributedDataParallel(make_network(args, data_set))
        steps["ddp"] = make_step(args, model, inputs, targets)
    return {kind: steps[kind] for kind in kinds}


def synchronize(device):
    """Wait for this process's GPU, if it has one, and then for the other processes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def seconds(device, step, steps):
    """Return the seconds that all processes, started together, need for `steps`."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return time.perf_counter() - begin
