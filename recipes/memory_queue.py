"""A buffer that every rank writes (MoCo's queue, a memory bank): who keeps what?

Before each forward pass of the training DDP copies rank 0's buffers to all ranks. What
the other ranks have written is lost, and there is no error. Let all ranks write the
same: gather what is written, in the order of the global batch. It needs no gradient,
unlike the embeddings that contrastive_loss.py gathers. A queue then moves on by the
global batch in each step, so its length has to be divisible by that.

$ torchrun --standalone --nproc-per-node=2 recipes/memory_queue.py
rows of all ranks: weights and queue of one process: True
own rows: weights and queue of one process: False
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
@torch.no_grad()
def from_all_ranks(rows):
    """Return the rows of all ranks, [N * B, ...], in the order of the global batch.

    rows: [B, ...], with the same B on all ranks. Rank r has the samples r, r + N,
    r + 2 N ... of the batch, as a DistributedSampler deals them out.
    """
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.stack(parts, 1).flatten(0, 1)


class Queue(nn.Module):
    """The last `length` rows that were written."""

    def __init__(self, length, width):
        super().__init__()
        self.register_buffer("rows", torch.zeros(length, width))
        self.register_buffer("written", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def write(self, rows):
        at = (self.written + torch.arange(len(rows), device=rows.device)) % len(
            self.rows
        )
        self.rows[at] = rows
        self.written += len(rows)


# ---- the proof -----------------------------------------------------------------------
LENGTH, BATCH, WIDTH = 48, 12, 4


class Contrast(nn.Module):
    """Tells a sample's two views from the keys of earlier samples."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, WIDTH))
        self.queue = Queue(LENGTH, WIDTH)

    def forward(self, view, other_view):
        """Return logits, [B, 1 + LENGTH], of which the first is right; and the keys."""
        queries, keys = self.encoder(view), self.encoder(other_view).detach()
        same = (queries * keys).sum(1, keepdim=True)
        return torch.cat([same, queries @ self.queue.rows.clone().T], 1), keys


def alone(model):
    return model


def train(wrap, gather, device, rank, world_size):
    """Train; return the weights and the queue as one tensor."""
    torch.manual_seed(0)
    model = Contrast().to(device)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(10):
        generator = torch.Generator().manual_seed(number)
        views = torch.randn(BATCH, 2, 8, generator=generator)[rank::world_size]
        logits, keys = wrapped(*views.to(device).unbind(1))
        first = torch.zeros(len(keys), dtype=torch.long, device=device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, first).backward()
        optimizer.step()
        model.queue.write(gather(keys))
    return torch.cat(
        [tensor.double().flatten() for tensor in model.state_dict().values()]
    )


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = train(alone, torch.clone, device, 0, 1)
    for name, gather in {
        "rows of all ranks": from_all_ranks,
        "own rows": torch.clone,
    }.items():
        found = train(DistributedDataParallel, gather, device, rank, world_size)
        equal = (found - expected).abs().max().item() < 1e-10
        assert equal == (gather is from_all_ranks or world_size == 1)
        if rank == 0:
            print(f"{name}: weights and queue of one process: {equal}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
