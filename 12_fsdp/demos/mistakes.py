"""What goes wrong with FSDP2, on a small GPT; the argument names a mistake.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/mistakes.py optimizer
"""

import copy
import gc
import re
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from common.gpt import generate


# ---- what they share -----------------------------------------------------------------
def make(seed=0, model=GPT, depth=4):
    """Return a small GPT."""
    torch.manual_seed(seed)
    return model(256, 32, width=64, depth=depth)


def make_mesh():
    """Return the mesh of all processes."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model, reshard_after_forward=True, **options):
    """Shard each block, then the weights that are in no block; return the model."""
    mesh = make_mesh()
    for block in model.blocks:
        fully_shard(
            block, mesh=mesh, reshard_after_forward=reshard_after_forward, **options
        )
    return fully_shard(model, mesh=mesh, **options)


def get_loss(model):
    """Return the loss on this rank's tokens; each rank has different ones."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (4, 32), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_step(model, optimizer):
    """Take a step; return the mean of the ranks' losses."""
    loss = get_loss(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def whole_weights(model):
    """Return a copy of the whole weights; all ranks have to call it."""
    options = StateDictOptions(full_state_dict=True)
    return copy.deepcopy(get_model_state_dict(model, options=options))


def tell(text):
    """Print a text on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def tell_each(text):
    """Print the texts of all ranks, in order."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    for rank, each in enumerate(texts):
        tell(f"rank {rank}: {each}")


# ---- The optimizer made before fully_shard -------------------------------------------
def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), 3e-3)


def optimizer():
    tell("AdamW made            loss in 4 steps          weights updated  AdamW, bytes")
    model = make()
    adamw = make_adamw(model)  # the mistake
    report("before fully_shard", shard(model), adamw)

    model = shard(make())
    report("after fully_shard", model, make_adamw(model))

    model = shard(make())
    evaluate(model)
    report("after an evaluation", model, make_adamw(model))  # the same mistake

    model = shard(make(), reshard_after_forward=False)
    evaluate(model)
    report("  without resharding", model, make_adamw(model))  # the same mistake


def evaluate(model):
    with torch.no_grad():
        get_loss(model)


def reshard_first():
    """The cure: reshard all that an evaluation has left whole."""
    model = shard(make(), reshard_after_forward=False)
    evaluate(model)
    model.reshard()
    tell(f"whole after model.reshard(): {count_plain(model)} of 53 weights")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tell(f"whole after reshard() of each FSDP module: {count_plain(model)}")
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    tell("AdamW made            loss in 4 steps          weights updated  AdamW, bytes")
    report("after resharding", model, make_adamw(model))


def count_plain(model):
    return sum(not isinstance(weight, DTensor) for weight in model.parameters())


def report(made, model, adamw):
    """Train; print the losses, what was updated, and the size of the weights held."""
    held = 0
    for weight in adamw.param_groups[0]["params"]:
        held += (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
    old = whole_weights(model)
    losses = " ".join(f"{train_step(model, adamw):.3f}" for _ in range(4))
    new = whole_weights(model)
    updated = sum(not new[name].equal(old[name]) for name in old)
    assert len(adamw.state) == updated
    tell(f"{made:20}  {losses}  {updated:9} of {len(old)} {held:13,}")


# ---- Only the root sharded -----------------------------------------------------------
def only_root():
    tell("fully_shard on   all-gathers  reduce-scatters  most bytes of whole weights")
    for sharded in ("the root alone", "blocks and root"):
        model = make()
        whole = count_whole(model)
        if sharded == "the root alone":
            fully_shard(model, mesh=make_mesh())  # the mistake
        else:
            shard(model)
        with CommDebugMode() as mode:
            get_loss(model).backward()
        calls = mode.get_comm_counts()
        gathers = calls[torch.ops.c10d._allgather_base_]
        scatters = calls[torch.ops.c10d._reduce_scatter_base_]
        total = sum(weight.numel() * 4 for weight in model.parameters())
        most = f"{max(whole):,} of {total:,}"
        tell(f"{sharded}{gathers:13}{scatters:17}  {most:>30}")


def count_whole(model):
    """Return a list; each block's forward and backward pass adds how many are whole."""
    counts = []

    def count(*_):
        weights = [w for w in model.parameters() if not isinstance(w, DTensor)]
        counts.append(sum(weight.nbytes for weight in weights))

    for block in model.blocks:
        block.up.register_forward_hook(count)
        block.up.register_full_backward_hook(count)
    return counts


# ---- Autocast without the policy -----------------------------------------------------
def no_policy():
    tell("16-bit weights kept from forward to backward, in bytes")
    tell("blocks  of the model  autocast alone  autocast and policy")
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for depth in (2, 4, 8):
        alone = kept_copies(shard(make(depth=depth)))  # the mistake
        both = kept_copies(shard(make(depth=depth), mp_policy=policy))
        total = sum(2 * weight.numel() for weight in make(depth=depth).parameters())
        tell(f"{depth:6}{total:14,}{alone:16,}{both:21,}")


def kept_copies(model):
    """Return the bytes of weights in bfloat16 that autograd keeps after forward."""
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = get_loss(model)
    shapes = {weight.shape for weight in model.parameters() if weight.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}  # as a product uses them
    copies = [t for t in kept if t.dtype == torch.bfloat16 and t.shape in shapes]
    storages = [copy.untyped_storage() for copy in copies]
    size = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    loss.backward()
    return size


# ---- Rank 0 alone --------------------------------------------------------------------
def sample():
    alone(lambda model: generate(model, b"\n", 8))


def save():
    alone(whole_weights)


def uneven():
    model = shard(make())
    batches = 3 if dist.get_rank() == 0 else 2  # the mistake
    for batch in range(1, batches + 1):
        evaluate(model)
        tell(f"batch {batch}")


def alone(function):
    model = shard(make())
    adamw = make_adamw(model)
    for step in range(1, 4):
        train_step(model, adamw)
        tell(f"step {step}")
        if step == 2 and dist.get_rank() == 0:
            function(model)  # the mistake: rank 1 is in step 3 already


OURS = ("generate", "whole_weights", "train_step", "evaluate")


def report_error(error):
    """Print in which collective this rank waited, and for which of our functions."""
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames]
    ours = next(n for n in names if n in OURS)
    call = re.search("all_gather|reduce_scatter", " ".join(names))[0]
    line = f"rank {dist.get_rank()} waited in {ours}, {call}: {error}\n"
    sys.stdout.write(line)  # `print` could write the end of the line by itself, later
    sys.stdout.flush()


