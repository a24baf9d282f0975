"""[08] Accumulate gradients: micro-batches that fit, averaged over ranks once per step.

torchrun --standalone --nproc-per-node=2 08_grad_accumulation/train.py \
--grad-accum-steps 3
"""

import contextlib
import gc
import math
import os
import sys
from pathlib import Path

# [03] noted before the slow imports, during which the launcher may die
PARENT_PID = os.getppid()

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import checkpoint
from common import data
from common import launch
from common import meters
from common.args import ArgumentParser
from common.args import fail
from common.args import positive_float
from common.args import positive_int
from common.args import writable_file
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
    # [05] bf16 where the hardware has it, fp16 on older GPUs
    parser.add_argument(
        "--amp", choices=("off", "bf16", "fp16"), default="off", help="mixed precision"
    )
    parser.add_argument(
        "--clip-grad", type=positive_float, help="clip the gradients to this norm"
    )
    # [08] for a batch that does not fit into the memory of the devices
    parser.add_argument(
        "--grad-accum-steps",
        type=positive_int,
        default=1,
        help="micro-batches that each process splits its local batch into",
    )
    # [07] for what does not add up over shards, a confusion matrix for instance
    parser.add_argument(
        "--save-logits",
        type=writable_file,
        help="write the logits of the validation set to this file, in the set's order",
    )
    args = parser.parse_args()
    # [03] otherwise DDP raises a ValueError that does not name the flag
    if args.sync_bn and args.device.type == "cpu":
        parser.error("--sync-bn: torch implements SyncBatchNorm for GPUs only")
    # [05] otherwise --amp would do nothing: autocast leaves float64 as it is
    if args.amp != "off" and args.dtype != torch.float32:
        parser.error("--amp: not with --dtype float64, which autocast leaves as it is")
    # [07] otherwise the logits overwrite the weights
    if args.save_logits and args.save_logits == args.evaluate:
        parser.error("--save-logits: this is the file of --evaluate; name another")
    return args


# ---- 2. processes --------------------------------------------------------------------
def setup(args):
    """Prepare this process and return its device."""
    # [06] srun sets the variables of torchrun under names of its own
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    launch.check_environment(args)
    # [03] otherwise a launcher that is killed leaves its processes training
    launch.die_with_parent(PARENT_PID)
    # [03] not RANK, which counts the processes of all machines
    local_rank = int(os.environ["LOCAL_RANK"])
    device = launch.get_device(args, local_rank)
    # off by default: TF32 keeps 10 bits of a factor's fraction, float32 has 23
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    # otherwise two runs on a GPU can differ in the last bits
    torch.backends.cudnn.deterministic = args.deterministic
    if device.type == "cuda":
        # [03] otherwise every process also takes memory on GPU 0
        torch.cuda.set_device(device)
    with launch.hint("check MASTER_ADDR and MASTER_PORT"):
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
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
    # [08] the loader's batches stay as they are: a step sees the same samples as before
    micro_batch_size = local_batch_size // args.grad_accum_steps
    if micro_batch_size == 0:
        fail(f"--grad-accum-steps: a local batch has only {local_batch_size} samples")
    options = loader_options(args)
    train_loader = DataLoader(
        train_set,
        batch_size=local_batch_size,
        # [03] otherwise every process trains on all the samples
        sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),
        drop_last=True,  # otherwise a sample of a short last batch weighs more
        **options,
    )
    # [07] every sample exactly once: DistributedSampler would repeat some
    shard = range(dist.get_rank(), len(val_set), dist.get_world_size())
    val_set = Subset(val_set, shard)
    # [08] otherwise evaluation can take more memory than training
    val_loader = DataLoader(val_set, batch_size=micro_batch_size, **options)
    return train_loader, val_loader


# ---- 4. one training epoch -----------------------------------------------------------
def autocast(args):
    """Return the context of a forward pass in the precision that --amp asks for."""
    # [05] convolutions and matrix products in low precision, losses in float32
    dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[args.amp]
    return torch.autocast(args.device.type, dtype, enabled=args.amp != "off")


