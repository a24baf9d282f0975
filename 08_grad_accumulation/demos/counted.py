"""Count what one step of stage 08 sends and keeps, with no_sync and without it.

python 08_grad_accumulation/demos/counted.py
"""

import contextlib
import gc
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from kept import most_kept
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.meters import Meter
from common.model import make_model

STAGE = Path(__file__).resolve().parents[1]
accumulate_gradients = runpy.run_path(str(STAGE / "train.py"))["accumulate_gradients"]


def main():
    args = SimpleNamespace(data="digits", dtype=torch.float32, amp="off")
    args.device = torch.device("cpu")
    train_set, _ = data.load("digits")
    batch = train_set.__getitems__(list(range(48)))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = make_model("resnet18", channels=1, num_classes=10, image_size=8).train()
    model.to(memory_format=torch.channels_last)  # as the images are
    gradient = sum(weight.nbytes for weight in model.parameters())
    sent = []

    def hook(_, bucket):
        """Count a bucket of gradients; DDP calls this in place of its all-reduce."""
        sent.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    print("micro-batches  no_sync  all-reduces of the gradient   MiB  kept, MiB")
    cases = ((1, "-"), (2, "yes"), (4, "yes"), (8, "yes"), (2, "no"), (4, "no"))
    for args.grad_accum_steps, no_sync in cases:
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, hook)
        if no_sync == "no":
            ddp.no_sync = contextlib.nullcontext
        step = (args, ddp, batch, scaler, Meter(args.device))
        sent.clear()
        kept = most_kept(model, lambda step=step: accumulate_gradients(*step))
        line = f"{args.grad_accum_steps:13}  {no_sync:>7}  {sum(sent) / gradient:27.0f}"
        print(f"{line}  {sum(sent) / 2**20:4.0f}  {kept:9.1f}")


if __name__ == "__main__":
    # A group of this process alone: DDP makes the same calls as in a larger one.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    main()
    gc.collect()
    dist.destroy_process_group()
