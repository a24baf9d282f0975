"""Does batch norm under DDP use the statistics of the global batch (SyncBatchNorm)?

No: each rank normalizes with the mean and the variance of its own samples, so training
depends on the number of processes. On GPUs, let torch convert the model before DDP
wraps it: `nn.SyncBatchNorm` adds up the statistics of all ranks, at the cost of a
collective per layer in the forward pass and one in backward. It refuses to run on CPUs,
so there this program does by hand what it does, in float64. It is worth its cost if the
local batch is small.

$ torchrun --standalone --nproc-per-node=2 recipes/sync_batchnorm.py
batch norm per rank: equal to one process with the global batch: False
batch norm over all ranks: equal to one process with the global batch: True
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy, for GPUs -----------------------------------------------------
def synchronize_and_wrap(model):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # before DDP
    return DistributedDataParallel(model)


# ---- the same by hand ----------------------------------------------------------------
class Sum(torch.autograd.Function):
    """The sum of a tensor over all ranks; the gradient is summed in the same way."""

    @staticmethod
    def forward(_context, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)  # every rank's loss depends on every rank's samples
        return gradient


class BatchNormOfAllRanks(nn.BatchNorm1d):
    """Batch norm over the samples of all ranks; each may have any number of them."""

    def forward(self, inputs):
        if not self.training:
            return super().forward(inputs)
        count = inputs.new_tensor([len(inputs)])
        sums = Sum.apply(torch.cat([inputs.sum(0), count]))
        count = sums[-1]
        mean = sums[:-1] / count
        variance = Sum.apply((inputs - mean).square().sum(0)) / count
        with torch.no_grad():
            unbiased = variance * count / (count - 1)
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        normalized = (inputs - mean) / (variance + self.eps).sqrt()
        return normalized * self.weight + self.bias


# ---- the proof -----------------------------------------------------------------------
def make_model(batch_norm):
    """Return a model, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), batch_norm(16), nn.SiLU(), nn.Linear(16, 1))


def train(called, model, first, every):
    """Train on samples first, first + every, ...; return weights and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(20):
        torch.manual_seed(step)
        inputs = torch.randn(24, 8)[first::every]
        targets = inputs.sum(1, keepdim=True).sin()
        optimizer.zero_grad()
        nn.functional.mse_loss(called(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def largest_difference(state, other):
    return max((state[name] - other[name]).abs().max().item() for name in state)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(nn.BatchNorm1d)
    expected = train(model, model, 0, 1)
    kinds = {"per rank": nn.BatchNorm1d, "over all ranks": BatchNormOfAllRanks}
    for name, batch_norm in kinds.items():
        model = make_model(batch_norm)
        trained = train(DistributedDataParallel(model), model, rank, world_size)
        equal = largest_difference(trained, expected) < 1e-10
        assert equal == (world_size == 1 or batch_norm is BatchNormOfAllRanks)
        if rank == 0:
            text = "equal to one process with the global batch"
            print(f"batch norm {name}: {text}: {equal}", flush=True)
    if device.type == "cuda":  # torch's own
        wrapped = synchronize_and_wrap(make_model(nn.BatchNorm1d))
        trained = train(wrapped, wrapped.module, rank, world_size)
        assert largest_difference(trained, expected) < 1e-10


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
