"""Trains with Accelerate what stage 03 trains, and compares the weights.

docs/neighbors.md shows which line of stage 03 became which, and what else Accelerate
does. The argument is the file with the weights that stage 03 trained.

$ torchrun --standalone --nproc-per-node=2 03_ddp_launch/train.py \
    --dtype float64 --epochs 2 --out-dir out
$ torchrun --standalone --nproc-per-node=2 recipes/neighbors/accelerate_train.py \
    out/last.pt
epoch 1: train loss 0.894 acc@1 78.73 acc@5 94.20
epoch 1: val loss 0.104 acc@1 97.98 acc@5 100.00 of 297
epoch 2: train loss 0.087 acc@1 97.53 acc@5 100.00
epoch 2: val loss 0.051 acc@1 98.65 acc@5 100.00 of 297
weights differ by less than 1e-10; processes: 2
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import checkpoint
from common import data
from common import meters
from common.args import ArgumentParser
from common.loader import loader_options
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics
from common.model import make_model


def train_one_epoch(args, accelerator, epoch, model, loader, optimizer, scheduler):
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch = epoch
    loader.set_epoch(epoch)  # Accelerate's own count begins with 0
    for images, target in loader:  # already on the device
        optimizer.zero_grad()
        output = model(data.normalize(args, images))
        loss = nn.functional.cross_entropy(output, target)
        meter.update(loss, output, target)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    meter.sums = accelerator.reduce(meter.sums)
    return meter.compute()


@torch.no_grad()
def evaluate(args, accelerator, model, loader):
    model.eval()
    meter = meters.Meter(args.device)
    for images, target in loader:  # this process's shard
        output = model(data.normalize(args, images))
        # Otherwise the samples that a process repeats in its last batch count twice.
        output, target = accelerator.gather_for_metrics((output, target))
        meter.update(nn.functional.cross_entropy(output, target), output, target)
    return meter.compute()


def main():
    reference = checkpoint.load(sys.argv[1])
    args = ArgumentParser(__doc__).parse_args(["--dtype=float64", "--epochs=2"])
    loading = DataLoaderConfiguration(
        split_batches=True,  # otherwise the batch size is that of one process
        use_seedable_sampler=True,  # otherwise the order is not stage 03's
        data_seed=args.seed,
    )
    accelerator = Accelerator(cpu=args.device.type == "cpu", dataloader_config=loading)
    args.device = accelerator.device
    with accelerator.main_process_first():
        train_set, val_set = data.load_data(args)
    options = {"batch_size": args.batch_size, **loader_options(args)}
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)
    torch.manual_seed(args.seed)
    model = make_model(args, train_set)
    model.to(args.device, args.dtype, memory_format=args.memory_format)
    options = {"momentum": 0.9, "weight_decay": args.weight_decay, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, fused=True, **options)
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(train_loader))
    model, optimizer, scheduler, train_loader, val_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, val_loader
    )
    training = (model, train_loader, optimizer, scheduler)
    log = accelerator.print  # on rank 0 only
    for epoch in range(1, args.epochs + 1):
        train = train_one_epoch(args, accelerator, epoch, *training)
        val = evaluate(args, accelerator, model, val_loader)
        log(f"epoch {epoch}: train {format_metrics(train)}")
        log(f"epoch {epoch}: val {format_metrics(val)} of {val['count']}")
    weights = accelerator.unwrap_model(model).state_dict()
    off = max((weights[k].cpu() - reference[k]).abs().max() for k in reference)
    assert off < 1e-10, f"largest difference from stage 03's weights: {off}"
    log("weights differ by less than 1e-10; processes:", accelerator.num_processes)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    if dist.is_initialized():  # on a CPU, one process has no group
        dist.destroy_process_group()
