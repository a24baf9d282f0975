"""[11] Train a language model: a small GPT, on the bytes of a text, with AdamW.

torchrun --standalone --nproc-per-node=2 11_gpt/train.py
"""

import contextlib
import gc
import math
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import checkpoint
from common import launch
from common import meters
from common import text
from common import weights
from common.args import TextArgumentParser
from common.args import check_batch_size
from common.args import fail
from common.args import number
from common.args import one_line_errors
from common.args import positive_int
from common.gpt import GPT
from common.gpt import decay_groups
from common.gpt import describe_speed
from common.loader import derive_seed
from common.loader import ignore_launcher_sigterm
from common.loader import loader_options
from common.loader import skip_first_batches
from common.lr_schedule import warmup_cosine
from common.meters import format_metrics

# [05] bf16 where the hardware has it, fp16 on older GPUs
AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- 1. flags ------------------------------------------------------------------------
def parse_args():
    """Parse and check the flags: those of common/args.py, and this stage's own."""
    parser = TextArgumentParser(__doc__)  # [11] with flags of a text, and of a GPT
    parser.add_argument(
        "--amp", choices=AMP_DTYPES, default="off", help="mixed precision"
    )
    parser.add_argument(
        "--clip-grad",
        type=number(float, ge=0),
        help="clip the gradients to this norm; 0: do not clip",
    )
    # [08] for a batch that does not fit into the memory of the devices
    parser.add_argument(
        "--grad-accum-steps",
        may_differ=True,  # [09] a resumed run can have another number of them
        type=positive_int,
        default=1,
        help="micro-batches that each process splits its local batch into",
    )
    # [09] --checkpoint-dir, on a disk that every node sees and that outlives the job
    parser.add_checkpoint_arguments()
    # [11] with AdamW a step is at most about the learning rate, whatever the gradient
    parser.set_defaults(lr=3e-3, weight_decay=0.1, clip_grad=1.0)
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


def gather(value):
    """Return the values of all ranks, rank 0's first."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # [09] otherwise each decides by its own
    return values


# ---- 3. data -------------------------------------------------------------------------
def make_loaders(args):
    """Return the loaders of this process's training and validation batches."""
    # [11] windows of one long text
    with main_process_first(), one_line_errors("--text-file:"):
        train_set, val_set = text.load(args.text_file, args.context_length, args.seed)
    check_batch_size(args.batch_size, dist.get_world_size(), samples=len(train_set))
    # [03] otherwise the global batch grows with the number of processes
    local_batch_size = args.batch_size // dist.get_world_size()
    # [08] otherwise a sample of a smaller micro-batch weighs more
    if local_batch_size % args.grad_accum_steps:
        fail(f"--grad-accum-steps must divide the local batch ({local_batch_size})")
    options = loader_options(args.device, args.workers)
    # [10] otherwise a SIGTERM to the whole job kills the workers before the last step
    options["worker_init_fn"] = ignore_launcher_sigterm
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
    micro_batch_size = local_batch_size // args.grad_accum_steps
    val_loader = DataLoader(val_set, batch_size=micro_batch_size, **options)
    return train_loader, val_loader


# ---- 4. one training epoch -----------------------------------------------------------
def forward(args, model, batch, meter):
    """Return a batch's mean loss, and add it to the meter."""
    inputs, targets = (each.to(args.device, non_blocking=True) for each in batch)
    # [05] matrix products in low precision, losses in float32
    dtype = AMP_DTYPES[args.amp]
    with torch.autocast(args.device.type, dtype, enabled=dtype is not None):
        outputs = model(inputs)  # [11] token numbers, which an embedding takes
        # [11] one prediction per token: [B, T, 256] as [B * T, 256]
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    meter.update(loss, outputs, targets)
    return loss


def accumulate_gradients(args, model, batch, scaler, meter):
    """Run forward and backward on one micro-batch after the other."""
    # [08] one micro-batch at a time is on the device
    parts = zip(*(each.chunk(args.grad_accum_steps) for each in batch), strict=True)
    for micro_step, part in enumerate(parts, start=1):
        last = micro_step == args.grad_accum_steps
        # [08] otherwise DDP averages the gradients after every micro-batch; the forward
        # pass is what has to be in this context
        with contextlib.nullcontext() if last else model.no_sync():
            loss = forward(args, model, part, meter)
        # [08] otherwise the gradients are a sum over micro-batches, not their mean
        loss = loss / args.grad_accum_steps
        scaler.scale(loss).backward()  # [05] otherwise small gradients are 0 in fp16


