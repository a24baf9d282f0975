"""[02] Split every batch over the GPUs of one machine, in one process: nn.DataParallel.

python 02_dataparallel/train.py
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import data
from common import launch
from common import meters
from common import weights
from common.args import ArgumentParser
from common.args import check_batch_size
from common.args import one_line_errors
from common.loader import loader_options
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics
from common.model import make_model


# ---- 1. flags ------------------------------------------------------------------------
def parse_args():
    """Parse and check the flags: those of common/args.py, and this stage's own."""
    parser = ArgumentParser(__doc__)
    args = parser.parse_args()
    return args


# ---- 2. processes --------------------------------------------------------------------
def setup(args):
    """Prepare this process and return its device."""
    device = launch.get_device(args.device, local_rank=0)
    # TF32 is torch's default for convolutions: 10 bits of a factor's fraction, not 23
    precision = "tf32" if args.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    # otherwise two runs on a GPU can differ in the last bits
    torch.backends.cudnn.deterministic = args.deterministic
    return device


def is_main_process():
    """Whether this process is the one that prints and writes."""
    return True


def log(line):
    """Print a line, once for the whole run."""
    if is_main_process():
        print(line, flush=True)


# ---- 3. data -------------------------------------------------------------------------
def make_loaders(args):
    """Return the loaders of this process's training and validation batches."""
    with one_line_errors(f"--data {args.data}:"):
        train_set, val_set = data.load(
            args.data,
            args.data_dir,
            args.download,
            args.image_size,
            args.images,
            args.seed,
        )
    check_batch_size(args.batch_size, processes=1, samples=len(train_set))
    local_batch_size = args.batch_size
    options = loader_options(args.device, args.workers)
    train_loader = DataLoader(
        train_set,
        batch_size=local_batch_size,
        sampler=RandomSampler(train_set, generator=torch.Generator()),
        drop_last=True,  # otherwise a sample of a short last batch weighs more
        **options,
    )
    val_loader = DataLoader(val_set, batch_size=local_batch_size, **options)
    return train_loader, val_loader


# ---- 4. one training epoch -----------------------------------------------------------
def forward(args, model, batch, meter):
    """Return a batch's mean loss, and add it to the meter."""
    # uint8 until they are on the device: a quarter of the bytes of float32
    inputs, targets = (each.to(args.device, non_blocking=True) for each in batch)
    inputs = data.normalize(inputs, args.data, args.dtype)
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    meter.update(loss, outputs, targets)
    return loss


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    # so the order follows from --seed and the epoch alone, as in DistributedSampler
    loader.sampler.generator.manual_seed(args.seed + epoch)
    batches = meters.progress(loader, f"epoch {epoch}", meter, show=is_main_process())
    for batch in batches:
        # before the forward pass, which then has the memory of the old gradients
        optimizer.zero_grad()
        loss = forward(args, model, batch, meter)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return meter.compute()


# ---- 5. evaluation -------------------------------------------------------------------
@torch.no_grad()
def evaluate(args, model, loader):
    """Return the metrics over the whole validation set."""
    model.eval()
    meter = meters.Meter(args.device)
    batches = meters.progress(loader, "evaluation", meter, show=is_main_process())
    for batch in batches:
        forward(args, model, batch, meter)
    return meter.compute()


# ---- 6. the run ----------------------------------------------------------------------
def has_diverged(model):
    """Return whether training has diverged, so that the weights are useless."""
    norm = nn.utils.get_total_norm(model.parameters())
    return not norm.isfinite().item()


def run(args):
    """Train and evaluate for --epochs, or only evaluate; return the exit code."""
    train_loader, val_loader = make_loaders(args)
    torch.manual_seed(args.seed)
    train_set = train_loader.dataset
    channels, image_size, _ = train_set.image_shape
    with one_line_errors(f"--arch {args.arch}:"):
        model = make_model(args.arch, channels, train_set.num_classes, image_size)
    model.to(args.device, args.dtype, memory_format=torch.channels_last)
    if args.evaluate:
        with one_line_errors("--evaluate:"):
            weights.load_weights(model, args.evaluate)
        log(f"val {format_metrics(evaluate(args, model, val_loader))}")
        return 0
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(train_loader))
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    # [02] `model` is what is saved: the wrapper puts "module." before the names
    wrapped = nn.DataParallel(model) if gpus else model
    log(f"DataParallel on {gpus} GPUs" if gpus > 1 else "one device: nothing to split")
    saved = True
    for epoch in range(1, args.epochs + 1):
        # otherwise every epoch has the same crops and flips
        train_set.epoch.fill_(epoch)
        train = train_one_epoch(
            args, epoch, wrapped, train_loader, optimizer, scheduler
        )
        if has_diverged(model):
            # otherwise useless weights overwrite the last good ones
            log(f"stopped in epoch {epoch}: training has diverged; try a lower --lr")
            return 1
        val = evaluate(args, model, val_loader)
        log(f"epoch {epoch}: train {format_metrics(train)}, val {format_metrics(val)}")
        if args.out_dir and is_main_process():
            state_dict = model.state_dict()
            saved &= weights.save_epoch(args.out_dir, epoch, train, val, state_dict)
    return 0 if saved else 1


def main():
    args = parse_args()
    args.device = setup(args)
    exit_code = run(args)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
