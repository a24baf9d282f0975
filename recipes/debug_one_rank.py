"""How do I use pdb with torchrun? With breakpoint(), several ranks read my terminal.

What you type then goes to any one of them, and if only one rank stops, the others run
into the timeout of their next collective. Have all ranks call
`dist.breakpoint(rank=1)`: rank 1 opens pdb, and the others wait for it in a barrier.
The call also sets the timeout of every process group to an hour (`timeout_s`), for the
rest of the run, so a later hang takes that long to fail.

$ torchrun --standalone --nproc-per-node=2 recipes/debug_one_rank.py
step 1: all inputs are finite

!!! ATTENTION !!!

Type 'up' to get to the frame that called dist.breakpoint(rank=1)

> [...]breakpoint()
-> [...]
(Pdb) up
> [...]debug_one_rank.py(80)main()
-> dist.breakpoint(rank=faulty)
(Pdb) p rank, step, samples.isnan().nonzero().tolist()
(1, 2, [[5, 2]])
(Pdb) import time; time.sleep(12)
(Pdb) samples[5, 2] = 0
(Pdb) c
step 2: all inputs are finite
step 3: all inputs are finite
the weights are finite: True
"""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def first_rank_where(condition, device):
    """Return the first rank on which the condition holds, on all ranks; or None.

    Costs an all-reduce, and waits for the device: remove it after the search.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = torch.tensor(rank if condition else world_size, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return None if found == world_size else found.item()


# ---- the proof -----------------------------------------------------------------------
def load(step, device):
    """A stand-in for a data set with a NaN, in step 2 on the last rank."""
    torch.manual_seed(step)
    samples = torch.randn(8, 4)
    if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
        samples[5, 2] = float("nan")
    return samples.to(device)


def main():
    timeout = timedelta(seconds=10)  # less than the session above takes
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in (1, 2, 3):
        samples = load(step, device)
        faulty = first_rank_where(not samples.isfinite().all(), device)
        if faulty is not None:  # on all ranks: those that do not stop must wait in it
            dist.breakpoint(rank=faulty)
        if rank == 0:
            print(f"step {step}: all inputs are finite", flush=True)
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    finite = all(weights.isfinite().all() for weights in model.parameters())
    assert finite  # otherwise the NaN of one rank is in the weights of all
    if rank == 0:
        print(f"the weights are finite: {finite}")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