def should_stop(received_signals, group):
    """Return whether any rank has received a signal: the same on every rank."""
    count = torch.tensor(len(received_signals))
    dist.all_reduce(count, group=group)  # [10] otherwise ranks stop at different steps
    return count.tolist() > 0


def train_one_epoch(args, epoch, model, loader, state, stop):
    """Take one optimizer step per global batch, until `stop()` is true after one.

    Return the epoch's metrics, and whether it was stopped.
    """
    model.train()
    meter = meters.Meter(args.device)
    optimizer, scheduler, scaler = state.optimizer, state.scheduler, state.scaler
    steps_done = state.step - (epoch - 1) * len(loader)
    if steps_done:
        # [09] what was counted in them is lost
        log(f"train metrics of epoch {epoch} leave out its first {steps_done} steps")
    loader.sampler.set_epoch(epoch)  # [03] otherwise every epoch has the same order
    batches = skip_first_batches(loader, steps_done)  # [09] without reading the samples
    # [11] tokens per second, because a batch can have any number of tokens
    batches = meters.progress(
        batches,
        f"epoch {epoch}",
        meter,
        show=is_main_process(),
        speed=partial(describe_speed, args),
    )
    stopping = False  # [10] also if all steps of the epoch were taken before
    for batch in batches:
        state.step += 1
        # [09] otherwise a resumed run draws other numbers, for dropout for instance
        torch.manual_seed(derive_seed(args.seed, state.step, dist.get_rank()))
        # before the forward pass, which then has the memory of the old gradients
        optimizer.zero_grad()
        # [08] otherwise the activations of the whole local batch have to fit
        accumulate_gradients(args, model, batch, scaler, meter)
        if args.clip_grad:
            scaler.unscale_(optimizer)  # [05] otherwise clipping sees scaled gradients
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scale = scaler.get_scale()
        scaler.step(optimizer)  # [05] skips the step if a gradient is inf or nan
        scaler.update()
        if scaler.get_scale() >= scale:  # [05] a skipped step lowers the scale
            scheduler.step()
        stopping = stop()
        # [09] otherwise a crash loses every step so far
        due = state.step % args.checkpoint_every == 0 or state.step % len(loader) == 0
        if due or stopping:
            save_checkpoint(args, state)
        if stopping:
            break  # [10] to the all-reduce, in which all wait for rank 0
    # [03] otherwise the metrics are those of rank 0's samples alone
    dist.all_reduce(meter.sums)
    return meter.compute(), stopping


# ---- 5. evaluation -------------------------------------------------------------------
@torch.no_grad()
def evaluate(args, model, loader):
    """Return the metrics over the whole validation set."""
    # [11] no buffers to broadcast: this model has none
    model.eval()
    meter = meters.Meter(args.device)
    batches = meters.progress(loader, "evaluation", meter, show=is_main_process())
    for batch in batches:
        forward(args, model, batch, meter)
    # [07] sums and counts add up; averages of shards of different sizes do not
    dist.all_reduce(meter.sums)
    return meter.compute()


# ---- 6. the run ----------------------------------------------------------------------
def has_diverged(model, scaler):
    """Return whether training has diverged, so that the weights are useless."""
    norm = nn.utils.get_total_norm(model.parameters())
    # [05] in fp16, if every step overflows, none is taken and the scale keeps falling
    return not norm.isfinite().item() or scaler.get_scale() < 0.01


class AppState:
    """Everything that a resumed run needs; `step` counts the global batches so far."""

    def __init__(self, model, optimizer, scheduler, scaler, identity):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.identity = identity
        self.step = 0

    def state_dict(self):
        # [09] without one of them, the momentum say, the next step differs
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "identity": self.identity,
            "step": self.step,
        }

    def load_state_dict(self, state_dict):
        # [09] otherwise a run resumes from one with another seed, or on other data
        checkpoint.check(state_dict["identity"], self.identity)
        self.model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.scaler.load_state_dict(state_dict["scaler"])
        self.step = state_dict["step"]


def save_checkpoint(args, state):
    """Write a checkpoint: rank 0 does, since all have the same state."""
    if args.checkpoint_dir is None:
        return
    # [09] otherwise a run that diverged resumes from useless weights, again and again
    if has_diverged(state.model, state.scaler):
        log(f"step {state.step}: not saved, since training has diverged")
        return
    if is_main_process():
        folder, keep = args.checkpoint_dir, args.keep_checkpoints
        checkpoint.save(folder, state.step, state.state_dict(), keep)


