"""[04] Train with one process per device, started by the script: torch.multiprocessing.

python 04_ddp_spawn/train.py --nproc=2
"""

import gc
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

# [03] noted before the slow imports, during which the launcher may die
PARENT_PID = os.getppid()

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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


# ---- 1. flags ------------------------------------------------------------------------
def parse_args():
    """Parse and check the flags: those of common/args.py, and this stage's own."""
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--sync-bn", action="store_true", help="batch norm over all processes (CUDA)"
    )
    # [04] no launcher says how many
    parser.add_argument("--nproc", type=positive_int, help="number of processes")
    args = parser.parse_args()
    # [03] otherwise DDP raises a ValueError that does not name the flag
    if args.sync_bn and args.device.type == "cpu":
        parser.error("--sync-bn: torch implements SyncBatchNorm for GPUs only")
    if args.nproc is None:
        args.nproc = torch.cuda.device_count() if args.device.type == "cuda" else 2
    # [04] checked here, in the parent, an error is reported once and not by every rank
    launch.check_batch_size(args, args.nproc)
    launch.get_device(args, args.nproc - 1)
    return args


# ---- 2. processes --------------------------------------------------------------------
def setup(args, rank, folder):
    """Prepare this process and return its device."""
    # [03] otherwise a launcher that is killed leaves its processes training
    launch.die_with_parent(PARENT_PID)
    local_rank = rank  # [04] all processes are on this machine
    device = launch.get_device(args, local_rank)
    # off by default: TF32 keeps 10 bits of a factor's fraction, float32 has 23
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    # otherwise two runs on a GPU can differ in the last bits
    torch.backends.cudnn.deterministic = args.deterministic
    if device.type == "cuda":
        # [03] otherwise every process also takes memory on GPU 0
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        # [04] the processes meet in a new file: there is no port that can be taken
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=args.nproc,
        timeout=args.timeout,  # [03] how long a collective waits for a missing rank
        device_id=device if device.type == "cuda" else None,
    )
    return device


def is_main_process():
    """Whether this process is the one that prints and writes."""
    return dist.get_rank() == 0  # [03] otherwise every process prints and writes


def log(text):
    """Print a line, once for the whole run."""
    if is_main_process():
        print(text, flush=True)


# ---- 3. data -------------------------------------------------------------------------
def make_loaders(args):
    """Return the loaders of this process's training and validation batches."""
    if not is_main_process():
        dist.barrier()  # [03] rank 0 goes first: otherwise all of them download at once
    train_set, val_set = data.load_data(args)
    if is_main_process():
        dist.barrier()
    # [03] otherwise the global batch grows with the number of processes
    local_batch_size = args.batch_size // dist.get_world_size()
    options = loader_options(args)
    train_loader = DataLoader(
        train_set,
        batch_size=local_batch_size,
        # [03] otherwise every process trains on all the samples
        sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),
        drop_last=True,  # otherwise a sample of a short last batch weighs more
        **options,
    )
    val_loader = DataLoader(val_set, batch_size=local_batch_size, **options)
    return train_loader, val_loader


# ---- 4. one training epoch -----------------------------------------------------------
def train_one_epoch(args, epoch, model, loader, optimizer, scheduler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    # Otherwise every epoch has the same crops and flips, and the same order.
    loader.dataset.epoch = epoch
    loader.sampler.set_epoch(epoch)  # [03] otherwise every epoch has the same order
    batches = meters.progress(loader, f"epoch {epoch}", meter, show=is_main_process())
    for images, target in batches:
        # uint8 until they are on the device: a quarter of the bytes of float32
        images = data.normalize(args, images.to(args.device, non_blocking=True))
        target = target.to(args.device, non_blocking=True)
        # before the forward pass, which then has the memory of the old gradients
        optimizer.zero_grad()
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        meter.update(loss, output, target)
        loss.backward()
        optimizer.step()
        scheduler.step()
    # [03] otherwise the metrics are those of rank 0's samples alone
    dist.all_reduce(meter.sums)
    return meter.compute()


# ---- 5. evaluation -------------------------------------------------------------------
@torch.no_grad()
def evaluate(args, model, loader):
    """Return the metrics over the whole validation set."""
    model.eval()
    meter = meters.Meter(args.device)
    batches = meters.progress(loader, "evaluation", meter, show=is_main_process())
    for images, target in batches:
        images = data.normalize(args, images.to(args.device, non_blocking=True))
        target = target.to(args.device, non_blocking=True)
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        meter.update(loss, output, target)
    return meter.compute()


# ---- 6. the run ----------------------------------------------------------------------
def run(args):
    """Train and evaluate for --epochs, or only evaluate; return the exit code."""
    train_loader, val_loader = make_loaders(args)
    torch.manual_seed(args.seed)
    model = make_model(args, train_loader.dataset)
    model.to(args.device, args.dtype, memory_format=args.memory_format)
    # [03] otherwise all ranks draw the same numbers, for dropout for instance
    torch.manual_seed(args.seed + dist.get_rank())
    if args.sync_bn:  # [03] before the model is wrapped
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.evaluate:
        checkpoint.load_weights(model, args.evaluate)
        log(f"val {format_metrics(evaluate(args, model, val_loader))}")
        return 0
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=0.9,
        weight_decay=args.weight_decay,
        nesterov=True,
        fused=True,  # one kernel for the whole update, not one per operation
    )
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(train_loader))
    # [03] averages the gradients during backward; `model` is what is saved
    wrapped = nn.parallel.DistributedDataParallel(model)
    log(f"{dist.get_world_size()} processes on {dist.get_backend()}")
    for epoch in range(1, args.epochs + 1):
        train = train_one_epoch(
            args, epoch, wrapped, train_loader, optimizer, scheduler
        )
        val = evaluate(args, model, val_loader)
        log(f"epoch {epoch}: train {format_metrics(train)}, val {format_metrics(val)}")
        if args.out_dir and is_main_process():
            checkpoint.save_epoch(args.out_dir, epoch, train, val, model.state_dict())
    return 0


def main():
    args = parse_args()
    # [04] otherwise SIGTERM ends this process without the cleanup below
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # [04] otherwise every process starts one thread per core
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.nproc)))
    with TemporaryDirectory() as folder:
        context = mp.spawn(worker, (args, folder), args.nproc, join=False)
        try:
            while not context.join():  # [04] raises what a process raised
                pass
        except mp.ProcessExitedException as error:
            # [04] exit code 2: a flag is wrong, and that process has said which
            sys.exit(2 if error.exit_code == 2 else str(error))
        except mp.ProcessRaisedException as error:
            sys.exit(str(error))
        finally:
            for process in context.processes:
                process.kill()  # [04] otherwise Python waits at exit until they end


def worker(rank, args, folder):
    """Entry point of a spawned process."""
    args.device = setup(args, rank, folder)
    exit_code = run(args)
    # [03] a DDP object that outlives the group aborts one gloo run in ten at exit
    gc.collect()
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
