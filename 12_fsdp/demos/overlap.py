"""Print which gathers run while a block computes, as a trace of the profiler shows.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/overlap.py

On GPUs, print how long each gather takes, and during how much of it they compute.
"""

import gc
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile
from torch.profiler import record_function
from torch.profiler import schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

STEPS = 3


# ---- to copy -------------------------------------------------------------------------
def gather_ahead(blocks):
    """Have each block ask for the next one's weights, and not wait for them."""
    for block, following in pairwise(blocks):

        def gather(*_, following=following):
            following.unshard(async_op=True)

        block.register_forward_pre_hook(gather)  # after FSDP's, which gathers `block`


# ---- the trace -----------------------------------------------------------------------
def name_forward(number, block):
    """Mark the computation of a block in the trace, without FSDP's hooks."""
    forward = block.forward

    def marked(x):
        with record_function(f"F{number}"):
            return forward(x)

    block.forward = marked


def trace(device, ahead):
    """Return the events of some forward passes, as the profiler writes them."""
    torch.manual_seed(0)
    # Larger on a GPU, where small gathers are over before a block begins.
    width, length = (256, 64) if device.type == "cpu" else (1024, 1024)
    model = GPT(256, length, width, depth=4, heads=width // 64).to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for number, block in enumerate(model.blocks, start=1):
        name_forward(number, block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if ahead:
        gather_ahead(model.blocks)
    tokens = torch.arange(8 * length, device=device).remainder(256).view(8, length)
    with profile(schedule=schedule(wait=1, warmup=1, active=STEPS)) as profiler:
        for _ in range(STEPS + 2):
            with torch.no_grad():
                model(tokens)
            model.reshard()  # the root's weights, as a backward pass does
            if device.type == "cuda":
                torch.cuda.synchronize()  # so that a step has its own kernels
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    return sorted(spans, key=lambda event: event["ts"])


def shared(one, other):
    """Return for how many milliseconds two events go on at the same time."""
    ends = [event["ts"] + event["dur"] for event in (one, other)]
    return max(0, min(ends) - max(one["ts"], other["ts"])) / 1e3


def beside(spans):
    """Return, for each block, the groups whose gathers ran while it computed."""
    # A forward pass gathers the root and then the blocks.
    gathers = [span for span in spans if span["name"] == "gloo:all_gather"]
    assert len(gathers) == 5 * STEPS
    found = {}
    for span in spans:
        if span["name"] in ("F1", "F2", "F3", "F4"):
            row = found.setdefault(span["name"], set())
            row |= {n % 5 for n, each in enumerate(gathers) if shared(span, each)}
    return found


def on_gpu(spans):
    """Return (ms of a gather, ms beside computation) for those of the last pass."""
    kernels = [span for span in spans if span.get("cat") == "kernel"]
    gathers = [span for span in kernels if "AllGather" in span["name"]]
    assert len(gathers) == 5 * STEPS
    computes = [span for span in kernels if "nccl" not in span["name"].lower()]
    return [
        (gather["dur"] / 1e3, sum(shared(gather, each) for each in computes))
        for gather in gathers[-5:]
    ]


def report(spans, device):
    """Print what overlaps."""
    if device.type == "cuda":
        for number, (total, part) in enumerate(on_gpu(spans)):
            group = f"block {number}" if number else "the root"
            print(f"  gather of {group}: {total:.1f} ms, {part:.1f} beside computation")
    else:
        for name, numbers in beside(spans).items():
            groups = [f"the gather of block {number}" for number in numbers]
            print(f"  {name} beside", *(groups or ["no gather"]), flush=True)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    for ahead in (False, True):
        spans = trace(device, ahead)
        if dist.get_rank() == 0:
            print("one ahead, unshard(async_op=True)" if ahead else "by default")
            report(spans, device)


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
