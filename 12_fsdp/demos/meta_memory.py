"""Measure the CPU memory that ranks need to make and shard a model, in five ways.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/meta_memory.py FOLDER

FOLDER gets the model's file, a sharded checkpoint, and drawn.pt, the weights that were
drawn in shards.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from harness.counting import Memory


def make(device):
    """Return a GPT on a device: 12.6 MiB, or nothing at all."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(256, 32, width=256, depth=4)


def shard(model):
    """Shard a model as stage 12 does; return it."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_on_every_rank(_):
    """Make and shard a model as stage 12 does."""
    return shard(make("cpu"))


# ---- from rank 0 ---------------------------------------------------------------------
def whole_on_rank_0(_):
    """Make the model on rank 0, shard it everywhere, and send each rank its shards."""
    model = make("cpu" if dist.get_rank() == 0 else "meta")
    weights = model.state_dict()  # on rank 0 the values, elsewhere the names alone
    shard(model)
    model.to_empty(device="cpu")  # "cuda" on GPUs; only the shards
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=whole)
    return model


# ---- slices of files -----------------------------------------------------------------
def slices_of_files(folder):
    """Make the model on the meta device, and read this rank's rows of *.safetensors."""
    model = shard(make("meta"))
    model.to_empty(device="cpu")
    reader = dcp.HuggingFaceStorageReader(folder)  # needs the package safetensors
    dcp.load(model.state_dict(), storage_reader=reader)  # in place
    return model


# ---- from a checkpoint ---------------------------------------------------------------
def from_a_checkpoint(folder):
    """Make the model on the meta device, and load its shards."""
    model = shard(make("meta"))
    model.to_empty(device="cpu")
    state = {"model": get_model_state_dict(model)}  # the empty shards, to be filled
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    return model


# ---- drawn in shards -----------------------------------------------------------------
def drawn_in_shards(_):
    """Make the model on the meta device, and draw its shards."""
    model = shard(make("meta"))
    model.to_empty(device="cpu")
    draw(model, make("meta"), seed=0)
    return model


@torch.no_grad()
def draw(model, twin, seed):
    """Draw the weights of a sharded model: the same on any number of ranks.

    twin: the same model on the meta device, not sharded. A rank holds its shards, and
    one layer of the twin at a time.
    """
    for number, (name, layer) in enumerate(twin.named_modules()):
        if not list(layer.parameters(recurse=False)):
            continue
        layer.to_empty(device="cpu")
        torch.manual_seed(seed + number)  # the same on all ranks
        twin.reset_parameters()  # draws nothing for layers on the meta device
        for key, whole in layer.named_parameters(prefix=name):
            weight = model.get_parameter(key)
            mesh, placements = weight.device_mesh, weight.placements
            # src_data_rank=None: each rank keeps its slice, and nothing is sent
            mine = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            weight.copy_(mine)
        layer.to("meta")


# ---- the run -------------------------------------------------------------------------
WAYS = (whole_on_every_rank, whole_on_rank_0, slices_of_files, from_a_checkpoint)
WAYS += (drawn_in_shards,)  # the last one draws other numbers


def main(folder):
    rank = dist.get_rank()
    log = print if rank == 0 else lambda *_: None
    weights = make("cpu").state_dict()
    total = sum(weight.nbytes for weight in weights.values()) / 2**20
    if rank == 0:
        save_file(weights, folder / "model.safetensors")
    del weights
    log(f"MiB, of {total:.1f}         peak: rank 0  other ranks  at the end")
    first = None
    for way in WAYS:
        with Memory() as memory:
            model = way(folder)
            gc.collect()
            held = [memory.most, memory.now()]
        shards = get_model_state_dict(model)
        if first is None:
            dcp.save({"model": shards}, checkpoint_id=folder / "checkpoint")
            first = shards
        if way is not drawn_in_shards:
            for name, each in shards.items():
                assert each.to_local().equal(first[name].to_local())
        table = [None] * dist.get_world_size()
        dist.all_gather_object(table, [size / 2**20 for size in held])
        (peak, end), *others = table
        assert all(each[1] == end for each in others)
        most = max(each[0] for each in others)
        log(f"{way.__name__:21}{peak:13.1f}{most:13.1f}{end:12.1f}")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if rank == 0:
        torch.save(weights, folder / "drawn.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    gc.collect()
    dist.destroy_process_group()
