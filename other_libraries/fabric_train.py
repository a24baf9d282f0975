"""Trains with Lightning Fabric what stage 03 trains, and compares the weights.

README.md shows which line of stage 03 became which, and what else Fabric does. The
argument is the file with the weights that stage 03 trained; the flags are those of
stage 03.

$ torchrun --standalone --nproc-per-node=2 03_ddp_launch/train.py \
    --dtype float64 --epochs 2 --out-dir out
$ fabric run --accelerator=cpu --devices=2 other_libraries/fabric_train.py \
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
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

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


def train_one_epoch(args, fabric, epoch, model, loader, optimizer, scheduler):
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch.fill_(epoch)
    for inputs, targets in loader:  # already on the device; calls set_epoch
        optimizer.zero_grad()
        outputs = model(data.normalize(inputs, args.data, args.dtype))
        loss = nn.functional.cross_entropy(outputs, targets)
        meter.update(loss, outputs, targets)
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
    meter.sums = fabric.all_reduce(meter.sums, reduce_op="sum")  # default: the mean
    return meter.compute()


@torch.no_grad()
def evaluate(args, model, loader):
    model.eval()
    meter = meters.Meter(args.device)
    for inputs, targets in loader:
        outputs = model(data.normalize(inputs, args.data, args.dtype))
        loss = nn.functional.cross_entropy(outputs, targets)
        meter.update(loss, outputs, targets)
    return meter.compute()


def main():
    args = parse_args()
    fabric = Fabric()  # the device and the number of processes come from `fabric run`
    args.device = fabric.device
    with fabric.rank_zero_first():
        train_set, val_set = data.load(
            args.data,
            args.data_dir,
            args.download,
            args.image_size,
            args.images,
            args.seed,
        )
    sampler = DistributedSampler(
        train_set,
        num_replicas=fabric.world_size,
        rank=fabric.global_rank,
        # Only to compare: Fabric's set_epoch counts from 0, and stage 03 from 1.
        seed=args.seed + 1,
        drop_last=True,
    )
    options = loader_options(args.device, args.workers)
    options["batch_size"] = args.batch_size // fabric.world_size
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    train_loader = fabric.setup_dataloaders(train_loader)
    # Otherwise it gets a DistributedSampler, which repeats samples.
    whole = {"use_distributed_sampler": False}
    val_loader = fabric.setup_dataloaders(DataLoader(val_set, **options), **whole)
    torch.manual_seed(args.seed)
    channels, image_size, _ = train_set.image_shape
    model = make_model(args.arch, channels, train_set.num_classes, image_size)
    model.to(args.device, args.dtype, memory_format=torch.channels_last)
    options = {"momentum": 0.9, "weight_decay": args.weight_decay, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **options)
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(train_loader))
    model, optimizer = fabric.setup(model, optimizer)
    training = (model, train_loader, optimizer, scheduler)
    for epoch in range(1, args.epochs + 1):
        train = train_one_epoch(args, fabric, epoch, *training)
        val = evaluate(args, model, val_loader)
        fabric.print(f"epoch {epoch}: train {format_metrics(train)}")
        fabric.print(f"epoch {epoch}: val {format_metrics(val)} of {val['count']}")
    if args.reference:
        reference = weights.load(args.reference)
        trained = model.state_dict()
        off = max((trained[k].cpu() - reference[k]).abs().max() for k in reference)
        assert off < 1e-10, f"largest difference from stage 03's weights: {off}"
        fabric.print("weights differ by less than 1e-10; processes:", fabric.world_size)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    if dist.is_initialized():  # not on one process
        dist.destroy_process_group()
