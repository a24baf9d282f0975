"""Measure on a GPU what host memory saves, and what it costs: peaks and times.

torchrun --standalone --nproc-per-node=1 12_fsdp/demos/host_memory.py

One sequence per process, in bf16, activation checkpointing. On a CPU it only shows that
it runs.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from activation_step import checkpoint_block
from activation_step import offload_block
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

# What is in host memory: blocks' inputs; or weights, gradients and averages.
WAYS = ("nothing", "inputs of blocks", "weights and AdamW")


def make(way, length, device, width, depth):
    """Return a sharded GPT, with what `way` names in host memory."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    model = GPT(256, length, width, depth, heads=width // 64)
    options = {
        "mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": OffloadPolicy(),
    }
    if way == "weights and AdamW":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
    else:
        model.to(device)
    for block in model.blocks:
        checkpoint_block(block)
        if way == "inputs of blocks":
            offload_block(block)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def measure(model, length, device, steps):
    """Return the peak in bytes, the median seconds of a step, and the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.arange(length, device=device).remainder(256).view(1, length)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens)[0], tokens[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return peak, statistics.median(seconds[1:] or seconds), loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank() == 0:
        print("tokens  in host memory      GiB at the peak  s per step    loss")
    for length in args.lengths:
        for way in WAYS:
            model = make(way, length, device, args.width, args.depth)
            peak, seconds, loss = measure(model, length, device, args.steps)
            if dist.get_rank() == 0:
                numbers = f"{peak / 2**30:15.2f}{seconds:12.3f}{loss:8.4f}"
                print(f"{length:6,}  {way:20}{numbers}", flush=True)
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
