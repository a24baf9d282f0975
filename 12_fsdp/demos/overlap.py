"""Print which gathers a trace of the profiler shows beside a block's computation.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/overlap.py
"""

import gc
import json
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


def trace(ahead):
    """Return the events of some forward passes: [(name, start, end)]."""
    torch.manual_seed(0)
    model = GPT(256, 64, width=256, depth=4)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for number, block in enumerate(model.blocks, start=1):
        name_forward(number, block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if ahead:
        gather_ahead(model.blocks)
    tokens = torch.arange(512).remainder(256).view(8, 64)
    with profile(schedule=schedule(wait=1, warmup=1, active=STEPS)) as profiler:
        for _ in range(STEPS + 2):
            with torch.no_grad():
                model(tokens)
            model.reshard()  # the root's weights, as a backward pass does
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    spans.sort(key=lambda event: event["ts"])
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in spans]


def beside(spans):
    """Return, for each block, the groups whose gathers ran while it computed."""
    # A forward pass gathers the root and then the blocks.
    gathers = [span for span in spans if span[0] == "gloo:all_gather"]
    assert len(gathers) == 5 * STEPS
    found = {}
    for name, start, end in spans:
        if name in ("F1", "F2", "F3", "F4"):
            row = found.setdefault(name, set())
            for number, (_, begin, ready) in enumerate(gathers):
                if begin < end and start < ready:
                    row.add(number % 5)
    return found


def main():
    for ahead in (False, True):
        found = beside(trace(ahead))
        if dist.get_rank() == 0:
            print("one ahead, unshard(async_op=True)" if ahead else "by default")
            for name, numbers in found.items():
                groups = [f"the gather of block {number}" for number in numbers]
                print(f"  {name} beside", *(groups or ["no gather"]), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
