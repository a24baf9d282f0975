"""Stage 03's training with Ray Train: a TorchTrainer starts the processes.

`make ray` installs Ray in .venv-ray, an environment that sees the torch in .venv. It
takes the flags of common/args.py, and --nproc. The weights after the last epoch are
written into --out-dir. There is no evaluation.

$ .venv-ray/bin/python other_libraries/ray_train.py --nproc=2
"""

import shutil
import sys
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import data
from common import meters
from common import weights
from common.args import ArgumentParser
from common.args import check_batch_size
from common.args import positive_int
from common.loader import loader_options
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics
from common.model import make_model


def parse_args(flags):
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--nproc", type=positive_int, default=2, help="number of processes"
    )
    return parser.parse_args(flags)


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch.fill_(epoch)
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:  # on the device already
        inputs = data.normalize(inputs, args.data, args.dtype)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        meter.update(loss, outputs, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
    dist.all_reduce(meter.sums)
    return meter.compute()


def run_on_each_worker(config):
    """Train in one of the processes; the process group is there already."""
    args = parse_args(config["flags"])
    args.device = ray.train.torch.get_device()
    if dist.get_rank() != 0:
        dist.barrier()  # rank 0 goes first: otherwise all of them download at once
    train_set, _ = data.load(
        args.data,
        args.data_dir,
        args.download,
        args.image_size,
        args.images,
        args.seed,
    )
    if dist.get_rank() == 0:
        dist.barrier()
    check_batch_size(args.batch_size, args.nproc, samples=len(train_set))
    loader = DataLoader(
        train_set,
        batch_size=args.batch_size // ray.train.get_context().get_world_size(),
        # Ray would add a sampler, but always with seed 0.
        sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),
        drop_last=True,
        **loader_options(args.device, args.workers),
    )
    loader = ray.train.torch.prepare_data_loader(loader)
    torch.manual_seed(args.seed)
    channels, image_size, _ = train_set.image_shape
    model = make_model(args.arch, channels, train_set.num_classes, image_size)
    model.to(args.device, args.dtype, memory_format=args.memory_format)
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(loader))
    wrapped = ray.train.torch.prepare_model(model)
    for epoch in range(1, args.epochs + 1):
        metrics = train_one_epoch(args, epoch, wrapped, loader, optimizer, scheduler)
        with tempfile.TemporaryDirectory() as folder:
            files = None
            if ray.train.get_context().get_world_rank() == 0:
                weights.save(model.state_dict(), Path(folder, "last.pt"))
                files = ray.train.Checkpoint.from_directory(folder)
            # Every process calls it, because they wait for each other there.
            ray.train.report(metrics, checkpoint=files)


def main():
    args = parse_args(sys.argv[1:])
    trainer = ray.train.torch.TorchTrainer(
        run_on_each_worker,
        # The flags as text: Ray cannot send a torch.memory_format.
        train_loop_config={"flags": sys.argv[1:]},
        torch_config=ray.train.torch.TorchConfig(
            timeout_s=int(args.timeout.total_seconds())
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.nproc, use_gpu=args.device.type == "cuda"
        ),
    )
    result = trainer.fit()  # starts Ray; an exception of a worker is raised here
    rows = result.metrics_dataframe.to_dict("records")
    for epoch, metrics in enumerate(rows, 1):
        print(f"epoch {epoch}: train {format_metrics(metrics)}")
    if args.out_dir:
        args.out_dir.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(result.checkpoint.path, "last.pt"), args.out_dir)


if __name__ == "__main__":
    main()
