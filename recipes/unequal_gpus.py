"""One GPU is faster: how do I give the ranks batches of different sizes (20 and 40)?

DDP divides the sum of the gradients by the number of ranks, so the mean loss of a rank
with 20 samples weighs as much as that of a rank with 40: a sample of the first then
counts twice as much. Multiply each rank's mean loss by its number of samples times the
number of ranks, divided by the global batch. The gradient is then the one of a single
process with all 60 samples. Cut each global batch into shares, for instance with a
batch sampler as below; every rank needs the same number of batches. With class weights
it is not the samples that count: see class_weights.py.

$ torchrun --standalone --nproc-per-node=2 recipes/unequal_gpus.py
samples per rank and step: [20, 40]
weighted: equal to one process with 60 samples: True
not weighted: equal to one process with 60 samples: False
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset


# ---- the lines to copy ---------------------------------------------------------------
def weighted(loss, local_batch_size, global_batch_size):
    """Return a mean loss such that DDP's average is the mean over all samples."""
    return loss * local_batch_size * dist.get_world_size() / global_batch_size


class SharesOfBatches:
    """A batch sampler: this rank's share of each global batch, shuffled by epoch.

    sizes: the samples of each rank per step. The last incomplete batch is dropped.
    """

    def __init__(self, samples, sizes, rank, seed=0):
        self.samples, self.sizes, self.rank, self.seed = samples, sizes, rank, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.samples // sum(self.sizes)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        first = sum(self.sizes[: self.rank])
        for step in range(len(self)):
            begin = step * sum(self.sizes) + first
            yield order[begin : begin + self.sizes[self.rank]]


# ---- the proof -----------------------------------------------------------------------
def train(wrap, sizes, rank, device, weight):
    """Train for two epochs; return all weights as one tensor."""
    torch.manual_seed(0)
    inputs = torch.randn(640, 8, dtype=torch.float64)
    data_set = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)).double()
    model.to(device)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = SharesOfBatches(len(data_set), sizes, rank)
    loader = DataLoader(data_set, batch_sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = wrapped(inputs.to(device))
            loss = nn.functional.mse_loss(outputs, targets.to(device))
            if weight:
                loss = weighted(loss, len(inputs), sum(sizes))
            loss.backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [20 if rank % 2 == 0 else 40 for rank in range(world_size)]
    total = sum(sizes)
    expected = train(nn.Sequential, [total], 0, device, weight=False)
    if rank == 0:
        print(f"samples per rank and step: {sizes}")
    for name, weight in {"weighted": True, "not weighted": False}.items():
        trained = train(DistributedDataParallel, sizes, rank, device, weight)
        equal = (trained - expected).abs().max().item() < 1e-10
        assert equal == (weight or world_size == 1)
        if rank == 0:
            text = f"equal to one process with {total} samples"
            print(f"{name}: {text}: {equal}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
