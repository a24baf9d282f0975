"""[09] Survive being killed: go on from the last checkpoint, to the same weights bit for bit.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
10_preemption/train.py --checkpoint-dir checkpoints  # without the variable half of the restarts fail
torchrun --standalone --nproc-per-node=2 10_preemption/train.py
"""

import contextlib
import gc
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import attached
from common import checkpoint
from common import data
from common import flags
from common import meters
from common import lr_schedule
from common import checkpointer
from common.model import make_model

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset


# ---- 1. flags ----------------------------------------------------------------------------------
def parse_args():
    """Return the flags, checked: those of common/flags.py and the stage's own."""
    parser = flags.Flags(__doc__)
    parser.add_argument("--sync-bn", action="store_true", help="SyncBatchNorm (GPUs)")  # [03]
    amp = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    parser.add_argument("--amp", choices=amp, default="off", help="mixed precision")  # [05]
    parser.add_argument("--clip-grad", type=flags.number(float, above=0), help="max norm")  # [05]
    parser.add_argument("--grad-accum-steps", type=flags.number(int, 1), default=1, help="parts")  # [08]
    parser.add_argument("--checkpoint-dir", type=flags.new_folder, help="write, and go on here")  # [09]
    parser.add_argument("--checkpoint-every", type=flags.number(int, 1), default=100, help="steps")
    parser.add_argument("--save-logits", type=flags.new_file, help="write the logits here")  # [07]
    args = parser.parse_args()
    args.amp = amp[args.amp]
    if args.save_logits and args.save_logits == args.evaluate:
        parser.error("--save-logits: this is the file of --evaluate; name another")  # [07]
    if args.amp and args.dtype != torch.float32:
        parser.error("--amp: autocast leaves --dtype float64 as it is; give one of the two")
    if args.sync_bn and args.device.type == "cpu":
        parser.error("--sync-bn: torch has SyncBatchNorm for GPUs only")
    return args


# ---- 2. processes ------------------------------------------------------------------------------
@flags.explain("MASTER_ADDR, MASTER_PORT", ValueError, dist.DistNetworkError)  # [06] port in use
def setup(args):
    """Prepare this process and return its device."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]  # set by torchrun, also where Slurm started it
    if "RANK" not in os.environ and "SLURM_JOB_ID" in os.environ:
        names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]  # [06] set by srun
    rank, world_size, local_rank = flags.place(args, *names)
    if args.grad_accum_steps * world_size > args.batch_size:  # [08] a part needs an image at least
        flags.stop(f"--grad-accum-steps {args.grad_accum_steps}: a process has fewer images of a batch")
    args.signals = checkpointer.watch(args, "SIGTERM", "SIGUSR1")  # [09] heeded between two steps
    attached.die_with_parent()  # [03] otherwise a killed launcher leaves its processes training
    device = flags.nth_device(args, local_rank)  # [06] not the rank, which counts all nodes
    if device.type == "cuda":
        torch.cuda.set_device(device)  # [03] otherwise every process also takes memory of GPU 0
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
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
    part = range(len(val_set))[dist.get_rank() :: dist.get_world_size()]
    val_set = Subset(val_set, part)  # [07] every image once: DistributedSampler repeats some
    batch_size //= args.grad_accum_steps  # [08] evaluation takes no more memory than training
    val_loader = DataLoader(val_set, batch_size=batch_size, **data.loader_options(args))
    return train_loader, val_loader


# ---- 4. one training epoch ---------------------------------------------------------------------
def accumulate(args, step, model, batch, scaler):
    """Add up the gradient of a process's batch; return each part's loss, output and target."""
    outputs = []
    parts = zip(*(tensor.tensor_split(args.grad_accum_steps) for tensor in batch), strict=True)
    for number, (images, target) in enumerate(parts, 1):  # [08] one at a time is on the device
        images = images.to(args.device, args.dtype, non_blocking=True)
        target = target.to(args.device, non_blocking=True)
        last = number == args.grad_accum_steps
        with contextlib.nullcontext() if last else model.no_sync():  # [08] one average, not N
            with torch.autocast(args.device.type, args.amp, enabled=args.amp is not None):  # [05]
                output = model(images)
                loss = nn.functional.cross_entropy(output, target)
            share = len(target) / len(batch[1])  # [08] not 1 / N: parts differ in size
            scaler.scale(loss * share).backward()  # [05] otherwise small gradients are 0 in fp16
        outputs.append((loss.detach(), output.detach(), target))
    return outputs


def train_one_epoch(args, epoch, model, loader, optimizer, scheduler, scaler):
    """Take one optimizer step per global batch; return the epoch's averages, or None if stopped."""
    model.train()
    meter = meters.Meter(args.device)
    part = slice(dist.get_rank(), None, dist.get_world_size())  # [09] of the processes of that time
    done = args.checkpoints.take_up(epoch, len(loader), meter, part)
    loader.dataset.epoch = epoch  # other crops and flips in every epoch
    loader.sampler.set_epoch(epoch)  # [03] otherwise every epoch has the same order
    batches = meters.progress(data.skip_first_batches(loader, done), f"epoch {epoch}", meter, show=is_main_process())
    for step, batch in enumerate(batches, (epoch - 1) * len(loader) + done + 1):
        torch.manual_seed(data.derive_seed(args.seed, step, dist.get_rank()))  # [09] nothing to store
        optimizer.zero_grad()
        outputs = accumulate(args, step, model, batch, scaler)  # [08] part by part
        scaler.unscale_(optimizer)  # [05] otherwise the clipping sees the scaled gradient
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
        args.checkpoints.judge(step, norm, scaler.get_scale(), model)  # [09] ends the run after five
        if norm.isfinite():  # [05] otherwise fp16 has overflowed: no step, and a smaller scale
            scaler.step(optimizer)
            scheduler.step()
        else:
            log(f"step {step}: skipped, gradient not finite, loss scale {scaler.get_scale():g}")
        scaler.update()
        for loss, output, target in outputs if norm.isfinite() else ():  # [09] or it is all nan
            meter.update(loss, output, target)
        told = torch.tensor(max(args.signals, default=0), device=args.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)  # [09] otherwise they stop at different steps
        if told or step % args.checkpoint_every == 0 or step % len(loader) == 0:
            sums = meter.sums.new_empty(dist.get_world_size(), 4)
            dist.all_gather(list(sums), meter.sums)  # [09] into the rows
            args.checkpoints.save(step, sums, is_main_process())
        if told:
            args.signals.append(int(told))
            dist.barrier()  # [09] otherwise the launcher kills who still writes
            return None
    dist.all_reduce(meter.sums)  # [03] otherwise the figures are those of rank 0's share
    return meter.compute()


