"""Mistakes with a pipeline that raise no error, or blame the wrong thing.

torchrun --standalone --nproc-per-node=2 \
    14_tensor_parallel/demos/pipeline_mistakes.py norm twice

All of them run on two processes, on the CPU, in float64. Each asserts what it shows.
"""

import gc
import sys
import tempfile
import weakref

import pipeline
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

from common import launch
from common import text
from common.loader import collate

CPU = torch.device("cpu")
STEPS = 6


# ---- what the mistakes share ---------------------------------------------------------
def make_model(tied=False):
    """Return the whole model; tied: the head uses the embedding's weight."""
    model = pipeline.make_model(pipeline.parse_args(["--dtype", "float64"]))
    if tied:
        model.head.weight = model.tokens.weight
    return model


def make(micro_batches=4, loss_fn=pipeline.loss_fn, tied=False, scale_grads=True):
    """Return this process's part, its stage and its schedule."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = pipeline.Part(make_model(tied), rank, ranks)
    stage = PipelineStage(part, rank, ranks, CPU)
    options = {"loss_fn": loss_fn, "scale_grads": scale_grads}
    return part, stage, Schedule1F1B(stage, micro_batches, **options)


def get_batch(step=0, batch_size=24):
    """Return inputs and targets, the same on every process."""
    args = pipeline.parse_args(["--batch-size", str(batch_size)])
    windows, _ = text.load(None, context_length=32)
    return pipeline.get_batch(args, windows, step, CPU)


def go(part, schedule, batch, **options):
    """Run forward and backward on a batch."""
    inputs, targets = batch
    if part.is_first:
        schedule.step(inputs, **options)
    else:
        schedule.step(target=targets, **options)


def total_norm(gradients):
    """Return the norm of the gradients of all processes."""
    square = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    return square.sqrt()


def clip(part):
    pipeline.clip_gradients(part, max_norm=1.0)


def on_all(part, losses):
    """Return the mean of the last process's losses, on every process."""
    mean = torch.zeros((), dtype=torch.float64)
    if part.is_last:
        mean = torch.stack(losses).mean()
    dist.broadcast(mean, src=dist.get_world_size() - 1)
    return mean.item()


def train(part, schedule, optimizer, batches, clip=clip):
    """Take a step for each batch; return the first loss and the last one."""
    means = []
    for batch in batches:
        optimizer.zero_grad()
        losses = []
        go(part, schedule, batch, losses=losses)
        clip(part)
        optimizer.step()
        means.append(on_all(part, losses))
    return means[0], means[-1]


def get_batches(first=0):
    """Return the batches of the steps from this one on."""
    return [get_batch(step) for step in range(first, STEPS)]


def gradient(model, part=None):
    """Return a copy of a model's gradients as one vector; part: only of its weights."""
    weights = dict(model.named_parameters())
    names = dict((part or model).named_parameters())
    return torch.cat([weights[name].grad.flatten() for name in names])


