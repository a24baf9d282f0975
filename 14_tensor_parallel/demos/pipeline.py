"""Train the GPT of common/ as a pipeline: each process has some of its blocks.

torchrun --standalone --nproc-per-node=2 14_tensor_parallel/demos/pipeline.py
"""

import argparse
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining import ScheduleGPipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import launch
from common import text
from common.args import dtype
from common.args import fail
from common.args import positive_int
from common.args import writable_dir
from common.gpt import GPT
from common.gpt import decay_groups
from harness.counting import Kept
from harness.counting import size

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
DEPTH, MAX_NORM = 4, 1.0
TOLERANCE = 1e-10  # of float64, between the pipeline and one process


# ---- flags ---------------------------------------------------------------------------
class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, and ends the program with exit code 2."""

    def error(self, message):
        fail(message.removeprefix("argument "))


def parse_args(argv=None):
    """Parse the flags, and check those that can be wrong without the others."""
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b", help="the order of passes")
    add("--micro-batches", type=positive_int, default=4, help="parts of a batch")
    add("--batch-size", type=positive_int, default=24, help="sequences of a batch")
    add("--steps", type=positive_int, default=6, help="optimizer steps, in total")
    add("--dtype", type=dtype, default="float32", help="with float64, compare")
    add("--load", type=Path, help="resume from this checkpoint")
    add("--save", type=writable_dir, help="write a checkpoint here at the end")
    add("--mistake", choices=MISTAKES, help="make this mistake")
    return parser.parse_args(argv)


def check_flags(args, processes):
    """End the program if so many processes cannot train with these flags."""
    if processes < 2:
        fail("a pipeline needs 2 processes or more: use --nproc-per-node=2")
    if processes > DEPTH:
        fail(f"the model has {DEPTH} blocks, and each process needs one or more")
    if args.batch_size % args.micro_batches:
        fail(
            f"--batch-size {args.batch_size} must be divisible by --micro-batches"
            f" ({args.micro_batches})"
        )
    if args.schedule == "1f1b" and args.micro_batches < processes:
        fail(
            f"--micro-batches {args.micro_batches}: 1f1b needs as many as there are"
            f" processes ({processes}), or more"
        )
    if args.load and not (args.load / ".metadata").is_file():
        fail(f"--load {args.load}: there is no checkpoint, or it is incomplete")


# ---- processes -----------------------------------------------------------------------
def setup(args):
    """Check flags and launcher, join the process group, and return the device.

    With a GPU for each process of this machine they use NCCL, otherwise the CPU and
    gloo.
    """
    launch.check()
    launch.die_with_parent()
    check_flags(args, int(os.environ["WORLD_SIZE"]))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )
    return device


# ---- data, model and optimizer -------------------------------------------------------
def get_batch(args, windows, step, device):
    """Return the batch of a step, the same on every process: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    indices = torch.randint(len(windows), (args.batch_size,), generator=generator)
    return [tokens.to(device) for tokens in windows.__getitems__(indices)]


def make_model(args):
    """Return the whole model, with the same weights on every process."""
    torch.manual_seed(0)
    model = GPT(256, context_length=32, depth=DEPTH).to(args.dtype)
    if args.mistake == "tied":
        model.head.weight = model.tokens.weight
    return model


def make_optimizer(model):
    """Return an optimizer of a model, or of a part of one."""
    groups = decay_groups(model, weight_decay=0.1)
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


# ---- a part of the model -------------------------------------------------------------
class Part(nn.Module):
    """The blocks of one process; the first also embeds, the last also has the head.

    The input is int64 tokens [B, T] on the first process, and activations [B, T, width]
    on the others; the output is logits [B, T, 256] on the last, activations elsewhere.
    """

    def __init__(self, model, rank, ranks):
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        numbers = torch.arange(len(model.blocks)).tensor_split(ranks)[rank].tolist()
        # a ModuleList would begin at blocks.0 on every process
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in numbers})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if self.is_first:
            positions = torch.arange(x.size(1), device=x.device)
            x = self.tokens(x) + self.positions(positions)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def make_schedule(args, part, device):
    """Return the stage that runs a part, and the schedule that orders its passes."""
    # In your program, use PipelineStage here: this one also records its passes.
    stage = RecordedStage(part, dist.get_rank(), dist.get_world_size(), device)
    return stage, SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=loss_fn)


