"""An all-reduce as a ring, of messages between neighbors.

You need dist.get_rank, dist.get_world_size, and dist.isend, dist.irecv, dist.send and
dist.recv, each of which carries one tensor from one rank to another. The first two
only begin it, and return an object with wait(). The other two return when it is done,
for which the other rank has to make its call as well. No collective is called.
"""


def all_reduce(tensor):
    """Replace the tensor of each rank by the sum over all n ranks, in place.

    tensor: contiguous, of any shape and with at least n numbers; on each rank of the
    same shape. The number of its numbers need not be divisible by n.

    Rank r sends to rank r + 1 only, and the last rank to rank 0: 2 (n - 1) messages.
    Each is one of the n chunks of the tensor, whose sizes differ by one number at most,
    and so a rank sends about 2 (n - 1) / n times the bytes of the tensor. Call wait()
    of each message, because until then its numbers may not have been read. All ranks
    send at the same time: each begins to send before it waits for what it receives.
    """
    raise NotImplementedError
