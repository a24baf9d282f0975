"""An all-reduce as a ring, of messages between neighbors.

NCCL and gloo also cut the chunks into pieces, so that a rank sends one while it still
adds another. For small tensors, where the number of messages matters more than the
bytes, NCCL uses trees. The two halves are also collectives by themselves, a
reduce-scatter and an all-gather, of which FSDP is made.
"""

import torch
import torch.distributed as dist


def all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    # Views of the tensor, always n of them: chunk() makes two of four numbers.
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        # Each rank sends the chunk that it received in the step before. In the first
        # half, a chunk grows on its way around the ring. After it, each rank has the
        # whole sum of one chunk, which in the second half is copied around the ring.
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(incoming)
        # If all ranks waited for their neighbor to receive, none would get to receive.
        sending = dist.isend(outgoing, right)
        dist.recv(received, left)
        sending.wait()
        if step < n - 1:
            incoming += received
        else:
            incoming.copy_(received)