# ---- Clipping by the local norm ------------------------------------------------------
def norm():
    model = shard(make())
    get_loss(model).backward()
    shards = [weight.grad.to_local() for weight in model.parameters()]
    norm = nn.utils.get_total_norm(shards)  # the mistake
    tell_each(f"norm {norm:.4f}, gradients times {0.1 / norm:.4f}")
    tell("clip_grad_norm_")
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    tell_each(f"norm {norm:.4f}, gradients times {0.1 / norm:.4f}")


# ---- Different seeds -----------------------------------------------------------------
def seeds():
    tell("each rank's own seed, tokens.weight")
    model = make(seed=dist.get_rank())  # the mistake
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    compare("DDP", ddp.module.tokens.weight)
    compare("FSDP2", whole_weights(shard(model))["tokens.weight"])


def compare(name, weight):
    """Print with which seed the rows of each rank's shard were drawn."""
    for rows in (slice(0, 128), slice(128, 256)):
        of = [s for s in (0, 1) if weight[rows].equal(make(s).tokens.weight[rows])]
        tell(f"{name:5}  rows {rows.start:3} to {rows.stop - 1}: seed {of[0]}")


# ---- A state dict per rank -----------------------------------------------------------
def files():
    folder, rank = Path(sys.argv[2]), dist.get_rank()
    model = shard(make())
    torch.save(model.state_dict(), folder / f"rank{rank}.pt")  # the mistake
    weights = whole_weights(model)  # on all ranks
    if rank == 0:
        torch.save(weights, folder / "whole.pt")


# ---- Other messages ------------------------------------------------------------------
def root_before_blocks():
    model = fully_shard(make(), mesh=make_mesh())
    for block in model.blocks:
        fully_shard(block, mesh=make_mesh())
    get_loss(model)


def fully_shard_twice():
    shard(shard(make()))


def one_block_called():
    model = shard(make())
    model.blocks[0](torch.ones(4, 32, 64))
    get_loss(model)


def ddp_around_fsdp():
    nn.parallel.DistributedDataParallel(shard(make()))


def no_sync():
    with shard(make()).no_sync():
        pass


def module():
    shard(make()).module.state_dict()


def plain_state_dict():
    shard(make()).load_state_dict(make().state_dict())


def tied_in_two_groups():
    model = make()
    model.head.weight = model.tokens.weight
    for module in (model.tokens, model.head, model):
        fully_shard(module, mesh=make_mesh())
    get_loss(model)


def inference_mode():
    model = shard(make())
    with torch.inference_mode():
        get_loss(model)
    train_step(model, make_adamw(model))


def deepcopy():
    copy.deepcopy(shard(make()))


def sync_left_off():
    model = shard(make())
    adamw = make_adamw(model)
    model.set_requires_gradient_sync(False)
    losses = {train_step(model, adamw) for _ in range(3)}
    get_loss(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert len(losses) == 1 and norm == 0
    assert not hasattr(norm, "full_tensor")  # a plain tensor
    tell("    no error; the loss is constant, and the norm of the gradient is 0")


OTHERS = (
    root_before_blocks,
    fully_shard_twice,
    one_block_called,
    ddp_around_fsdp,
    no_sync,
    module,
    plain_state_dict,
    tied_in_two_groups,
    inference_mode,
    deepcopy,
    sync_left_off,
)


def others():
    for function in OTHERS:
        tell(function.__name__)
        try:
            function()
        except Exception as error:
            # the reason, if there is a list of them, and else the first sentence
            reason = re.search(r"aten\S+ got mixed [^,]+", str(error))
            words = reason[0] if reason else re.split(r"\.[ Y]|\.?$", str(error))[0]
            tell(f"    {type(error).__name__}: {' '.join(words.split())}")


# ---- the run -------------------------------------------------------------------------
def main():
    store, rank, world_size = next(dist.rendezvous("env://"))
    known = {"store": store, "rank": rank, "world_size": world_size}

    def meet(where):
        """Wait until all ranks are here; rank 0, which may have the store, leaves last.

        The answers of `store.wait` would be lost if the store ended too early.
        """
        others = range(1, world_size)
        store.set(f"{where} {rank}", "")
        store.wait([f"{where} {other}" for other in range(world_size)])
        store.set(f"{where}, {rank} leaves", "")
        if rank == 0:
            store.wait([f"{where}, {other} leaves" for other in others])

    meet("started")  # one may have imported torch long before the other
    seconds = 5 if sys.argv[1] in ("sample", "save", "uneven") else 60
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds), **known)
    try:
        globals()[sys.argv[1]]()
    except RuntimeError as error:
        report_error(error)
        meet("done")  # torchrun ends the other rank when this one has ended
        raise
    meet("done")  # otherwise one that still waits for this rank sees it disappear


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
