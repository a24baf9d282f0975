"""Trains with Accelerate what stage 03 trains, and compares the weights.

README.md shows which line of stage 03 became which, and what else Accelerate does. The
argument is the file with the weights that stage 03 trained; the flags are those of
stage 03.

$ torchrun --standalone --nproc-per-node=2 03_ddp_launch/train.py \
    --dtype float64 --epochs 2 --out-dir out
$ torchrun --standalone --nproc-per-node=2 other_libraries/accelerate_train.py \
    out/last.pt
epoch 1: train loss 0.801 acc@1 80.28 acc@5 95.28
epoch 1: val loss 0.154 acc@1 95.80 acc@5 100.00 of 357
epoch 2: train loss 0.083 acc@1 97.92 acc@5 100.00
epoch 2: val loss 0.067 acc@1 98.60 acc@5 100.00 of 357
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import data
from common import meters
from common import weights
from common.args import ArgumentParser
from common.args import existing_file
from common.loader import loader_options
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics
from common.model import make_model


def parse_args():
    parser = ArgumentParser(__doc__)
    # Otherwise two processes agree with one to five digits only, not to ten.
    parser.set_defaults(dtype="float64", epochs=2)
    parser.add_argument("reference", nargs="?", type=existing_file, metavar="FILE")
    return parser.parse_args()


def train_one_epoch(args, accelerator, epoch, model, loader, optimizer, scheduler):
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch.fill_(epoch)
    loader.set_epoch(epoch)  # only to compare: Accelerate's own count begins with 0
    for inputs, targets in loader:  # already on the device
        optimizer.zero_grad()
        outputs = model(data.normalize(inputs, args.data, args.dtype))
        loss = nn.functional.cross_entropy(outputs, targets)
        meter.update(loss, outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    meter.sums = accelerator.reduce(meter.sums)
    return meter.compute()


@torch.no_grad()
def evaluate(args, accelerator, model, loader):
    model.eval()
    meter = meters.Meter(args.device)
    for inputs, targets in loader:  # this process's shard
        outputs = model(data.normalize(inputs, args.data, args.dtype))
        # Otherwise the samples that a process repeats in its last batch count twice.
        outputs, targets = accelerator.gather_for_metrics((outputs, targets))
        loss = nn.functional.cross_entropy(outputs, targets)
        meter.update(loss, outputs, targets)
    return meter.compute()


def main():
    args = parse_args()
    loading = DataLoaderConfiguration(
        split_batches=True,  # otherwise the batch size is that of one process
        # Only to compare with stage 03: its order of the samples.
        use_seedable_sampler=True,
        data_seed=args.seed,
    )
    accelerator = Accelerator(cpu=args.device.type == "cpu", dataloader_config=loading)
    args.device = accelerator.device
    with accelerator.main_process_first():
        train_set, val_set = data.load(
            args.data,
            args.data_dir,
            args.download,
            args.image_size,
            args.images,
            args.seed,
        )
    options = {
        "batch_size": args.batch_size,
        **loader_options(args.device, args.workers),
    }
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)
    torch.manual_seed(args.seed)
    channels, image_size, _ = train_set.image_shape
    model = make_model(args.arch, channels, train_set.num_classes, image_size)
    model.to(args.device, args.dtype, memory_format=torch.channels_last)
    options = {"momentum": 0.9, "weight_decay": args.weight_decay, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **options)
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
    if args.reference:
        reference = weights.load(args.reference)
        trained = accelerator.unwrap_model(model).state_dict()
        off = max((trained[k].cpu() - reference[k]).abs().max() for k in reference)
        assert off < 1e-10, f"largest difference from stage 03's weights: {off}"
        log("weights differ by less than 1e-10; processes:", accelerator.num_processes)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    if dist.is_initialized():  # on a CPU, one process has no group
        dist.destroy_process_group()