def difference(part, tied=False):
    """Return how far the weights of a part are from those trained in one process."""
    model = make_model(tied)
    optimizer = pipeline.make_optimizer(model)
    for inputs, targets in get_batches():
        optimizer.zero_grad()
        pipeline.loss_fn(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected = model.state_dict()
    found = part.state_dict().items()
    return max((weight - expected[name]).abs().max().item() for name, weight in found)


def tell(line):
    """Print a line, once for the whole run."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def tell_now(error):
    """Print an error of this process alone."""
    text = f"{type(error).__name__}: {error}"
    print(f"process {dist.get_rank()}: {text}", flush=True)


def tell_each(line):
    """Print the lines of all processes, in order, and return them."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    for rank, each in enumerate(lines):
        tell(f"  process {rank}: {each}")
    return lines


def tell_most(name, number):
    """Print the largest of all processes' numbers, and return it."""
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    most = max(numbers)
    tell(f"{name} {most:.4f}" if most > 1e-10 else f"{name} less than 1e-10")
    return most


def tell_largest(name, difference):
    """Print the largest absolute value in all processes' tensors, and return it."""
    return tell_most(f"{name}: largest difference", difference.abs().max().item())


def follow_outputs(part):
    """Return a list that gets a weak reference to each output of a part."""
    outputs = []
    part.register_forward_hook(lambda *call: outputs.append(weakref.ref(call[-1])))
    return outputs


def tell_kept(call, outputs):
    """Print how many bytes of outputs the last process keeps, and return it."""
    gc.collect()
    alive = [output() for output in outputs if output() is not None]
    kept = [None] * dist.get_world_size()
    dist.all_gather_object(kept, sum(output.nbytes for output in alive))
    tell(f"{call}: the last process keeps {kept[-1]:,} bytes of outputs")
    return kept[-1]


def get_padded():
    """Return a batch in which sequence n ends with n targets that do not count."""
    inputs, targets = get_batch()
    for number, row in enumerate(targets):
        row[len(row) - number :] = -100  # what cross_entropy ignores
    return inputs, targets


def shared_weight(part):
    """Return the weight that the embedding and the head would share."""
    return part.tokens.weight if part.is_first else part.head.weight


# ---- norm ----------------------------------------------------------------------------
def clip_own(part):
    nn.utils.clip_grad_norm_(part.parameters(), max_norm=1.0)  # the mistake


def norm():
    for clipping in (clip_own, clip):
        part, _, schedule = make()
        optimizer = pipeline.make_optimizer(part)
        first, last = train(part, schedule, optimizer, get_batches(), clipping)
        tell(f"{clipping.__name__}: the loss falls from {first:.4f} to {last:.4f}")
        off = tell_most("    from one process, the weights differ by", difference(part))
        assert off > 1e-3 if clipping is clip_own else off <= 1e-10


# ---- divided -------------------------------------------------------------------------
def divided_loss(outputs, targets):
    return pipeline.loss_fn(outputs, targets) / 4  # the mistake


def divided():
    norms = []
    for loss_fn in (divided_loss, pipeline.loss_fn):
        part, _, schedule = make(loss_fn=loss_fn)
        go(part, schedule, get_batch())
        norms.append(total_norm([weight.grad for weight in part.parameters()]).item())
        tell(f"{loss_fn.__name__}: norm of the gradient {norms[-1]:.4f}")
    assert abs(4 * norms[0] / norms[1] - 1) < 1e-10


# ---- twice ---------------------------------------------------------------------------
def twice():
    part, stage, schedule = make()

    def run(*steps):
        part.zero_grad()
        for step in steps:
            go(part, schedule, get_batch(step))
        return gradient(part)

    first, second = run(0), run(1)
    both = run(0, 1)  # the mistake
    assert tell_largest("from first + second", both - (first + second)) > 1e-2
    assert tell_largest("from first / 4 + second", both - (first / 4 + second)) < 1e-10
    run(0)
    pipeline.evaluate(part, stage, schedule, *get_batch(1))  # the mistake
    off = gradient(part) - first / 4
    assert tell_largest("after an evaluation, from first / 4", off) < 1e-10


# ---- padded --------------------------------------------------------------------------
def share_of_loss(outputs, targets, tokens):
    """Return the sum over a micro-batch, divided by the tokens of the whole batch."""
    outputs, targets = outputs.flatten(0, 1), targets.flatten()
    return nn.functional.cross_entropy(outputs, targets, reduction="sum") / tokens


def padded():
    inputs, targets = get_padded()  # sequence n ends with n targets of -100
    model = make_model()
    loss = pipeline.loss_fn(model(inputs), targets)
    loss.backward()
    tell(f"one process: loss {loss:.4f}")

    part, _, schedule = make()  # the mistake
    losses = []
    go(part, schedule, (inputs, targets), losses=losses)
    tell(f"loss_fn: loss {on_all(part, losses):.4f}")
    off = gradient(part) - gradient(model, part)
    assert tell_largest("    its gradient, from that of one process", off) > 1e-3

    part, _, schedule = make(loss_fn=share_of_loss, scale_grads=False)
    losses, tokens = [], (targets != -100).sum()
    go(part, schedule, (inputs, targets), losses=losses, loss_kwargs={"tokens": tokens})
    tell(f"share_of_loss: loss {4 * on_all(part, losses):.4f}")  # the sum of the shares
    off = gradient(part) - gradient(model, part)
    assert tell_largest("    its gradient, from that of one process", off) < 1e-10


# ---- sampler -------------------------------------------------------------------------
def sampler():
    windows, _ = text.load(None, context_length=32)
    by_rank = DistributedSampler(windows)  # the mistake
    the_same = DistributedSampler(windows, num_replicas=1, rank=0)
    lasts = []
    for name, sampler in {"by rank": by_rank, "the same": the_same}.items():
        loader = DataLoader(windows, 24, sampler=sampler, collate_fn=collate)
        batches = [batch for _, batch in zip(range(40), loader, strict=False)]
        part, _, schedule = make()
        optimizer = pipeline.make_optimizer(part)
        first, last = train(part, schedule, optimizer, batches)
        tell(f"{name}: in 40 steps, the loss falls from {first:.4f} to {last:.4f}")
        tell_each(f"sequences {', '.join(map(str, list(sampler)[:4]))}, ...")
        lasts.append(last)
    assert lasts[0] > lasts[1] + 0.2


# ---- outputs -------------------------------------------------------------------------
def outputs():
    for keep in (True, False):  # True is the default, and the mistake
        part, stage, schedule = make()
        outputs = follow_outputs(part)
        go(part, schedule, get_batch(), return_outputs=keep)
        kept = tell_kept(f"step, return_outputs={keep}", outputs)
        assert kept == (24 * 32 * 256 * 8 if keep else 0)
    inputs, targets = get_batch()
    with torch.no_grad():
        if part.is_first:
            schedule.eval(inputs, return_outputs=False)
        else:
            schedule.eval(target=targets, return_outputs=False)
    assert tell_kept("eval, return_outputs=False", outputs)
    stage.clear_runtime_states()  # the cure
    assert tell_kept("clear_runtime_states", outputs) == 0


# ---- tied ----------------------------------------------------------------------------
def add_up_and_clip(part):
    # Both parts of its gradient. With more than two processes this needs a group of the
    # first and the last.
    dist.all_reduce(shared_weight(part).grad)
    # the gradients of one process, in which the shared weight is there once
    gradients = {weight: weight.grad for weight in part.parameters()}
    if part.is_last:
        del gradients[shared_weight(part)]
    norm = total_norm(list(gradients.values()))
    nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, norm)


