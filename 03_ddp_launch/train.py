"""[03] Train with one process per device, started by torchrun: DistributedDataParallel.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/train.py
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import attached
from common import checkpoint
from common import data
from common import flags
from common import meters
from common import lr_schedule
from common.model import make_model

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler


# ---- 1. flags ----------------------------------------------------------------------------------
def parse_args():
    """Return the flags, checked: those of common/flags.py and the stage's own."""
    parser = flags.Flags(__doc__)
    parser.add_argument("--sync-bn", action="store_true", help="SyncBatchNorm (GPUs)")  # [03]
    args = parser.parse_args()
    if args.sync_bn and args.device.type == "cpu":
        parser.error("--sync-bn: torch has SyncBatchNorm for GPUs only")
    return args


# ---- 2. processes ------------------------------------------------------------------------------
@flags.explain("MASTER_ADDR, MASTER_PORT", ValueError, dist.DistNetworkError)  # [03] port in use
def setup(args):
    """Prepare this process and return its device."""
    *_, local_rank = flags.place(args, "RANK", "WORLD_SIZE", "LOCAL_RANK")  # [03] set by torchrun
    attached.die_with_parent()  # [03] otherwise a killed launcher leaves its processes training
    device = flags.nth_device(args, local_rank)  # [03] not RANK, which counts over all machines
    if device.type == "cuda":
        torch.cuda.set_device(device)  # [03] otherwise every process also takes memory of GPU 0
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=args.timeout,  # [03] a process that hangs is noticed after that
        device_id=device if device.type == "cuda" else None,
    )
    return device


def is_main_process():
    """Whether this process is the one that prints and writes."""
    return dist.get_rank() == 0  # [03] otherwise every process prints and writes the same


def log(text):
    """Print a line, once for the whole run."""
    if is_main_process():
        print(text, flush=True)


# ---- 3. data -----------------------------------------------------------------------------------
def make_loaders(args):
    """Return the loaders of this process's training and validation batches."""
    if not is_main_process():
        dist.barrier()  # [03] rank 0 goes first: otherwise all of them download at once
    train_set, val_set = data.load_data(args)
    if is_main_process():
        dist.barrier()
    batch_size = args.batch_size // dist.get_world_size()  # [03] the process's share
    train_loader = DataLoader(
        train_set,
        batch_size=batch_size,
        sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),  # [03] its images
        drop_last=True,  # a last batch of three images would weigh as much as one of sixty
        **data.loader_options(args),
    )
    val_loader = DataLoader(val_set, batch_size=batch_size, **data.loader_options(args))
    return train_loader, val_loader


# ---- 4. one training epoch ---------------------------------------------------------------------
def train_one_epoch(args, epoch, model, loader, optimizer, scheduler):
    """Take one optimizer step per global batch; return the epoch's averages."""
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch = epoch  # other crops and flips in every epoch
    loader.sampler.set_epoch(epoch)  # [03] otherwise every epoch has the same order
    for images, target in meters.progress(loader, f"epoch {epoch}", meter, show=is_main_process()):
        images = images.to(args.device, args.dtype, non_blocking=True)
        target = target.to(args.device, non_blocking=True)
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        meter.update(loss, output, target)
    dist.all_reduce(meter.sums)  # [03] otherwise the figures are those of rank 0's share
    return meter.compute()


# ---- 5. evaluation -----------------------------------------------------------------------------
@torch.no_grad()
def evaluate(args, model, loader):
    """Return the averages over the whole validation set."""
    model.eval()
    meter = meters.Meter(args.device)
    for images, target in meters.progress(loader, "evaluation", meter, show=is_main_process()):
        images = images.to(args.device, args.dtype, non_blocking=True)
        target = target.to(args.device, non_blocking=True)
        output = model(images)
        meter.update(nn.functional.cross_entropy(output, target), output, target)
    return meter.compute()


# ---- 6. the run --------------------------------------------------------------------------------
def run(args):
    """Train and evaluate for --epochs, or only evaluate."""
    train_loader, val_loader = make_loaders(args)
    torch.manual_seed(args.seed)
    model = make_model(args, train_loader.dataset).to(args.device, args.dtype)
    if args.evaluate:
        checkpoint.load_weights(model, args.evaluate)
        return log(f"val {meters.format_metrics(evaluate(args, model, val_loader))}")
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True
    )
    scheduler = lr_schedule.warmup_cosine(optimizer, args.epochs * len(train_loader))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn else model  # [03]
    wrapped = nn.parallel.DistributedDataParallel(model)  # [03] `model` stays what is saved
    log(f"{dist.get_world_size()} processes on {dist.get_backend()}")  # [03] did all join?
    for epoch in range(1, args.epochs + 1):
        train = train_one_epoch(args, epoch, wrapped, train_loader, optimizer, scheduler)
        val = evaluate(args, model, val_loader)
        log(f"epoch {epoch}: train {meters.format_metrics(train)}, val {meters.format_metrics(val)}")
        if args.out_dir and is_main_process():
            checkpoint.save_epoch(args.out_dir, epoch, train, val, model.state_dict())


def main():
    args = parse_args()
    args.device = setup(args)
    run(args)
    gc.collect()  # [03] a DDP object that outlives the group aborts one run in ten at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
