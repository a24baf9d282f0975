"""[02] Split every batch over the GPUs of one machine, in one process: nn.DataParallel.

python 02_dataparallel/train.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import checkpoint
from common import data
from common import flags
from common import meters
from common import lr_schedule
from common.model import make_model

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import RandomSampler


# ---- 1. flags ----------------------------------------------------------------------------------
def parse_args():
    """Return the flags, checked: those of common/flags.py and the stage's own."""
    parser = flags.Flags(__doc__)
    args = parser.parse_args()
    return args


# ---- 2. processes ------------------------------------------------------------------------------
def setup(args):
    """Prepare this process and return its device."""
    device = flags.nth_device(args, 0)
    return device


def is_main_process():
    """Whether this process is the one that prints and writes."""
    return True


def log(text):
    """Print a line, once for the whole run."""
    if is_main_process():
        print(text, flush=True)


# ---- 3. data -----------------------------------------------------------------------------------
def make_loaders(args):
    """Return the loaders of this process's training and validation batches."""
    train_set, val_set = data.load_data(args)
    batch_size = args.batch_size
    train_loader = DataLoader(
        train_set,
        batch_size=batch_size,
        sampler=RandomSampler(train_set, generator=torch.Generator()),
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
    loader.sampler.generator.manual_seed(args.seed + epoch)  # another order in every epoch
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
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    wrapped = nn.DataParallel(model) if gpus else model  # [02] `model` stays what is saved
    log("DataParallel has nothing to split" if gpus < 2 else f"DataParallel on {gpus} GPUs")
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


if __name__ == "__main__":
    main()
