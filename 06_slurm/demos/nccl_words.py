"""What nccl says when something is wrong, on two ranks; KIND is one of the functions.

torchrun --standalone --nproc-per-node=2 06_slurm/demos/nccl_words.py KIND
bash recipes/nccl_on_one_gpu.sh 2 06_slurm/demos/nccl_words.py KIND

Without GPUs gloo speaks instead, where the kind exists for it. The traces that
when_it_hangs.ipynb quotes name lines 40 and 67.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else "cpu"
RANK = int(os.environ["RANK"])
SECONDS = 15  # of the timeout


def join(lazily=False):
    """Join the group; lazily: nccl connects in the first collective."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl" if CUDA else "gloo",
        timeout=timedelta(seconds=SECONDS),
        device_id=DEVICE if CUDA and not lazily else None,
    )


def reduce(elements=1000):
    """All-reduce a tensor of ones, and wait for its first element."""
    tensor = torch.ones(elements, device=DEVICE)
    dist.all_reduce(tensor)
    return tensor[0].item()


def missing():
    """Rank 1 never makes the second call."""
    join()
    print("sum", reduce(), flush=True)
    if RANK == 1:
        time.sleep(3600)
    reduce(2000)


def missing_at_first():
    """Rank 0 is late for the first collective, in which nccl connects."""
    join(lazily=True)
    if RANK == 0:
        time.sleep(3600)
    reduce()


def different():
    """Rank 0 broadcasts; rank 1 all-reduces."""
    join()
    reduce()
    tensor = torch.ones(500, device=DEVICE)
    if RANK == 0:
        dist.broadcast(tensor, src=0)
    else:
        dist.all_reduce(tensor)
    print("the call has returned:", tensor[0].item(), flush=True)
    reduce()
    print("the next one, too", flush=True)


def killed():
    """Rank 1 is killed; rank 0 waits for it."""
    join()
    reduce()
    if RANK == 1:
        os.kill(os.getpid(), 9)
    reduce()


def raises():
    """Rank 1 raises an exception; rank 0 waits for it."""
    join()
    reduce()
    if RANK == 1:
        raise RuntimeError("rank 1 failed")
    reduce()


def nan_label():
    """A label on rank 1 is out of range."""
    join()
    outputs = torch.randn(4, 10, device=DEVICE)
    labels = torch.tensor([1, 2, 3, 10 if RANK else 4], device=DEVICE)
    print(nn.functional.cross_entropy(outputs, labels).item(), flush=True)
    reduce()


def memory():
    """Rank 1 asks for more memory than its GPU has; rank 0 waits for it."""
    join()
    model = DistributedDataParallel(nn.Linear(1000, 1000, device=DEVICE))
    rows = 10**9 if RANK == 1 else 10
    model(torch.ones(rows, 1000, device=DEVICE)).sum().backward()
    print("one step", flush=True)


def cpu_tensor():
    """The tensor is in the CPU's memory."""
    join()
    dist.all_reduce(torch.ones(1))


def sparse():
    """An embedding with sparse gradients under DDP."""
    join()
    model = DistributedDataParallel(nn.Embedding(8, 4, sparse=True, device=DEVICE))
    model(torch.tensor([RANK], device=DEVICE)).sum().backward()


def no_device():
    """Nothing says which GPU belongs to the rank; then a barrier."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl" if CUDA else "gloo", timeout=timedelta(seconds=SECONDS)
    )
    dist.barrier()
    print("the barrier has returned", flush=True)


KINDS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == "__main__"
    and name not in ("join", "reduce")
}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in KINDS:
        KINDS[sys.argv[1]]()
    else:
        sys.stderr.write(f"nccl_words.py: error: KIND is one of {' '.join(KINDS)}\n")
        sys.exit(2)