# ---- 5. evaluation -----------------------------------------------------------------------------
def gather_logits(args, part, outputs):
    """Return on rank 0 the logits of the whole set, in its order; `outputs` are those of `part`."""
    whole = part.dataset
    logits = torch.zeros(len(whole), whole.classes, dtype=args.dtype, device=args.device)
    logits[list(part.indices)] = torch.cat([logits[:0], *outputs])  # a part may be empty
    dist.reduce(logits, dst=0)  # [07] a row is zero on all processes but the one that has the image
    return logits


@torch.no_grad()
def evaluate(args, model, loader):
    """Return the averages over the whole validation set."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # [07] otherwise each judges its own running averages
    model.eval()
    meter = meters.Meter(args.device)
    outputs = []
    for images, target in meters.progress(loader, "evaluation", meter, show=is_main_process()):
        images = images.to(args.device, args.dtype, non_blocking=True)
        target = target.to(args.device, non_blocking=True)
        with torch.autocast(args.device.type, args.amp, enabled=args.amp is not None):  # [05]
            output = model(images)
            meter.update(nn.functional.cross_entropy(output, target), output, target)
        if args.save_logits:
            outputs.append(output)
    dist.all_reduce(meter.sums)  # [07] sums and counts, once: averages do not add up
    if args.save_logits:
        logits = gather_logits(args, loader.dataset, outputs)
        if is_main_process():
            checkpoint.save(logits.cpu(), args.save_logits)
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
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp is torch.float16)  # [05]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn else model  # [03]
    wrapped = nn.parallel.DistributedDataParallel(model)  # [03] `model` stays what is saved
    log(f"{dist.get_world_size()} processes on {dist.get_backend()}")  # [03] did all join?
    checkpointer.rehearse(args, wrapped, train_loader)  # [09] DDP's buckets depend on the first step
    found = [checkpointer.newest(args) if is_main_process() else None]
    dist.broadcast_object_list(found)  # [09] rank 0 decides, so that all go on from the same step
    args.checkpoints = checkpointer.Checkpointer(args, *found, model, optimizer, scheduler, scaler)
    for epoch in range(args.checkpoints.epoch(len(train_loader)), args.epochs + 1):
        train = train_one_epoch(args, epoch, wrapped, train_loader, optimizer, scheduler, scaler)
        if train is None:  # [09]
            return
        val = evaluate(args, model, val_loader)
        log(f"epoch {epoch}: train {meters.format_metrics(train)}, val {meters.format_metrics(val)}")
        if args.out_dir and is_main_process():
            checkpoint.save_epoch(args.out_dir, epoch, train, val, model.state_dict())


def main():
    args = parse_args()
    args.device = setup(args)  # [06] the cluster has started all the processes
    run(args)
    gc.collect()  # [03] a DDP object that outlives the group aborts one run in ten at exit
    dist.destroy_process_group()
    sys.exit(128 + args.signals[0] if args.signals else 0)  # [09] not 0: start it again


if __name__ == "__main__":
    main()
