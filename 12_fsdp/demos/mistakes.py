"""What goes wrong with FSDP2 without an error; the arguments name the mistakes to make.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/mistakes.py late_optimizer
"""

import gc
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT


# ---- what they share -----------------------------------------------------------------
def make():
    """Return a small GPT."""
    torch.manual_seed(0)
    return GPT(256, 32, width=64, depth=4)


def shard(model, mesh=None, **options):
    """Shard each block, then the weights that are in no block; return the model."""
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
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


def evaluate(model):
    with torch.no_grad():
        get_loss(model)


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), 3e-3)


def whole_weights(model):
    """Return the whole weights; all ranks have to call it."""
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    return {name: weight.clone() for name, weight in weights.items()}


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
    return texts


# ---- late_optimizer ------------------------------------------------------------------
def late_optimizer():
    model = make()
    adamw = make_adamw(model)  # the mistake
    report("before fully_shard", shard(model), adamw, changes=0)

    model = shard(make())
    evaluate(model)
    report("after an evaluation", model, make_adamw(model), changes=48)  # the same

    model = shard(make(), reshard_after_forward=False)
    evaluate(model)
    report("  without resharding", model, make_adamw(model), changes=0)  # the same

    model = shard(make())
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    report("after fully_shard", model, make_adamw(model), changes=53)


# ---- what late_optimizer prints ------------------------------------------------------
def report(made, model, adamw, changes):
    """Train; print the losses, and how many weights have changed: `changes`."""
    old = whole_weights(model)
    losses = " ".join(f"{train_step(model, adamw):.3f}" for _ in range(4))
    new = whole_weights(model)
    changed = sum(not new[name].equal(old[name]) for name in old)
    tell(f"AdamW made {made:21}loss {losses}, {changed:2} of {len(old)} weights change")
    assert changed == changes


# ---- uneven --------------------------------------------------------------------------
def uneven():
    group = dist.new_group(timeout=timedelta(seconds=5))  # for which a rank waits
    model = shard(make(), DeviceMesh.from_group(group, "cpu"))
    batches = 3 if dist.get_rank() == 0 else 2  # the mistake
    try:
        for batch in range(1, batches + 1):
            evaluate(model)
            tell(f"batch {batch}")
    except RuntimeError as error:
        assert "all_gather" in "".join(traceback.format_exception(error))
        tell(f"rank 0 waited in all_gather: {error}")
        raise
    finally:
        dist.barrier()  # otherwise the rank that waits sees the other one disappear


# ---- local_norm ----------------------------------------------------------------------
def local_norm():
    model = shard(make())
    get_loss(model).backward()
    shards = [weight.grad.to_local() for weight in model.parameters()]
    norm = nn.utils.get_total_norm(shards)  # the mistake
    own = tell_each(
        f"norm {norm:.4f}, to clip to 0.1: gradients times {0.1 / norm:.4f}"
    )
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    tell("clip_grad_norm_")
    whole = tell_each(f"norm {norm:.4f}, gradients times {0.1 / norm:.4f}")
    assert own[0] != own[1] and whole[0] == whole[1]


# ---- own_state_dict ------------------------------------------------------------------
def own_state_dict():
    model = shard(make())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        torch.save(model.state_dict(), path)  # the mistake
        loaded = torch.load(path, weights_only=True)
    weight = loaded["tokens.weight"]
    tell(f"tokens.weight: {tuple(weight.shape)}, {type(weight).__name__}")
    tell_each(f"in its file: {tuple(weight.to_local().shape)}")
    try:
        make().load_state_dict(loaded)
    except RuntimeError as error:
        assert "copy_.default got mixed torch.Tensor and DTensor" in str(error)
        tell("a plain model: aten.copy_.default got mixed torch.Tensor and DTensor")
    make().load_state_dict(whole_weights(model))
    tell("a plain model: the weights of get_model_state_dict are loaded")


# ---- sync_left_off -------------------------------------------------------------------
def sync_left_off():
    model = shard(make())
    adamw = make_adamw(model)
    model.set_requires_gradient_sync(False)  # and never switched on: the mistake
    losses = [f"{train_step(model, adamw):.3f}" for _ in range(4)]
    get_loss(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    tell(f"loss {' '.join(losses)}; the norm of the gradient is {norm:.4f}")
    assert len(set(losses)) == 1 and norm == 0
    assert not hasattr(norm, "full_tensor")


# ---- the run -------------------------------------------------------------------------
def main():
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        globals()[name]()
    gc.collect()  # on gloo, a model still alive can abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
