"""Class weights (or ignore_index) with DDP: why do more GPUs train other weights?

With class weights, the mean of `cross_entropy` is not divided by the number of samples
but by the sum of their weights, and with `ignore_index` by the samples that count. Both
differ from rank to rank, and DDP averages the ranks as equals. Take the sum of the
losses, all-reduce the divisor, and multiply by the number of ranks, because DDP divides
by it. For the metrics all-reduce both sums, and then divide. The same holds for every
loss that is divided by something else than the number of samples, a mask's sum say. If
the divisor is clamped, as in max(1, n), clamp the sum of all ranks. Do not evaluate
with `global_mean`, because there the ranks may have different numbers of batches.

$ torchrun --standalone --nproc-per-node=2 recipes/class_weights.py
divided by the divisor of all ranks: equal to one process: True
the mean of each rank: equal to one process: False
validation loss: equal to one process: True
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def sum_and_divisor(outputs, labels, weight, ignored=-100):
    """Return the numerator and the denominator of cross_entropy's mean, not reduced.

    outputs: [B, C]; labels: [B]; weight: [C], on the same device. It may have label
    smoothing, too: the divisor stays the same.
    """
    summed = nn.functional.cross_entropy(
        outputs, labels, weight=weight, ignore_index=ignored, reduction="sum"
    )
    return summed, weight[labels[labels != ignored]].sum()


def global_mean(outputs, labels, weight):
    """Return a loss such that DDP's average is the mean over the samples of all ranks.

    The mean of the global batch, to print it, is the ranks' average of this loss.
    """
    summed, divisor = sum_and_divisor(outputs, labels, weight)
    dist.all_reduce(divisor)
    return summed * dist.get_world_size() / divisor


@torch.no_grad()
def evaluate(model, batches, weight):
    """Return the mean loss over the batches of all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for inputs, labels in batches:
        sums += torch.stack(sum_and_divisor(model(inputs), labels, weight))
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


# ---- the proof -----------------------------------------------------------------------
SAMPLES, GLOBAL_BATCH = 960, 48


def own_mean(outputs, labels, weight):
    return nn.functional.cross_entropy(outputs, labels, weight=weight)


def shards(inputs, labels, rank, world_size):
    """Return this rank's part of each global batch."""
    batches = zip(inputs.split(GLOBAL_BATCH), labels.split(GLOBAL_BATCH), strict=True)
    return [(x[rank::world_size], y[rank::world_size]) for x, y in batches]


def train(wrap, get_loss, batches, weight):
    """Train for an epoch; return the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 3))
    model.to(weight.device)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, labels in batches:
        optimizer.zero_grad()
        get_loss(wrapped(inputs), labels, weight).backward()
        optimizer.step()
    return model


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters())


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
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    labels = inputs[:, :3].argmax(1)
    labels[inputs[:, 3] > 1] = -100  # have no label
    inputs, labels = inputs.to(device), labels.to(device)
    weight = torch.tensor([1.0, 10.0, 0.1], device=device)
    whole, own = shards(inputs, labels, 0, 1), shards(inputs, labels, rank, world_size)
    expected = train(nn.Sequential, own_mean, whole, weight)
    for name, get_loss in {
        "divided by the divisor of all ranks": global_mean,
        "the mean of each rank": own_mean,
    }.items():
        trained = train(DistributedDataParallel, get_loss, own, weight)
        equal = (vector(trained) - vector(expected)).abs().max().item() < 1e-10
        assert equal == (get_loss is global_mean or world_size == 1)
        if rank == 0:
            print(f"{name}: equal to one process: {equal}", flush=True)
    loss = evaluate(expected, own, weight)
    equal = abs(loss - own_mean(expected(inputs), labels, weight).item()) < 1e-10
    assert equal
    if rank == 0:
        print(f"validation loss: equal to one process: {equal}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