def tied():
    for clipping in (clip, add_up_and_clip):  # the first is the mistake
        part, _, schedule = make(tied=True)
        optimizer = pipeline.make_optimizer(part)
        first, last = train(part, schedule, optimizer, get_batches(), clipping)
        tell(f"{clipping.__name__}: the loss falls from {first:.4f} to {last:.4f}")
        off = difference(part, tied=True)
        off = tell_most("    from one process, the weights differ by", off)
        assert off > 1e-2 if clipping is clip else off <= 1e-10


# ---- whole ---------------------------------------------------------------------------
def whole():
    part, _, _ = make()
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(part, options=options)  # the mistake
    tell_each(f"{len(weights)} weights, {next(iter(weights))} is the first")
    assert len(weights) == (26 if part.is_first else 27)


# ---- groups --------------------------------------------------------------------------
def groups():
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # process 0's, for both
        for name, options in (("flat", flat), ("lists", StateDictOptions())):
            tell(f"{name}:")  # lists are the default, and the mistake
            said = tell_each(save_and_load(f"{folders[0]}/{name}", options))
        assert said == ["KeyError: 'betas'", "the optimizer steps"]


def save_and_load(folder, options):
    """Return what the optimizer's next step says."""
    part, _, schedule = make()
    optimizer = pipeline.make_optimizer(part)
    train(part, schedule, optimizer, get_batches()[:1])
    weights, state = get_state_dict(part, optimizer, options=options)
    saved = {"model": weights, "optimizer": state}
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        part,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=options,
    )
    try:
        optimizer.step()
        return "the optimizer steps"
    except KeyError as error:
        return f"KeyError: {error}"


# ---- uneven --------------------------------------------------------------------------
def uneven():
    part, _, schedule = make(micro_batches=4)
    try:
        go(part, schedule, get_batch(batch_size=10))  # the mistake
    except (ValueError, RuntimeError) as error:
        if "shape" in str(error) or "size" in str(error):  # not that of a connection
            tell_now(error)


# ---- the run -------------------------------------------------------------------------
def main():
    launch.check()
    launch.die_with_parent()
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        globals()[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