# ---- one step ------------------------------------------------------------------------
def loss_fn(outputs, targets):
    """Return the mean loss of a micro-batch, from logits [B, T, 256]."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def clip_gradients(part, max_norm):
    """Scale the gradients of all parts, so that their norm is at most `max_norm`."""
    norm = nn.utils.get_total_norm([weight.grad for weight in part.parameters()])
    square = norm.square()
    dist.all_reduce(square)  # otherwise each process scales by a factor of its own
    nn.utils.clip_grads_with_norm_(part.parameters(), max_norm, square.sqrt())


def run_passes(part, schedule, inputs, targets):
    """Go forward and backward; return the losses of the micro-batches, on the last."""
    losses = []
    # return_outputs: otherwise the logits of all micro-batches stay in memory
    if part.is_first:
        schedule.step(inputs, return_outputs=False)
    elif part.is_last:
        schedule.step(target=targets, losses=losses, return_outputs=False)
    else:
        schedule.step()
    return losses


def train_step(part, schedule, optimizer, inputs, targets):
    """Take an optimizer step; return the loss on the last process, None elsewhere."""
    optimizer.zero_grad()
    losses = run_passes(part, schedule, inputs, targets)
    clip_gradients(part, MAX_NORM)
    optimizer.step()
    return torch.stack(losses).mean().item() if part.is_last else None


# ---- evaluation ----------------------------------------------------------------------
@torch.no_grad()
def evaluate(part, stage, schedule, inputs, targets):
    """Return the loss of a batch; every process has to call this, and gets it."""
    losses = []
    part.eval()
    if part.is_first:
        schedule.eval(inputs)
    elif part.is_last:
        schedule.eval(target=targets, losses=losses)
    else:
        schedule.eval()
    part.train()
    stage.clear_runtime_states()  # otherwise the logits stay until the next step
    loss = torch.stack(losses).mean() if part.is_last else inputs.new_zeros(())
    loss = loss.to(next(part.parameters()))
    dist.broadcast(loss, src=dist.get_world_size() - 1)
    return loss.item()


# ---- checkpoints ---------------------------------------------------------------------
# One entry for each weight's state: otherwise the processes' lists of parameter groups
# have the same name, and one of them overwrites the others.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder, part, optimizer, step):
    """Write a checkpoint, to which every process adds its part."""
    weights, state = get_state_dict(part, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder)


def load(folder, part, optimizer):
    """Read this process's part of a checkpoint, and return the number of its step."""
    weights, state = get_state_dict(part, optimizer, options=FLAT)
    whole = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(whole, checkpoint_id=folder)
    set_state_dict(
        part,
        optimizer,
        model_state_dict=whole["model"],
        optim_state_dict=whole["optimizer"],
        options=FLAT,
    )
    return whole["step"]


# ---- mistakes ------------------------------------------------------------------------
def clip_own_gradients(part, max_norm):
    nn.utils.clip_grad_norm_(part.parameters(), max_norm)


def divided_loss(outputs, targets, right=loss_fn):
    return right(outputs, targets) / 4


def run_in_two_steps(part, schedule, inputs, targets, right=run_passes):
    halves = zip(inputs.chunk(2), targets.chunk(2), strict=True)
    return [loss for half in halves for loss in right(part, schedule, *half)]


def get_own_batch(args, windows, step, device, right=get_batch):
    return right(args, windows, step + 1000 * dist.get_rank(), device)


# What stands in the place of a function above. "tied" is in make_model.
MISTAKES = {
    "own-norm": {"clip_gradients": clip_own_gradients},
    "divided-loss": {"loss_fn": divided_loss},
    "two-steps": {"run_passes": run_in_two_steps},
    "own-samples": {"get_batch": get_own_batch},
    "lists": {"FLAT": StateDictOptions()},  # shows in a step after --save and --load
    "tied": {},
}