def load_latest(args, state):
    """Load the latest checkpoint that can be read, if there is one."""
    if args.checkpoint_dir is None:
        return
    # [09] otherwise two runs in one directory replace each other's checkpoints
    problem = checkpoint.lock(args.checkpoint_dir) if is_main_process() else None
    if problem := gather(problem)[0]:
        fail(f"--checkpoint-dir: {problem}")
    with one_line_errors("--checkpoint-dir:"):
        found = checkpoint.find(args.checkpoint_dir)
    # [09] what any rank sees, so that all try the same ones
    found = sorted(set().union(*gather(found)), reverse=True)
    for path in found:
        loaded, *answer = checkpoint.load(path)
        # [09] otherwise a rank that cannot read it, or reads another, trains apart
        problem = checkpoint.first_problem(gather(answer))
        if problem is None:
            # [09] a script with another model raises one of these two
            with one_line_errors(f"--checkpoint-dir: {path}:", KeyError, RuntimeError):
                state.load_state_dict(loaded)
            log(f"resumed from step {state.step}")
            return
        log(f"skipping checkpoint {path} ({problem})")
    if found:
        # [09] otherwise the run starts over, and removes them
        fail(f"--checkpoint-dir: no checkpoint in {args.checkpoint_dir} can be read")


def run(args):
    """Train and evaluate for --epochs, or only evaluate; return the exit code."""
    train_loader, val_loader = make_loaders(args)
    identity = checkpoint.identity(args.fixed(), train_loader.dataset)
    # [09] otherwise ranks with other flags or other data drift apart, or hang
    checkpoint.check_ranks(gather((vars(args), identity)))
    torch.manual_seed(args.seed)
    # [11] the tokens are bytes, so there are 256
    model = GPT(256, args.context_length, args.width, args.depth, args.heads)
    model.to(args.device, args.dtype)
    if args.evaluate:
        with one_line_errors("--evaluate:"):
            weights.load_weights(model, args.evaluate)
        log(f"val {format_metrics(evaluate(args, model, val_loader))}")
        return 0
    # [11] each weight has a step size of its own; SGD gets less far in as many steps
    optimizer = torch.optim.AdamW(
        decay_groups(model, args.weight_decay),
        args.lr,
        betas=(0.9, 0.95),  # [11] the usual ones for language models
    )
    scheduler = warmup_cosine(optimizer, total_steps=args.epochs * len(train_loader))
    # [03] averages the gradients during backward; `model` is what is saved
    wrapped = nn.parallel.DistributedDataParallel(model)
    log(f"{dist.get_world_size()} processes on {dist.get_backend()}")
    # [05] only fp16 needs it: the other formats have the range of float32
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
    state = AppState(model, optimizer, scheduler, scaler, identity)
    load_latest(args, state)
    # [09] an epoch whose steps are all done may still have to be evaluated
    first_epoch = max(state.step - 1, 0) // len(train_loader) + 1
    saved = True
    received_signals = launch.catch_signals()
    # [10] a group on the CPU: otherwise the answer waits for the GPU
    group = dist.new_group(backend="gloo", timeout=args.timeout)
    stop = partial(should_stop, received_signals, group)
    for epoch in range(first_epoch, args.epochs + 1):
        # [11] otherwise every epoch cuts the text at the same places
        train_loader.dataset.epoch.fill_(epoch)
        train, stopped = train_one_epoch(
            args, epoch, wrapped, train_loader, state, stop
        )
        if stopped:
            # [10] not 0: otherwise nobody starts the run again
            return 128 + signal.SIGTERM
        if has_diverged(model, scaler):
            # otherwise useless weights overwrite the last good ones
            log(f"stopped in epoch {epoch}: training has diverged; try a lower --lr")
            return 1
        val = evaluate(args, model, val_loader)
        log(f"epoch {epoch}: train {format_metrics(train)}, val {format_metrics(val)}")
        # [11] the loss in nats, as the bits per byte of a compressor with this model
        bits = val["loss"] / math.log(2)
        # [11] not math.exp, which raises where this is inf
        perplexity = torch.tensor(val["loss"]).exp()
        log(f"val {bits:.3f} bits per byte, perplexity {perplexity:.2f}")
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
