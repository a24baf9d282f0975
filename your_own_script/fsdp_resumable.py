"""Train with FSDP2: torchrun --standalone --nproc-per-node=N fsdp_resumable.py"""

import argparse
import gc
import os
import shutil
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
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
            # In place of DDP's no_sync(). The setting stays until it is changed.
            model.set_requires_gradient_sync(last)
            with torch.autocast(device.type, torch.bfloat16, args.bf16):
                loss = nn.functional.cross_entropy(model(points), labels)
            (loss * len(labels) / len(batch[1])).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    # All ranks have to call full_tensor(): the norm is a DTensor, and otherwise
    # f"{norm:.4f}" raises a TypeError.
    return norm.full_tensor()


@torch.no_grad()  # inference_mode before the first step makes that step fail
def evaluate(args, model, loader, device):
    model.eval()
    loss_sum, correct, seen = 0.0, 0, 0
    # The same number of forward passes on every rank, some on an empty batch: otherwise
    # a rank with one batch more waits for the others' shards until the timeout.
    most = torch.tensor(len(loader), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    empty = torch.empty(0, 2), torch.empty(0, dtype=torch.int64)
    batches = iter(loader)
    for _ in range(most.item()):
        points, labels = next(batches, empty)
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


def save_checkpoint(folder, epoch, model, optimizer):
    """Write a checkpoint after an epoch; all ranks call it, with the same arguments."""
    path = folder / f"epoch-{epoch:04}"
    # Renamed when it is complete: otherwise a run that is killed here leaves a folder
    # that cannot be loaded. Overwriting a checkpoint could leave it half old, half new.
    unfinished = folder / f".{path.name}.tmp"
    if dist.get_rank() == 0:  # otherwise shards that a killed save has left stay in it
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()  # otherwise rank 0 can remove the new folder, too
    weights, state = get_state_dict(model, optimizer)
    # Each rank writes its own shards, and rank 0 writes .metadata after all of them.
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(path)


def load_latest(folder, model, optimizer):
    """Load the latest checkpoint, of any number of ranks; return its epoch, or 0."""
    found = [max(folder.glob("epoch-*"), default=None)]
    # Rank 0's: otherwise the ranks could resume from different epochs.
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    # dcp.load fills the tensors that it is given. get_state_dict makes those of a new
    # optimizer, if there was no backward pass yet; with optimizer.state_dict() it would
    # load none, and not say so.
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=found[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if dist.get_rank() == 0:
        print(f"resumed from {found[0]}")
    return int(found[0].name.removeprefix("epoch-"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--bf16", action="store_true")
    # On a disk that all nodes see, with nothing else in it.
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if args.checkpoint_dir.is_file():  # otherwise it is found after an epoch
        parser.error(f"--checkpoint-dir: {args.checkpoint_dir} is a file")
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

    # The same on all ranks: DDP copied rank 0's weights to them, and FSDP does not.
    torch.manual_seed(0)
    model = Classifier()  # not .to(device), which may not have room for all of it
    torch.manual_seed(rank)  # augmentation noise of its own for every rank
    mesh = dist.init_device_mesh(device.type, (world_size,))
    options = {"mesh": mesh}
    if args.bf16:  # gather the weights in 16 bits, and average the gradients in 32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    for block in model.blocks:  # otherwise all weights are whole at the same time
        fully_shard(block, **options)
    fully_shard(model, **options)  # the root last: it takes the weights that are left
    # After fully_shard: otherwise it updates tensors that the model no longer uses.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # The optimizer has to exist already: its state is loaded, too.
    first = load_latest(args.checkpoint_dir, model, optimizer) + 1
    for epoch in range(first, args.epochs + 1):
        sampler.set_epoch(epoch)
        # There is no wrapper: the model itself gathers and frees its weights.
        norm = train_one_epoch(args, model, train_loader, optimizer, device)
        loss, accuracy = evaluate(args, model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}", end=", ")
            print(f"norm of the last gradient {norm:.4f}")
        # On all ranks: each has only its shards, and writes only those.
        save_checkpoint(args.checkpoint_dir, epoch, model, optimizer)
    # On all ranks: each has only a shard, and rank 0 alone would wait for the others.
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if rank == 0:
        torch.save(weights, "model.pt")  # whole tensors, which Classifier() can load


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
