"""Early stopping with DDP hangs: how do all ranks stop in the same epoch?

If each rank decides from its own validation shard's loss, one rank stops, and the
others wait in their next collective until the timeout: gloo then raises "Timed out
waiting", and nccl's watchdog ends the process ("Watchdog caught collective operation
timeout"). With gloo they get "Connection closed by peer" if the process that stopped
ends before that. Base the decision on a number that all ranks share, such as an
all-reduced loss. If ranks may disagree, as about the time left, or if only rank 0 has
the number, broadcast rank 0's decision.

$ torchrun --standalone --nproc-per-node=2 recipes/early_stopping.py
by_all_shards: ended in epochs [6, 6], timed out: [False, False]
as_rank_0_says: ended in epochs [5, 5], timed out: [False, False]
by_own_shard: ended in epochs [5, 6], timed out: [False, True]
"""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


# ---- the lines to copy ---------------------------------------------------------------
class Patience:
    """Reports when a loss has not improved for two epochs."""

    def __init__(self):
        self.best, self.epochs = float("inf"), 0

    def is_over(self, loss):
        self.epochs = 0 if loss < self.best else self.epochs + 1
        self.best = min(self.best, loss)
        return self.epochs == 2


def by_all_shards(patience, sums):
    dist.all_reduce(sums)  # the sum of the losses, and the number of samples
    return patience.is_over((sums[0] / sums[1]).item())


def as_rank_0_says(patience, sums):
    stop = torch.tensor([patience.is_over((sums[0] / sums[1]).item())])
    stop = stop.to(sums.device, torch.int32)
    dist.broadcast(stop, src=0)
    return bool(stop)


# ---- the proof -----------------------------------------------------------------------
def by_own_shard(patience, sums):
    return patience.is_over((sums[0] / sums[1]).item())


def validate(epoch, device):
    """A stand-in for evaluation: on rank r, the loss is lowest in epoch 3 + 2 r."""
    loss = 1 + (epoch - 3 - 2 * dist.get_rank()) ** 2
    return torch.tensor([100 * loss, 100], dtype=torch.float64, device=device)


def train(should_stop, device, group):
    """Train until `should_stop`; return the last epoch, and whether it timed out."""
    model = nn.Linear(1, 1)
    # CPU and gloo, where a timeout is an exception; nccl's watchdog ends the process.
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    patience = Patience()
    for epoch in range(1, 21):
        try:
            wrapped(torch.ones(1, 1)).sum().backward()
        except RuntimeError as error:
            words = ("timed out", "timeout", "by peer")  # closed by one that timed out
            assert any(word in str(error).lower() for word in words)
            return epoch, True
        if should_stop(patience, validate(epoch, device)):
            break
    return epoch, False


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=8))
    everybody = [None] * dist.get_world_size()
    for should_stop in (by_all_shards, as_rank_0_says, by_own_shard):
        dist.all_gather_object(everybody, train(should_stop, device, group))
        epochs, timed_out = map(list, zip(*everybody, strict=True))
        if dist.get_rank() == 0:
            print(f"{should_stop.__name__}: ended in epochs {epochs},", end=" ")
            print(f"timed out: {timed_out}", flush=True)
        apart = should_stop is by_own_shard and len(everybody) > 1
        assert (len(set(epochs)) > 1) == any(timed_out) == apart


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
