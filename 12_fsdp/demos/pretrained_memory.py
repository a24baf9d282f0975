"""Measure the CPU memory that each rank needs to read a pretrained model, four ways.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/pretrained_memory.py FOLDER
"""

import argparse
import gc
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import set_model_state_dict

# Otherwise transformers shards on GPUs, if there are any, and reads in threads, whose
# tensors a dispatch mode does not see.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "your_own_script/hugging_face")]

from meta_memory import Memory

import fine_tune
import sharded

CPU = torch.device("cpu")


class Allocated(Memory):
    """Note the bytes that torch has allocated, and the most at any time.

    A file that safetensors has mapped into memory is not among them: its pages are the
    operating system's, which has them once for all ranks of a machine.
    """

    def now(self):
        alive = [storage for each in self.storages.values() if (storage := each())]
        return sum(storage.nbytes() for storage in alive if storage.resizable())


# ---- the four ways -------------------------------------------------------------------
def every_rank_reads(folder, mesh):
    """Read the whole model on all ranks; each keeps its shards."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sharded.shard_model(model, mesh, bf16=False)
    return model


def rank_0_reads(folder, mesh):
    """Read the whole model on rank 0, which broadcasts it weight by weight."""
    weights = {}
    if dist.get_rank() == 0:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = plain.state_dict()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sharded.shard_model(model, mesh, bf16=False)
    model.to_empty(device="cpu")  # "cuda" on GPUs; only the shards
    model.initialize_weights()  # for what is not in the files
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=whole)
    return model


def each_reads_its_slices(folder, mesh):
    """Do what fine_tune.py does."""
    args = types.SimpleNamespace(model=folder, dtype="float32", bf16=False)
    args.lora_rank = args.rank_0_reads = 0
    return fine_tune.load_model(args, CPU, mesh)


def transformers_shards(folder, mesh):
    """Have transformers shard and read the model, with FSDP2 as it sets it up."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=mesh.size()),
    )


WAYS = (every_rank_reads, rank_0_reads, each_reads_its_slices, transformers_shards)


# ---- the run -------------------------------------------------------------------------
def measure(way, folder, mesh):
    """Return the most bytes at any time, those at the end, and the model's tensors."""
    with Allocated() as memory:
        model = way(folder, mesh)
        gc.collect()
        held = memory.peak, memory.now()
    tensors = {name: w.to_local().clone() for name, w in model.named_parameters()}
    tensors |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return held, tensors


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="config.json and *.safetensors")
    folder = parser.parse_args().folder
    if not list(folder.glob("*.safetensors")):
        parser.error(f"there is no *.safetensors in {folder}")
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole = sum(weight.nbytes for weight in model.parameters())

    log = print if dist.get_rank() == 0 else lambda *_: None
    log(f"MiB, of {whole / 2**20:.1f}            rank   peak  at the end")
    first = None
    for way in WAYS:
        held, tensors = measure(way, folder, mesh)
        first = first or tensors
        assert tensors.keys() == first.keys()
        assert all(tensors[name].equal(first[name]) for name in first)
        table = [None] * dist.get_world_size()
        dist.all_gather_object(table, held)
        for rank, row in enumerate(table):
            peak, end = (size / 2**20 for size in row)
            log(f"{way.__name__:24}{rank:2}{peak:7.1f}{end:12.1f}")


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
