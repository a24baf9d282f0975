"""[06] Train with one process per device, started by Slurm, or else by torchrun.

sbatch 06_slurm/job.sbatch
torchrun --standalone --nproc-per-node=2 06_slurm/train.py
"""

import contextlib
import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import data
from common import launch
from common import meters
from common import weights
from common.args import ArgumentParser
from common.args import check_batch_size
from common.args import number
from common.args import one_line_errors
from common.loader import loader_options
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics
from common.model import make_model

# [05] bf16 where the hardware has it, fp16 on older GPUs
AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- 1. flags ------------------------------------------------------------------------
def parse_args():
    """Parse and check the flags: those of common/args.py, and this stage's own."""
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--amp", choices=AMP_DTYPES, default="off", help="mixed precision"
    )
    parser.add_argument(
        "--clip-grad",
        type=number(float, ge=0),
        help="clip the gradients to this norm; 0: do not clip",
    )
    args = parser.parse_args()
    # [05] otherwise --amp would do nothing: autocast leaves float64 as it is
    if args.amp != "off" and args.dtype != torch.float32:
        parser.error("--amp: not with --dtype float64, which autocast leaves as it is")
    return args


# ---- 2. processes --------------------------------------------------------------------
def setup(args):
    """Prepare this process and return its device."""
    # [06] srun sets the variables of torchrun under names of its own
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    # [03] ends this process if no launcher started it
    launch.check()
    # [03] otherwise it stays if torchrun is killed
    launch.die_with_parent()
    # [03] not RANK, which counts the processes of all machines
    local_rank = int(os.environ["LOCAL_RANK"])
    device = launch.get_device(args.device, local_rank)
    # TF32 is torch's default for convolutions: 10 bits of a factor's fraction, not 23
    precision = "tf32" if args.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    # otherwise two runs on a GPU can differ in the last bits
    torch.backends.cudnn.deterministic = args.deterministic
    if device.type == "cuda":
        # [03] otherwise every process also takes memory on GPU 0
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=args.timeout,  # [03] how long a collective waits for a missing rank
        device_id=device if device.type == "cuda" else None,
    )
    return device


def is_main_process():
    """Whether this process is the one that prints and writes."""
    return dist.get_rank() == 0  # [03] otherwise every process prints and writes


@contextlib.contextmanager
def main_process_first():
    """Run a block on rank 0, then on a rank of each other machine, then on the rest."""
    local_rank = int(os.environ["LOCAL_RANK"])
    # [03] turn 1 is for machines that do not see the disk of rank 0
    turn = 0 if is_main_process() else 1 if local_rank == 0 else 2
    for _ in range(turn):
        dist.barrier()
    try:
        yield
    finally:
        # [03] also if the block fails: otherwise the others wait for this rank in vain
        for _ in range(turn, 3):
            dist.barrier()


def log(line):
    """Print a line, once for the whole run."""
    if is_main_process():
        print(line, flush=True)


# ---- 3. data -------------------------------------------------------------------------
def make_loaders(args):
    """Return the loaders of this process's training and validation batches."""
    # [03] otherwise all of them download at once
    with main_process_first(), one_line_errors(f"--data {args.data}:"):
        train_set, val_set = data.load(
            args.data,
            args.data_dir,
            args.download,
            args.image_size,
            args.images,
            args.seed,
        )
    check_batch_size(args.batch_size, dist.get_world_size(), samples=len(train_set))
    # [03] otherwise the global batch grows with the number of processes
    local_batch_size = args.batch_size // dist.get_world_size()
    options = loader_options(args.device, args.workers)
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
def forward(args, model, batch, meter):
    """Return a batch's mean loss, and add it to the meter."""
    # uint8 until they are on the device: a quarter of the bytes of float32
    inputs, targets = (each.to(args.device, non_blocking=True) for each in batch)
    inputs = data.normalize(inputs, args.data, args.dtype)
    # [05] convolutions and matrix products in low precision, losses in float32
    dtype = AMP_DTYPES[args.amp]
    with torch.autocast(args.device.type, dtype, enabled=dtype is not None):
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
    meter.update(loss, outputs, targets)
    return loss


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler, scaler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    loader.sampler.set_epoch(epoch)  # [03] otherwise every epoch has the same order
    batches = meters.progress(loader, f"epoch {epoch}", meter, show=is_main_process())
    for batch in batches:
        # before the forward pass, which then has the memory of the old gradients
        optimizer.zero_grad()
        loss = forward(args, model, batch, meter)
        scaler.scale(loss).backward()  # [05] otherwise small gradients are 0 in fp16
        if args.clip_grad:
            scaler.unscale_(optimizer)  # [05] otherwise clipping sees scaled gradients
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scale = scaler.get_scale()
        scaler.step(optimizer)  # [05] skips the step if a gradient is inf or nan
        scaler.update()
        if scaler.get_scale() >= scale:  # [05] a skipped step lowers the scale
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
    for batch in batches:
        forward(args, model, batch, meter)
    return meter.compute()


# ---- 6. the run ----------------------------------------------------------------------
def has_diverged(model, scaler):
    """Return whether training has diverged, so that the weights are useless."""
    norm = nn.utils.get_total_norm(model.parameters())
    # [05] in fp16, if every step overflows, none is taken and the scale keeps falling
    return not norm.isfinite().item() or scaler.get_scale() < 0.01


def run(args):
    """Train and evaluate for --epochs, or only evaluate; return the exit code."""
    train_loader, val_loader = make_loaders(args)
    torch.manual_seed(args.seed)
    train_set = train_loader.dataset
    channels, image_size, _ = train_set.image_shape
    with one_line_errors(f"--arch {args.arch}:"):
        model = make_model(args.arch, channels, train_set.num_classes, image_size)
    model.to(args.device, args.dtype, memory_format=torch.channels_last)
    # [03] otherwise all ranks draw the same numbers, for dropout for instance
    torch.manual_seed(args.seed + dist.get_rank())
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
    # [03] averages the gradients during backward; `model` is what is saved
    wrapped = nn.parallel.DistributedDataParallel(model)
    log(f"{dist.get_world_size()} processes on {dist.get_backend()}")
    # [05] only fp16 needs it: the other formats have the range of float32
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
    saved = True
    for epoch in range(1, args.epochs + 1):
        # otherwise every epoch has the same crops and flips
        train_set.epoch.fill_(epoch)
        train = train_one_epoch(
            args, epoch, wrapped, train_loader, optimizer, scheduler, scaler
        )
        if has_diverged(model, scaler):
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
    # [03] an object that still has the group, as DDP does, can abort a gloo run at exit
    gc.collect()
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
