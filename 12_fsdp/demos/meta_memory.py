"""Measure the CPU memory that each rank needs to make and shard a model, four ways.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/meta_memory.py FOLDER

FOLDER gets a checkpoint, and drawn.pt, the weights that were drawn in shards.
"""

import gc
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.gpt import GPT


class Memory(TorchDispatchMode):
    """Note the bytes of the tensors that are alive, and the most at any time."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def now(self):
        alive = [storage for each in self.storages.values() if (storage := each())]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            # a tensor on the meta device has no memory
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        if self.now() > self.peak:
            # gloo's threads let go of the tensors of a collective just after its end
            time.sleep(0.02)
            self.peak = max(self.peak, self.now())
        return result


# ---- the ways ------------------------------------------------------------------
def make(device):
    """Return a GPT on a device: 12.6 MiB, or nothing at all."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(256, 32, width=256, depth=4)


def shard(model):
    """Shard a model as stage 12 does."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_on_every_rank():
    """Make and shard a model as stage 12 does."""
    model = make("cpu")
    yield
    shard(model)
    yield model


def whole_on_rank_0():
    """Make the model on rank 0, shard it everywhere, and send each rank its shards."""
    model = make("cpu" if dist.get_rank() == 0 else "meta")
    yield
    shard_from_rank_0(model)
    yield model


def shard_from_rank_0(model):
    """Shard a model that is on the CPU on rank 0, and on the meta device elsewhere."""
    weights = model.state_dict()  # on rank 0 the values, elsewhere the names alone
    shard(model)
    model.to_empty(device="cpu")  # "cuda" on GPUs; only the shards
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=whole)


def from_a_checkpoint():
    """Make a model on the meta device on all ranks, and load its shards."""
    model = make("meta")
    yield
    shard(model)
    model.to_empty(device="cpu")
    state = {"model": get_model_state_dict(model)}  # the empty shards, to be filled
    dcp.load(state, checkpoint_id=sys.argv[1])
    yield model


def drawn_in_shards():
    """Make a model on the meta device on all ranks, and draw its shards."""
    model = make("meta")
    yield
    shard(model)
    model.to_empty(device="cpu")  # "cuda" on GPUs; only the shards
    draw(model, make("meta"), seed=0)
    yield model


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


# The last one draws other numbers.
WAYS = (whole_on_every_rank, whole_on_rank_0, from_a_checkpoint, drawn_in_shards)


def measure(way):
    """Return the MiB after making, the most at any time and in the end; the model."""
    with Memory() as memory:
        steps = way()
        next(steps)
        made = memory.now()
        model = next(steps)
        steps.close()
        gc.collect()
        held = [made, memory.peak, memory.now()]
    return torch.tensor(held) / 2**20, model


def main():
    log = print if dist.get_rank() == 0 else lambda *_: None
    log("MiB                  rank   made   peak  sharded")
    first = None
    for way in WAYS:
        held, model = measure(way)
        shards = get_model_state_dict(model)
        if first is None:
            dcp.save({"model": shards}, checkpoint_id=sys.argv[1])
            first = shards
        if way is drawn_in_shards:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=whole)
            if dist.get_rank() == 0:
                torch.save(weights, f"{sys.argv[1]}/drawn.pt")
        else:
            for name, each in shards.items():
                assert each.to_local().equal(first[name].to_local())
        table = [torch.empty(3) for _ in range(dist.get_world_size())]
        dist.all_gather(table, held)
        for rank, row in enumerate(table):
            cells = "{:7.1f}{:7.1f}{:9.1f}".format(*row.tolist())
            log(f"{way.__name__:21}{rank:4}{cells}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
