"""Count what one step of stage 08 sends and keeps, with no_sync and without it.

python 08_grad_accumulation/demos/counted.py
"""

import contextlib
import gc
import runpy
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.meters import Meter
from common.model import make_model
from harness.counting import Collectives

STAGE = Path(__file__).resolve().parents[1]
accumulate_gradients = runpy.run_path(str(STAGE / "train.py"))["accumulate_gradients"]


class Kept:
    """What autograd holds in place of a tensor, until it has used it."""

    def __init__(self, tensor):
        self.tensor = tensor


@contextlib.contextmanager
def most_kept(model):
    """Yield a list whose last item is the most bytes kept for backward passes so far.

    The weights are not counted: they are in memory anyway.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes, most = {}, [0]

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept = Kept(tensor)
        if storage.data_ptr() not in weights:
            sizes[id(kept)] = (storage.data_ptr(), storage.nbytes())
            weakref.finalize(kept, sizes.pop, id(kept))
            # Two tensors can share their memory: count each address once.
            most.append(max(most[-1], sum(dict(sizes.values()).values())))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        yield most


def main():
    args = SimpleNamespace(data="digits", dtype=torch.float32, amp="off")
    args.device = torch.device("cpu")
    train_set, _ = data.load("digits")
    batch = train_set.__getitems__(list(range(48)))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = make_model("resnet18", channels=1, num_classes=10, image_size=8).train()
    model.to(memory_format=torch.channels_last)  # as the images are
    gradient = sum(weight.nbytes for weight in model.parameters())

    print("micro-batches  no_sync  all-reduces of the gradient  kept, MiB")
    cases = ((1, "-"), (2, "yes"), (4, "yes"), (8, "yes"), (2, "no"), (4, "no"))
    for args.grad_accum_steps, no_sync in cases:
        ddp = nn.parallel.DistributedDataParallel(model)
        if no_sync == "no":
            ddp.no_sync = contextlib.nullcontext
        with Collectives() as collectives, most_kept(model) as kept:
            accumulate_gradients(args, ddp, batch, scaler, Meter(args.device))
        sent = collectives.total()["all_reduce"]["bytes"] / gradient
        line = f"{args.grad_accum_steps:13}  {no_sync:>7}  {sent:27.0f}"
        print(f"{line}  {kept[-1] / 2**20:9.1f}")


if __name__ == "__main__":
    # A group of this process alone: DDP makes the same calls as in a larger one.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    main()
    gc.collect()
    dist.destroy_process_group()