def accumulate_gradients(args, model, batch, scaler, meter):
    """Run forward and backward on one micro-batch after the other; return the loss."""
    mean_loss = 0.0
    parts = [tensor.tensor_split(args.grad_accum_steps) for tensor in batch]
    for micro_step, (images, target) in enumerate(zip(*parts, strict=True), start=1):
        # [08] one micro-batch at a time is on the device
        # uint8 until they are on the device: a quarter of the bytes of float32
        images = data.normalize(args, images.to(args.device, non_blocking=True))
        target = target.to(args.device, non_blocking=True)
        last = micro_step == args.grad_accum_steps
        # [08] otherwise DDP averages the gradients after every micro-batch; the forward
        # pass is what has to be in this context
        sync = contextlib.nullcontext() if last else model.no_sync()
        with sync, autocast(args):
            output = model(images)
            loss = nn.functional.cross_entropy(output, target)
        meter.update(loss, output, target)
        # [08] not 1 / N: micro-batches can differ in size by one sample
        weight = len(target) / len(batch[1])
        mean_loss += loss.detach() * weight
        # [05] otherwise small gradients become zero in fp16
        scaler.scale(loss * weight).backward()
    return mean_loss


def skip_step(step, loss, scaler):
    """Report a skipped step, or end the run if a smaller loss scale cannot help."""
    # [05] the scaler halves its scale after each such step; without fp16 it is always 1
    if not loss.isfinite() or scaler.get_scale() <= 1:
        where = f"rank {dist.get_rank()}, step {step}"
        raise FloatingPointError(f"{where}: gradient not finite, loss {loss}")
    log(f"step {step}: skipped, gradient not finite, loss scale {scaler.get_scale():g}")


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler, scaler):
    """Take one optimizer step per global batch; return the epoch's metrics."""
    model.train()
    meter = meters.Meter(args.device)
    # Otherwise every epoch has the same crops and flips, and the same order.
    loader.dataset.epoch = epoch
    loader.sampler.set_epoch(epoch)  # [03] otherwise every epoch has the same order
    batches = meters.progress(loader, f"epoch {epoch}", meter, show=is_main_process())
    for step, batch in enumerate(batches, (epoch - 1) * len(loader) + 1):
        # before the forward pass, which then has the memory of the old gradients
        optimizer.zero_grad()
        # [08] one micro-batch after the other: their gradients add up
        loss = accumulate_gradients(args, model, batch, scaler, meter)
        scaler.unscale_(optimizer)  # [05] otherwise clipping sees scaled gradients
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
        # [05] waits for the device; the same on all ranks, as gradients are averaged
        if norm.isfinite():
            scaler.step(optimizer)
            scheduler.step()
        else:
            skip_step(step, loss, scaler)
        scaler.update()
    # [03] otherwise the metrics are those of rank 0's samples alone
    dist.all_reduce(meter.sums)
    return meter.compute()


# ---- 5. evaluation -------------------------------------------------------------------
def gather_logits(args, shard, outputs):
    """Return the logits of the whole validation set, in its order, on rank 0.

    shard: this process's Subset; outputs: its logits, a list of [B, classes].
    """
    val_set = shard.dataset
    shape = (len(val_set), val_set.classes)
    logits = torch.zeros(shape, dtype=args.dtype, device=args.device)
    if outputs:
        logits[list(shard.indices)] = torch.cat(outputs).to(args.dtype)
    # [07] every row is zero on all ranks except the one that has the sample
    dist.reduce(logits, dst=0)
    return logits


@torch.no_grad()
def evaluate(args, model, loader):
    """Return the metrics over the whole validation set."""
    # [07] otherwise each rank evaluates with its own BatchNorm running statistics
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    meter = meters.Meter(args.device)
    outputs = []
    batches = meters.progress(loader, "evaluation", meter, show=is_main_process())
    for images, target in batches:
        images = data.normalize(args, images.to(args.device, non_blocking=True))
        target = target.to(args.device, non_blocking=True)
        with autocast(args):  # [05] evaluate in the precision of the training
            output = model(images)
            loss = nn.functional.cross_entropy(output, target)
        meter.update(loss, output, target)
        if args.save_logits:
            outputs.append(output)
    # [07] sums and counts add up; averages of shards of different sizes do not
    dist.all_reduce(meter.sums)
    if args.save_logits:
        logits = gather_logits(args, loader.dataset, outputs)
        if is_main_process():
            checkpoint.save(logits.cpu(), args.save_logits)
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
    # [05] only fp16 needs it: the other formats have the range of float32
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
    for epoch in range(1, args.epochs + 1):
        train = train_one_epoch(
            args, epoch, wrapped, train_loader, optimizer, scheduler, scaler
        )
        val = evaluate(args, model, val_loader)
        log(f"epoch {epoch}: train {format_metrics(train)}, val {format_metrics(val)}")
        if args.out_dir and is_main_process():
            checkpoint.save_epoch(args.out_dir, epoch, train, val, model.state_dict())
    return 0


def main():
    args = parse_args()
    args.device = setup(args)
    exit_code = run(args)
    # [03] a DDP object that outlives the group aborts one gloo run in ten at exit
    gc.collect()
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
