"""How do I gather predictions of different lengths, in order, within rank 0's memory?

Give rank r the samples r, r + n, r + 2 n and so on. If each sample has one row, such as
its logits, and the rows of all samples fit on one device, every rank writes its rows
into a tensor of zeros, and one `reduce` adds them up on rank 0 (`all_reduce`: on all
ranks, for an index that all of them search, say). If they do not fit, or the lengths
differ, every rank writes a file, and rank 0 reads the files in turn. Opened with
`mmap=True`, they stay on the disk until a row is read. On several machines the files
have to be in a folder that all of them share.

$ torchrun --standalone --nproc-per-node=2 recipes/huge_eval_outputs.py
97 rows of logits, gathered in order: equal to one process's
97 outputs of 0 to 6 rows, merged from 2 files, in order: equal to one process's
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


# ---- the lines to copy: a row per sample, all of them fit ----------------------------
def gather_rows(rows, indices, total):
    """Return [total, columns] on rank 0: the rows of all ranks, in the samples' order.

    rows: this rank's [n, columns]; indices: their samples, a list of n numbers. On the
    other ranks the result means nothing.
    """
    gathered = rows.new_zeros(total, rows.shape[1])
    gathered[indices] = rows  # on all other ranks, these rows are zero
    dist.reduce(gathered, dst=0)
    return gathered


# ---- the lines to copy: any lengths, more than memory holds --------------------------
def save_outputs(outputs, folder, rank):
    """Write this rank's outputs, a list of [length, columns]; wait for all ranks."""
    lengths = [len(output) for output in outputs]
    file = {"rows": torch.cat(outputs).cpu(), "lengths": lengths}
    torch.save(file, Path(folder, f"rank{rank}.pt"))
    dist.barrier()


def merge_outputs(folder, world_size):
    """Yield the outputs of all samples in order, one at a time."""
    paths = [Path(folder, f"rank{rank}.pt") for rank in range(world_size)]
    files = [torch.load(path, mmap=True) for path in paths]
    parts = [file["rows"].split(file["lengths"]) for file in files]
    for index in range(sum(map(len, parts))):
        yield parts[index % world_size][index // world_size]


# ---- the proof -----------------------------------------------------------------------
SAMPLES = 97


def boxes(index):
    """Return sample `index`, which has (5 index) mod 7 boxes of four numbers."""
    generator = torch.Generator().manual_seed(index)
    shape = (5 * index % 7, 4)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64).to(device).requires_grad_(False)
    indices = list(range(rank, SAMPLES, world_size))
    outputs = [model(boxes(index).to(device)) for index in indices]
    expected = [model(boxes(index).to(device)) for index in range(SAMPLES)]

    logits = torch.stack([output.sum(0) for output in outputs])
    gathered = gather_rows(logits, indices, SAMPLES)
    if rank == 0:
        assert torch.equal(gathered, torch.stack([one.sum(0) for one in expected]))
        print(f"{SAMPLES} rows of logits, gathered in order: equal to one process's")

    temporary = tempfile.TemporaryDirectory()
    folder = [temporary.name]  # rank 0's on all ranks
    dist.broadcast_object_list(folder, src=0)
    save_outputs(outputs, folder[0], rank)
    if rank == 0:
        merged = list(merge_outputs(folder[0], world_size))
        for ours, theirs in zip(merged, expected, strict=True):
            assert torch.equal(ours, theirs.cpu())
        lengths = [len(output) for output in merged]
        print(
            f"{len(merged)} outputs of {min(lengths)} to {max(lengths)} rows, merged"
            f" from {world_size} files, in order: equal to one process's"
        )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
