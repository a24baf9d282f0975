"""Stage 03's training with Ray Train: a TorchTrainer starts the processes.

`make ray` installs Ray in .venv-ray, an environment that sees the torch in .venv. It
takes the flags of common/args.py, and --nproc. The weights after the last epoch are
written into --out-dir. There is no evaluation.

$ .venv-ray/bin/python recipes/neighbors/ray_train.py --nproc=2
"""

import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

# Ray reads these when it is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # otherwise it reports how it is used
# Despite its name, on Linux, too: otherwise Ray listens on an address that other
# machines can reach.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"
# Otherwise it writes a token into the home directory, and leaves it there.
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import checkpoint
from common import data
from common import launch
from common import meters
from common.args import ArgumentParser
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
    args = parser.parse_args(flags)
    launch.check_batch_size(args, args.nproc)
    return args


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    loader.dataset.epoch = epoch
    loader.sampler.set_epoch(epoch)
    for images, target in loader:  # on the device already
        images = data.normalize(args, images)
        optimizer.zero_grad()
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        meter.update(loss, output, target)
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
    train_set, _ = data.load_data(args)
    if dist.get_rank() == 0:
        dist.barrier()
    loader = DataLoader(
        train_set,
        batch_size=args.batch_size // ray.train.get_context().get_world_size(),
        # Ray would add a sampler, but always with seed 0.
        sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),
        drop_last=True,
        **loader_options(args),
    )
    loader = ray.train.torch.prepare_data_loader(loader)
    torch.manual_seed(args.seed)
    model = make_model(args, train_set)
    model.to(args.device, args.dtype, memory_format=args.memory_format)
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
        fused=True,
    )
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(loader))
    wrapped = ray.train.torch.prepare_model(model)
    for epoch in range(1, args.epochs + 1):
        metrics = train_one_epoch(args, epoch, wrapped, loader, optimizer, scheduler)
        with tempfile.TemporaryDirectory() as folder:
            files = None
            if ray.train.get_context().get_world_rank() == 0:
                checkpoint.save(model.state_dict(), Path(folder, "last.pt"))
                files = ray.train.Checkpoint.from_directory(folder)
            # Every process calls it, because they wait for each other there.
            ray.train.report(metrics, checkpoint=files)


def main():
    args = parse_args(sys.argv[1:])
    # Ray keeps its sockets, logs, objects and checkpoints here.
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=args.nproc,
            include_dashboard=False,
            log_to_driver=False,  # otherwise a warning per second: no dashboard
            object_store_memory=2**27,
            _temp_dir=folder,  # otherwise /tmp/ray, which stays
            _plasma_directory=folder,  # otherwise /dev/shm, small in many containers
        )
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
            # Otherwise checkpoints go to ~/ray_results.
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        result = trainer.fit()  # an exception of a worker is raised here
        rows = result.metrics_dataframe.to_dict("records")
        for epoch, metrics in enumerate(rows, 1):
            print(f"epoch {epoch}: train {format_metrics(metrics)}")
        if args.out_dir:
            args.out_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(result.checkpoint.path, "last.pt"), args.out_dir)
        ray.shutdown()


if __name__ == "__main__":
    main()
