"""Train with DDP: torchrun --standalone --nproc-per-node=N ddp.py"""

import argparse
import contextlib
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


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train_one_epoch(args, model, loader, optimizer, device):
    """Train on micro-batches; return the norm of the last gradient."""
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        parts = [tensor.to(device).chunk(args.micro_batches) for tensor in batch]
        for number, (points, labels) in enumerate(zip(*parts, strict=True), start=1):
            points = points + args.noise * torch.randn_like(points)  # augmentation
            last = number == len(parts[0])
            sync = contextlib.nullcontext() if last else model.no_sync()
            with sync, torch.autocast(device.type, torch.bfloat16, args.bf16):
                loss = nn.functional.cross_entropy(model(points), labels)
            (loss * len(labels) / len(batch[1])).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    return norm


@torch.inference_mode()
def evaluate(args, model, loader, device):
    model.eval()
    loss_sum, correct, seen = 0.0, 0, 0
    for points, labels in loader:
        points, labels = points.to(device), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, args.bf16):
            output = model(points)
            loss = nn.functional.cross_entropy(output, labels, reduction="sum")
        loss_sum += loss.item()
        correct += (output.argmax(dim=1) == labels).sum().item()
        seen += len(labels)
    sums = torch.tensor([loss_sum, correct, seen], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    loss_sum, correct, seen = sums.tolist()
    return loss_sum / seen, correct / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:  # otherwise the global batch shrinks silently
        parser.error(f"--batch-size must be divisible by the world size ({world_size})")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    train_set, val_set = make_dataset(3007, seed=1), make_dataset(961, seed=2)
    sampler = DistributedSampler(train_set, drop_last=True)
    local_batch_size = args.batch_size // world_size
    train_loader = DataLoader(
        train_set, batch_size=local_batch_size, sampler=sampler, drop_last=True
    )
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_set, batch_size=args.batch_size)

    torch.manual_seed(rank)  # augmentation noise of its own for every rank
    model = Classifier().to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        norm = train_one_epoch(args, ddp_model, train_loader, optimizer, device)
        loss, accuracy = evaluate(args, model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}", end=", ")
            print(f"norm of the last gradient {norm:.4f}")
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
