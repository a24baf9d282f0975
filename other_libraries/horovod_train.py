"""Stage 03's training with Horovod: horovodrun starts the processes.

`make horovod` builds Horovod in .venv-horovod, an environment that sees the torch in
.venv; its bin directory must be in PATH. The flags are those of common/args.py. After
each epoch, the weights are written to last.pt in --out-dir. There is no evaluation.

$ horovodrun -np 2 --gloo python other_libraries/horovod_train.py
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import data
from common import meters
from common import weights
from common.args import ArgumentParser
from common.args import check_batch_size
from common.loader import loader_options
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics
from common.model import make_model


def parse_args():
    """Parse and check the flags, which are those of common/args.py."""
    return ArgumentParser(__doc__).parse_args()


def make_loader(args):
    """Return the loader of this process's training batches."""
    if hvd.rank() != 0:
        hvd.barrier()  # rank 0 goes first: otherwise all of them download at once
    train_set, _ = data.load(
        args.data,
        args.data_dir,
        args.download,
        args.image_size,
        args.images,
        args.seed,
    )
    if hvd.rank() == 0:
        hvd.barrier()
    check_batch_size(args.batch_size, hvd.size(), samples=len(train_set))
    # Otherwise the sampler asks torch.distributed, which has no process group here.
    sampler = DistributedSampler(
        train_set,
        num_replicas=hvd.size(),
        rank=hvd.rank(),
        seed=args.seed,
        drop_last=True,
    )
    return DataLoader(
        train_set,
        batch_size=args.batch_size // hvd.size(),
        sampler=sampler,
        drop_last=True,
        **loader_options(args.device, args.workers),
    )


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch.fill_(epoch)
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        inputs = inputs.to(args.device, non_blocking=True)
        inputs = data.normalize(inputs, args.data, args.dtype)
        targets = targets.to(args.device, non_blocking=True)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        meter.update(loss, outputs, targets)
        loss.backward()
        optimizer.step()  # waits for the averaged gradients
        scheduler.step()
    hvd.allreduce_(meter.sums, op=hvd.Sum)  # the default is the average
    return meter.compute()


def run(args):
    """Train for --epochs, without stage 03's evaluation."""
    loader = make_loader(args)
    torch.manual_seed(args.seed)
    channels, image_size, _ = loader.dataset[0][0].shape
    model = make_model(args.arch, channels, loader.dataset.num_classes, image_size)
    # Horovod refuses torch.channels_last ("Tensor is required to be contiguous").
    model.to(args.device, args.dtype)
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    # Before the scheduler: it must see the optimizer that steps.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(loader))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(1, args.epochs + 1):
        train = train_one_epoch(args, epoch, model, loader, optimizer, scheduler)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: train {format_metrics(train)}", flush=True)
            if args.out_dir:
                args.out_dir.mkdir(parents=True, exist_ok=True)
                weights.save(model.state_dict(), args.out_dir / "last.pt")


def main():
    hvd.init()
    args = parse_args()
    if args.device.type == "cuda":
        args.device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(args.device)
    run(args)
    hvd.shutdown()


if __name__ == "__main__":
    main()
