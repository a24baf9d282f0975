"""Train in N processes: torchrun --standalone --nproc-per-node=N after.py"""

import argparse
import gc
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset
from torch.utils.data import TensorDataset


def make_dataset(size, seed):
    """Return random points, each labeled with the ring around the origin it is in."""
    points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    labels = points.norm(dim=1).div(0.7).long().clamp(max=3)
    return TensorDataset(points, labels)


def train_one_epoch(model, loader, optimizer, device, noise):
    model.train()
    for points, labels in loader:
        points, labels = points.to(device), labels.to(device)
        points = points + noise * torch.randn_like(points)  # data augmentation
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss_sum, correct, seen = 0.0, 0, 0
    for points, labels in loader:
        points, labels = points.to(device), labels.to(device)
        output = model(points)
        loss_sum += nn.functional.cross_entropy(output, labels, reduction="sum").item()
        correct += (output.argmax(dim=1) == labels).sum().item()
        seen += len(labels)
    # Otherwise rank 0 prints its own shard's metrics. Counts add up; averages do not.
    sums = torch.tensor([loss_sum, correct, seen], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    loss_sum, correct, seen = sums.tolist()
    return loss_sum / seen, correct / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=0.02)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:  # otherwise KeyError: 'LOCAL_RANK'
        parser.error("run this script with torchrun --standalone --nproc-per-node=N")
    # torchrun sets these: LOCAL_RANK counts on this machine, RANK over all machines.
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:  # otherwise the global batch shrinks silently
        parser.error(f"--batch-size must be divisible by the world size ({world_size})")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)  # otherwise all ranks share GPU 0
        torch.cuda.set_device(device)  # otherwise each rank takes memory there, too
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")  # NCCL is for GPUs only

    train_set, val_set = make_dataset(3007, seed=1), make_dataset(1001, seed=2)
    # The global batch stays --batch-size samples, so --lr stays, too. With all of
    # args.batch_size on every rank, the learning rate would have to be tuned again.
    local_batch_size = args.batch_size // world_size
    # Otherwise every rank trains on all samples. The sampler shuffles, so shuffle=True
    # has to go: with both, DataLoader raises ValueError. Without drop_last, the sampler
    # repeats samples, and a short last batch weighs as much as a full one.
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(
        train_set, batch_size=local_batch_size, sampler=sampler, drop_last=True
    )
    # Not a DistributedSampler: it repeats samples, which would then count twice.
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_set, batch_size=args.batch_size)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 4)).to(device)
    if rank > 0:  # otherwise every rank draws the same noise; rank 0's stays as it was
        torch.manual_seed(rank)
    # Otherwise every rank trains alone. `model` stays bare, so that the names of the
    # saved weights do not begin with "module.".
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        train_one_epoch(ddp_model, train_loader, optimizer, device, args.noise)
        loss, accuracy = evaluate(model, val_loader, device)
        if rank == 0:  # otherwise every rank prints
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}")
    if rank == 0:  # otherwise all ranks write one file at the same time
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
