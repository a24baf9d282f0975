"""Two ways to average a gradient, by hand, and what they send: via rank 0, and a ring.

torchrun --standalone --nproc-per-node=4 03_ddp_launch/demos/ring.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
sent = 0  # bytes that this rank has sent


def send(tensor, to):
    """Begin to send a tensor to a rank, and count its bytes."""
    global sent
    sent += tensor.nbytes
    return dist.isend(tensor, to)


def sum_on_rank_0(gradient):
    """All ranks send to rank 0, which adds up and sends the sum to all."""
    if rank > 0:
        send(gradient, to=0).wait()
        dist.recv(gradient, src=0)
        return
    for other in range(1, n):
        received = torch.empty_like(gradient)
        dist.recv(received, src=other)
        gradient += received
    for other in range(1, n):
        send(gradient, to=other).wait()


def ring_all_reduce(gradient):
    """Each rank sends to its right neighbor only, one of n chunks at a time."""
    chunks = gradient.chunk(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(2 * (n - 1)):
        # In the first half a chunk grows on its way around the ring; after it, each
        # rank has the whole sum of one chunk, which is then copied around the ring.
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(incoming)
        pending = send(outgoing, to=right)
        dist.recv(received, src=left)
        pending.wait()
        incoming.copy_(incoming + received if step < n - 1 else received)


for way in (sum_on_rank_0, ring_all_reduce):
    gradient = torch.full((1_000_000,), rank + 1.0)  # 4 MB
    wanted = gradient.clone()
    dist.all_reduce(wanted)
    sent = 0
    way(gradient)
    assert torch.equal(gradient, wanted)
    counts = [None] * n
    dist.all_gather_object(counts, sent / 1e6)
    if rank == 0:
        print(f"{way.__name__:15} MB sent by rank 0, 1, ...:", *counts, flush=True)
dist.destroy_process_group()