# ---- what a process does, and the proof ----------------------------------------------
class RecordedStage(PipelineStage):
    """A stage that records its passes, and what they keep.

    passes: their names, in order; F2 is the forward pass of micro-batch 2
    kept: bytes that the last forward pass has kept for the backward pass, of tensors
        that are not weights; what the loss function keeps is not counted
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.passes, self.kept = [], 0

    def forward_one_chunk(self, number, *args, **kwargs):
        self.passes.append(f"F{number}")
        with Kept() as kept:
            output = super().forward_one_chunk(number, *args, **kwargs)
        self.kept = size(kept.activations(self.submod))
        return output

    def backward_one_chunk(self, number, *args, **kwargs):
        super().backward_one_chunk(number, *args, **kwargs)
        if self.has_backward:
            self.passes.append(f"B{number}")


def most_in_flight(passes):
    """Return how many micro-batches are forward, but not yet backward, at the most."""
    in_flight = [0]
    for each in passes:
        in_flight.append(in_flight[-1] + (1 if each.startswith("F") else -1))
    return max(in_flight)


def train_alone(args, windows, device):
    """Train the whole model in this process; return it, and the loss of each step."""
    model = make_model(args).to(device)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(args.steps):
        inputs, targets = get_batch(args, windows, step, device)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def compare_with_one_process(args, part, losses, val_loss, device):
    """Train alone, too; return the largest differences of weights and of losses.

    losses: {step: loss} on the last process, and empty on the others.
    """
    train_windows, val_windows = text.load(None, context_length=32)
    model, expected = train_alone(args, train_windows, device)
    inputs, targets = get_batch(args, val_windows, 0, device)
    with torch.no_grad():
        of_losses = [abs(val_loss - loss_fn(model(inputs), targets).item())]
    of_losses += [abs(losses[step] - expected[step]) for step in losses]
    weights = model.state_dict()
    pairs = [(weight, weights[name]) for name, weight in part.state_dict().items()]
    of_weights = [(one - other).abs().max().item() for one, other in pairs]
    found = [max(of_weights), max(of_losses)]
    found = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


# ---- the run -------------------------------------------------------------------------
def run(args, device):
    """Train, and print what happened; return the exit code."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train_windows, val_windows = text.load(None, context_length=32)
    model = make_model(args)
    total = sum(weight.nbytes for weight in model.parameters())
    part = Part(model, rank, ranks).to(device)
    del model  # and with it the blocks of the other processes
    optimizer = make_optimizer(part)
    losses = {}
    with mock.patch.dict(globals(), MISTAKES.get(args.mistake, {})):
        stage, schedule = make_schedule(args, part, device)
        first_step = load(args.load, part, optimizer) if args.load else 0
        if first_step >= args.steps:
            fail(f"--steps {args.steps}: the checkpoint is of step {first_step}")
        for step in range(first_step, args.steps):
            stage.passes.clear()
            inputs, targets = get_batch(args, train_windows, step, device)
            loss = train_step(part, schedule, optimizer, inputs, targets)
            if part.is_last:
                losses[step] = loss
                print(f"step {step + 1}: loss {loss:.4f}", flush=True)
        if args.save:
            save(args.save, part, optimizer, args.steps)
    held = sum(weight.nbytes for weight in part.parameters()) / total
    line = f"{held:.1%} of the weights; {' '.join(stage.passes)};"
    most = most_in_flight(stage.passes)
    line += f" at most {most} in flight, {most * stage.kept / 1e6:.1f} MB"
    lines = [None] * ranks
    dist.all_gather_object(lines, line)
    val_loss = evaluate(part, stage, schedule, *get_batch(args, val_windows, 0, device))
    if rank == 0:
        for number, each in enumerate(lines):
            print(f"rank {number}: {each}", flush=True)
        print(f"validation loss {val_loss:.4f}", flush=True)
    if args.dtype != torch.float64:
        return 0
    found = compare_with_one_process(args, part, losses, val_loss, device)
    if rank == 0:
        of_weights, of_losses = found
        print("largest difference from one process:", end=" ")
        print(f"weights {of_weights:.1e}, losses {of_losses:.1e}", flush=True)
    return 0 if max(found) <= TOLERANCE else 1


def main():
    args = parse_args()
    exit_code = run(args, setup(args))
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
