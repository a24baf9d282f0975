"""Is a data prefetcher on a CUDA stream of its own (Apex's data_prefetcher) worth it?

If a step waits for reading and decoding, use workers; a prefetcher does not help. It
can hide one thing, at the price of another batch's memory: the copy from pinned memory,
which otherwise runs on the GPU between two steps, even with non_blocking=True. Each
step's wait goes to stderr; on a CPU, only the waits without and with workers.

$ torchrun --standalone --nproc-per-node=2 recipes/prefetcher.py
each way yields the same 12 batches in the same order: True
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler


# ---- the lines to copy ---------------------------------------------------------------
def prefetched(loader, device):
    """Yield the batches on the device; copy each one while the one before is used."""
    before, stream = None, torch.cuda.Stream() if device.type == "cuda" else None
    for batch in loader:
        with torch.cuda.stream(stream):  # without effect if it is None
            coming = batch.to(device, non_blocking=True)
            end = stream.record_event() if stream else None
        if before:
            yield wait_for(*before)
        before = coming, end
    if before:
        yield wait_for(*before)


def wait_for(batch, end):
    if end:
        current = torch.cuda.current_stream()
        current.wait_event(end)  # otherwise the step may read a half-copied batch
        batch.record_stream(current)  # or its memory is reused while the step reads it
    return batch


# ---- the proof -----------------------------------------------------------------------
BATCHES, LOCAL_BATCH = 12, 8


def read(indices):
    """Return a batch: image i has the value i everywhere, and takes 5 ms to read."""
    time.sleep(0.005 * len(indices))
    values = torch.tensor(indices, dtype=torch.float32)
    return values.view(-1, 1, 1, 1).repeat(1, 3, 160, 160)


def copied(loader, device):
    return (batch.to(device, non_blocking=True) for batch in loader)


def epoch(batches):
    """Return the images' values, and the milliseconds a step waits (the median)."""
    values, waits, end = [], [], time.perf_counter()
    for batch in batches:
        values += batch[:, 0, 0, 0].tolist()  # waits until the batch is on the device
        waits.append(time.perf_counter() - end)
        time.sleep(0.03)  # a stand-in for a step
        end = time.perf_counter()
    return values, 1000 * statistics.median(waits)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, gpu = dist.get_rank(), device.type == "cuda"
    images = range(BATCHES * LOCAL_BATCH * dist.get_world_size())
    sampler = DistributedSampler(images, shuffle=False)
    ways = {"no workers": (0, False, copied), "workers": (2, False, copied)}
    ways |= {"pinned memory": (2, gpu, copied), "prefetcher": (2, gpu, prefetched)}
    for way, (workers, pinned, batches) in ways.items():
        options = dict(num_workers=workers, pin_memory=pinned, collate_fn=read)
        loader = DataLoader(images, LOCAL_BATCH, sampler=sampler, **options)
        values, waited = epoch(batches(loader, device))
        assert values == list(sampler)
        if rank == 0:
            found = f"{waited:.1f} ms" if gpu or "workers" in way else "no GPU"
            print(f"{way}, a step's wait for its batch: {found}", file=sys.stderr)
    if rank == 0:
        print(f"each way yields the same {BATCHES} batches in the same order: True")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
