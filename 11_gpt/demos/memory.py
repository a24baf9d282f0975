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

from common.gpt import GPT

VOCABULARY, WIDTH, DEPTH = 4096, 192, 4
WINDOWS, CONTEXT_LENGTH = 8, 32  # of the global batch
COLUMNS = ("weights", "gradients", "buckets", "AdamW", "copies", "activations")
COLUMNS += ("logits",)
# ranks, autocast to bfloat16, gradient_as_bucket_view
CASES = [(1, False, False), (2, False, False), (4, False, False)]
CASES += [(4, False, True), (4, True, False)]


def new_storages(tensors, seen):
    """Return the storages of tensors, each once and without those in `seen`."""
    found = {each.untyped_storage().data_ptr(): each for each in tensors}
    found = {address: found[address] for address in found.keys() - seen.keys()}
    seen.update(found)
    return found.values()


def size(tensors, seen):
    """Return the MiB of memory of tensors, leaving out what is in `seen` already."""
    storages = [each.untyped_storage() for each in new_storages(tensors, seen)]
    return sum(storage.nbytes() for storage in storages) / 2**20


def hold(group, amp, as_view):
    """Take two steps; return the MiB of each kind that this rank holds after forward.

    They are those of the second step, by which DDP and AdamW have made all of theirs.
    """
    torch.manual_seed(0)
    model = GPT(VOCABULARY, CONTEXT_LENGTH, WIDTH, DEPTH)
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
    tokens = torch.randint(VOCABULARY, (WINDOWS // group.size(), CONTEXT_LENGTH))
    for _ in range(2):
        kept = []
        buckets.clear()

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=amp),
        ):
            logits = ddp(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
    weights, seen = list(model.parameters()), {}
    states = [each for state in optimizer.state.values() for each in state.values()]
    held = [size(weights, seen), size([weight.grad for weight in weights], seen)]
    held += [size(buckets, seen), size(states, seen)]
    # What autograd keeps from forward to backward: autocast's 16-bit copies of weights,
    # the logits and their log-softmax, and the activations of the blocks.
    matrices = {weight.shape for weight in weights if weight.dim() == 2}
    matrices |= {shape[::-1] for shape in matrices}  # as a product uses them
    outputs = [each for each in kept if each.numel() == logits.numel()] + [logits]
    copies = [each for each in kept if each.shape in matrices]
    held += [size(copies, seen), size(outputs, seen)]
    held.insert(5, size(kept, seen))
    return held


def main():
    rank = dist.get_rank()
    if rank == 0:
        print("ranks", *COLUMNS, sep="  ")
    for ranks, amp, as_view in CASES:
        group = dist.new_group(range(ranks))
        if rank < ranks:
            held = torch.tensor(hold(group, amp, as_view))
            first = held.clone()
            dist.broadcast(first, 0, group=group)
            assert held.equal(first), "ranks hold different amounts"
            if rank == 0:
                cells = zip(held.tolist(), COLUMNS, strict=True)
                row = "".join(f"{mib:{len(name) + 2}.1f}" for mib, name in cells)
                note = "  gradient_as_bucket_view=True" if as_view else ""
                note = "  autocast to bfloat16" if amp else note
                print(f"{ranks:5}{row}{note}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
