"""Measure what each rank of DDP holds, with 1, 2 and 4 ranks and the same global batch.

torchrun --standalone --nproc-per-node=4 11_gpt/demos/memory.py
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.model import GPT

WINDOWS, CONTEXT_LENGTH = 8, 32  # of the global batch


def size(tensors, seen):
    """Return the MiB of memory of tensors, leaving out what is in `seen` already."""
    new = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors
    }
    new = {address: new[address] for address in new.keys() - seen}
    seen.update(new)
    return sum(storage.nbytes() for storage in new.values()) / 2**20


def hold(group, as_view):
    """Take two steps; return the MiB of each kind that this rank holds after forward.

    They are those of the second step, by which DDP and AdamW have made all of theirs.
    """
    torch.manual_seed(0)
    model = GPT(256, CONTEXT_LENGTH, width=256, depth=4)
    options = {"process_group": group, "gradient_as_bucket_view": as_view}
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    buckets = []

    def average(_, bucket):
        buckets.append(bucket.buffer())
        done = dist.all_reduce(
            buckets[-1].div_(group.size()), group=group, async_op=True
        )
        return done.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, average)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    tokens = torch.randint(256, (WINDOWS // group.size(), CONTEXT_LENGTH))
    for _ in range(2):
        kept = []
        buckets.clear()

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = nn.functional.cross_entropy(ddp(tokens), tokens)
        loss.backward()
        optimizer.step()
    weights, seen = list(model.parameters()), set()
    states = [each for state in optimizer.state.values() for each in state.values()]
    return [
        size(weights, seen),
        size([weight.grad for weight in weights], seen),
        size(buckets, seen),
        size(states, seen),
        size(kept, seen),
    ]


def main():
    rank = dist.get_rank()
    if rank == 0:
        print("ranks  weights  gradients  buckets  AdamW  activations")
    for ranks, as_view in ((1, False), (2, False), (4, False), (4, True)):
        group = dist.new_group(range(ranks))
        if rank < ranks:
            held = torch.tensor(hold(group, as_view))
            first = held.clone()
            dist.broadcast(first, 0, group=group)
            assert held.equal(first), "ranks hold different amounts"
            if rank == 0:
                row = "{:9.1f}{:11.1f}{:9.1f}{:7.1f}{:13.1f}".format(*held.tolist())
                note = "  gradient_as_bucket_view=True" if as_view else ""
                print(f"{ranks:5}{row}{note}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
