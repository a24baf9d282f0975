"""Does DDP's communication overlap with backward? How do I see it in a trace?

DDP rearranges its buckets after the first step, so profile a later one, and open its
trace (kept if you add FOLDER to the command) in ui.perfetto.dev: `gloo:all_reduce`, or
on a GPU nccl's AllReduce kernels, should overlap backward. DDP sends a bucket as soon
as backward has filled it, so all except the last can be hidden, unless `bucket_cap_mb`
is so large that there is only one. The hidden share of the time goes to stderr; an nccl
kernel's time includes its wait for the other ranks.

$ torchrun --standalone --nproc-per-node=2 recipes/profile_step.py
6 bucket(s), 5 sent before the first layer's backward
1 bucket(s), 0 sent before the first layer's backward
"""

import gc
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.profiler import schedule


# ---- the lines to copy ---------------------------------------------------------------
def profile_one_step(take_step, path):
    with profile(schedule=schedule(wait=2, warmup=1, active=1)) as profiler:
        for _ in range(4):
            take_step()
            profiler.step()
    profiler.export_chrome_trace(str(path))


# ---- the proof -----------------------------------------------------------------------
def write_trace(path, bucket_cap_mb, device):
    """Take four steps, and write a trace of the last one."""
    torch.manual_seed(0)
    # Each layer has 1 MiB of weights.
    layers = [(nn.Linear(512, 512), nn.SiLU()) for _ in range(6)]
    model = nn.Sequential(*sum(layers, ())).to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    samples = torch.randn(64, 512).to(device)

    def take_step():
        wrapped.zero_grad()
        wrapped(samples).square().mean().backward()

    profile_one_step(take_step, path)


def read_trace(path):
    """Return the number of all-reduces, that of early ones, and the hidden share."""
    events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    backward = [e for e in events if re.match("autograd::engine.*Backward", e["name"])]
    kernels = [e for e in events if e.get("cat") == "kernel"]  # none on a CPU
    sends = [e for e in kernels if "nccl" in e["name"]]
    sends = sends or [e for e in events if e["name"] == "gloo:all_reduce"]
    work = [e for e in kernels if "nccl" not in e["name"]] or backward
    hidden = 0
    for a in sends:
        for b in work:
            end = min(a["ts"] + a["dur"], b["ts"] + b["dur"])
            hidden += max(0, end - max(a["ts"], b["ts"]))
    calls = [e["ts"] for e in events if e["name"] == "c10d::allreduce_"]
    first_layer = max(e["ts"] for e in backward if "AddmmBackward" in e["name"])
    early = sum(call < first_layer for call in calls)
    # One rank alone may send nothing.
    return len(calls), early, hidden / max(sum(e["dur"] for e in sends), 1)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    for bucket_cap_mb, expected in ((1, (6, 5)), (100, (1, 0))):
        with tempfile.TemporaryDirectory() as folder:
            kept = sys.argv[1] if len(sys.argv) > 1 else folder  # or deleted
            trace = Path(kept, f"buckets-{bucket_cap_mb}-rank-{dist.get_rank()}.json")
            write_trace(trace, bucket_cap_mb, device)
            buckets, early, hidden = read_trace(trace)
        if dist.get_rank() == 0:
            sent = f"{early} sent before the first layer's backward"
            print(f"{buckets} bucket(s), {sent}")
            print(f"hidden: {hidden:.0%} of the time", file=sys.stderr)
        assert (buckets, early) == expected


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
