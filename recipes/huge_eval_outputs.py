"""How do I gather predictions of different lengths, in order, within rank 0's memory?

`all_gather` needs every rank's shape in advance, and puts all outputs on every GPU.
Instead, give rank r the samples r, r + n, r + 2 n and so on, and gather one batch of
outputs per rank at a time on rank 0, over gloo and from CPU memory. Together these
batches hold consecutive samples: rank 0 appends them to a file in order, and drops
them.

$ torchrun --standalone --nproc-per-node=2 recipes/huge_eval_outputs.py
97 outputs, of 0 to 6 rows
rank 0 held at most 16 of them at a time
the file equals one process's outputs, in order: True
"""

import itertools
import math
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

SAMPLES, BATCH = 97, 8


class Boxes(Dataset):
    """Sample i has (5 i) mod 7 boxes of four numbers."""

    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, item):
        index = self.indices[item]
        generator = torch.Generator().manual_seed(index)
        shape = (5 * index % 7, 4)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def outputs(model, device, rank=0, world_size=1):
    """Yield a rank's outputs batch by batch, and the number of rows of each of them."""
    indices = range(rank, SAMPLES, world_size)
    for batch in DataLoader(Boxes(indices), batch_size=BATCH, collate_fn=list):
        # Split later: pickle would send the whole tensor with each of its parts.
        yield model(torch.cat(batch).to(device)).cpu(), [len(boxes) for boxes in batch]


def in_order(batches, group):
    """Gather a batch of each rank; on rank 0, yield the lists of their outputs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nothing = torch.empty(0, 3), []  # a rank without a batch takes part, too
    for _ in range(math.ceil(SAMPLES / (BATCH * world_size))):
        parts = [None] * world_size if rank == 0 else None
        dist.gather_object(next(batches, nothing), parts, dst=0, group=group)
        if rank == 0:
            parts = [values.split(sizes) for values, sizes in parts]
            # The first outputs of all ranks, the second ones, and so on.
            columns = itertools.zip_longest(*parts)
            yield [one for column in columns for one in column if one is not None]


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")  # nccl would need the bytes on the GPU
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64).to(device).requires_grad_(False)
    batches = outputs(model, device, rank, world_size)
    most, lengths = 0, []
    with tempfile.TemporaryFile() as file:
        for ordered in in_order(batches, group):
            most = max(most, len(ordered))
            lengths += map(len, ordered)
            file.write(torch.cat(ordered).numpy().tobytes())
        if rank == 0:
            file.seek(0)  # the proof, which needs it all
            written = torch.frombuffer(bytearray(file.read()), dtype=torch.float64)
            whole, sizes = zip(*outputs(model, device), strict=True)
            assert lengths == sum(sizes, []) and max(lengths) > min(lengths)
            assert (written.view(-1, 3) - torch.cat(whole)).abs().max() < 1e-12
            assert most <= BATCH * world_size
            print(f"{len(lengths)} outputs, of {min(lengths)} to {max(lengths)} rows")
            print(f"rank 0 held at most {most} of them at a time")
            print("the file equals one process's outputs, in order: True")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
