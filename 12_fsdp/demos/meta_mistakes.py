"""What goes wrong with models made on the meta device; each function is a mistake.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/meta_mistakes.py
"""

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
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

WHOLE = StateDictOptions(full_state_dict=True)


# ---- what they share -----------------------------------------------------------------
def make(device="cpu"):
    """Return a small GPT."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(256, 32, width=64, depth=4)


def make_on_rank_0():
    """Return a small GPT, on all ranks but rank 0 without memory."""
    return make("cpu" if dist.get_rank() == 0 else "meta")


def shard(model):
    """Shard a model as stage 12 does; return it."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def get_loss(model):
    tokens = torch.arange(128).view(4, 32)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tell_each(text):
    """Print the texts of all ranks, in order."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    for rank, each in enumerate(texts if dist.get_rank() == 0 else ()):
        print(f"    rank {rank}: {each}", flush=True)


# ---- the mistakes --------------------------------------------------------------------
def without_to_empty():
    model = shard(make("meta"))
    get_loss(model)


def without_load():
    model = shard(make("meta"))
    model.to_empty(device="cpu")
    tell_each(f"loss {get_loss(model).item():.3f}")


def draw_in_shards(seed):
    model = shard(make("meta"))
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.reset_parameters()
    weight = get_model_state_dict(model, options=WHOLE)["tokens.weight"]
    equal = weight[:128].equal(weight[128:])
    tell_each(f"loss {get_loss(model).item():.3f}, both ranks' rows equal: {equal}")


def one_seed():
    draw_in_shards(0)


def a_seed_per_rank():
    draw_in_shards(dist.get_rank())


def without_broadcast():
    model = make_on_rank_0()
    weights = model.state_dict()
    shard(model).to_empty(device="cpu")
    set_model_state_dict(model, weights, options=WHOLE)  # no broadcast_from_rank0


MISTAKES = (without_to_empty, without_load, one_seed, a_seed_per_rank)


def reason(error):
    """Return the beginning of an error's text."""
    return f"{type(error).__name__}: {re.split('[,;]', str(error))[0]}"


def main():
    # fills what torch.empty returns with NaN, so that the outcome is always the same
    torch.use_deterministic_algorithms(True)
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    for mistake in MISTAKES:
        log(mistake.__name__)
        try:
            mistake()
        except RuntimeError as error:
            tell_each(reason(error))
    log("without_broadcast", flush=True)
    dist.barrier()
    try:
        without_broadcast()
    except NotImplementedError as error:
        print(f"    rank 1: {reason(error)}", flush=True)
    except RuntimeError as error:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        print(f"    rank 0: RuntimeError in {names[-1]}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    main()
    gc.collect()
    dist.destroy_process_group()
