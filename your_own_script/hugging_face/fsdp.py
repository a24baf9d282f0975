"""Fine-tune with FSDP2: torchrun --standalone --nproc-per-node=N fsdp.py MODEL

sharded.py has what concerns the shards: copy it with this script.
"""

import argparse
import functools
import gc
import json
import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM

from sharded import ModelError
from sharded import allocate
from sharded import gather_weights
from sharded import load_latest
from sharded import load_weights
from sharded import make_model
from sharded import save_checkpoint
from sharded import save_model
from sharded import shard_model

IGNORED = -100  # the label of a position without a loss, also in transformers


def model_folder(text):
    """Return the path of a folder that has all files of a model's weights."""
    folder = Path(text)
    for needed in ("*.safetensors", "config.json"):
        if not list(folder.glob(needed)):
            raise argparse.ArgumentTypeError(f"there is no {needed} in {folder}")
    index = folder / "model.safetensors.index.json"  # of a model in several files
    if index.exists():
        for name in json.loads(index.read_text())["weight_map"].values():
            if not (folder / name).exists():
                text = f"{name} is not in {folder}: is the download complete?"
                raise argparse.ArgumentTypeError(text)
    return folder


def make_dataset(size, seed):
    """Return sequences of 8 to 40 tokens, each counting up by a step of its own."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(size):
        first, step = torch.randint(1, 9, (2,), generator=generator).tolist()
        length = torch.randint(8, 41, (1,), generator=generator).item()
        sequences.append((first + step * torch.arange(length)) % 251)
    return sequences


def collate(sequences, micro_batches=1):
    """Return micro-batches: what the model takes, and the labels, both padded."""
    batch = []
    for start in range(micro_batches):
        part = sequences[start::micro_batches]
        tokens = nn.utils.rnn.pad_sequence(part, batch_first=True)
        # Made from the lengths: a position without a label may still be attended to.
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in part], True)
        inputs = {"input_ids": tokens, "attention_mask": mask}
        labels = tokens.masked_fill(mask == 0, IGNORED)
        # Position t predicts token t + 1, and the last position predicts nothing.
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        batch.append((inputs, labels))
    return batch


def get_loss_sum(args, model, inputs, labels, device):
    """Return the sum of the loss over all positions that have a label."""
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    with torch.autocast(device.type, torch.bfloat16, args.bf16):
        logits = model(**inputs, use_cache=False).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.to(device).flatten(), reduction="sum"
        )


def count_labels(batch):
    return sum((labels != IGNORED).sum() for _, labels in batch)


def train_one_epoch(args, model, loader, optimizer, device):
    """Train on micro-batches; return the norm of the last gradient."""
    model.train()
    for batch in loader:
        # The loss is a mean over the tokens of the whole batch, not of a micro-batch.
        tokens = count_labels(batch).to(device)
        dist.all_reduce(tokens)  # otherwise each rank's mean is over its own tokens
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(batch, start=1):
            # Otherwise every micro-batch sends its gradients. The price of waiting is
            # that each rank holds the gradients of the whole model meanwhile.
            model.set_requires_gradient_sync(number == len(batch))
            loss_sum = get_loss_sum(args, model, inputs, labels, device)
            # FSDP divides the sum of the ranks' gradients by their number: undo that.
            (loss_sum * dist.get_world_size() / tokens).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    return norm.full_tensor()  # on all ranks: the norm is a DTensor


@torch.no_grad()  # inference_mode before the first step makes that step fail
def evaluate(args, model, loader, device):
    """Return the loss per token."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    # The same number of forward passes on every rank: otherwise a rank with one batch
    # more waits for the others' shards until the timeout. What has no labels adds 0.
    most = torch.tensor(len(loader), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    ((inputs, labels),) = collate([loader.dataset[0]])
    empty = [(inputs, torch.full_like(labels, IGNORED))]
    batches = iter(loader)
    for _ in range(most.item()):
        batch = next(batches, empty)
        for inputs, labels in batch:
            loss_sum += get_loss_sum(args, model, inputs, labels, device).item()
        tokens += count_labels(batch).item()
    # Otherwise rank 0 prints the loss of its own shard.
    sums = torch.tensor([loss_sum, tokens], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens


def load_model(args, device, mesh):
    """Return the sharded model."""
    # It has no memory yet, so no rank ever holds it whole.
    model = make_model(args.model, AutoModelForCausalLM, getattr(torch, args.dtype))
    shard_model(model, mesh, args.bf16)
    allocate(model, device)
    load_weights(model, args.model)  # each rank reads its slices of the files
    return model


def train(args, model, optimizer, train_loader, val_loader, device):
    """Train from the latest checkpoint on; print a line for each epoch."""
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
    first = 1
    if args.checkpoint_dir:
        first += load_latest(args.checkpoint_dir, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = args.lr  # otherwise that of the checkpoint
    torch.manual_seed(dist.get_rank())  # otherwise all ranks draw the same dropout
    for epoch in range(first, args.epochs + 1):
        train_loader.sampler.set_epoch(epoch)  # otherwise each has the same order
        norm = train_one_epoch(args, model, train_loader, optimizer, device)
        if args.checkpoint_dir:
            save_checkpoint(args.checkpoint_dir, epoch, model, optimizer)
        loss = evaluate(args, model, val_loader, device)
        if dist.get_rank() == 0:  # otherwise every rank prints
            print(f"epoch {epoch}: loss {loss:.4f}", end=", ")
            print(f"norm of the last gradient {norm:.4f}")


def generate(model, device):
    """Return how the model continues a prompt."""
    model.eval()
    prompt = torch.tensor([[5, 8, 11, 14, 17, 20, 23, 26]], device=device)
    # On all ranks, because each token is a forward pass, which gathers the weights.
    text = model.generate(prompt, max_new_tokens=6, do_sample=False)
    return " ".join(map(str, text[0, prompt.shape[1] :].tolist()))


def make_parser():
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # errors are one line
    parser.add_argument("model", type=model_folder, help="config.json, *.safetensors")
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    dtypes = ("float32", "bfloat16", "float64")
    parser.add_argument("--dtype", choices=dtypes, default="float32")
    parser.add_argument("--activation-checkpointing", action="store_true")
    return parser


def parse_args(parser):
    """Return the flags; a wrong one ends the program with one line and exit code 2."""
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:  # otherwise KeyError: 'LOCAL_RANK'
        parser.error("run this script with torchrun --standalone --nproc-per-node=N")
    shards = int(os.environ["WORLD_SIZE"]) * args.micro_batches
    if args.batch_size % shards:  # otherwise the global batch shrinks silently
        parser.error(
            f"--batch-size must be divisible by processes * --micro-batches ({shards})"
        )
    return args


def init_processes():
    """Return the device of this process, and the mesh of all processes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # Otherwise all ranks share GPU 0.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return device, dist.init_device_mesh(device.type, (dist.get_world_size(),))


def make_loaders(parser, args):
    """Return the loaders for training and evaluation; parser: for its error()."""
    train_set, val_set = make_dataset(505, seed=1), make_dataset(97, seed=2)
    if len(train_set) < args.batch_size:  # an incomplete batch is dropped
        parser.error(f"--batch-size is more than the {len(train_set)} training samples")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if len(val_set) < world_size:  # evaluate needs one on each rank
        parser.error(f"{len(val_set)} samples for {world_size} processes to evaluate")
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // world_size,  # --batch-size is the global batch
        # Otherwise every rank trains on all samples. The sampler shuffles them.
        sampler=DistributedSampler(train_set, drop_last=True),
        drop_last=True,
        collate_fn=functools.partial(collate, micro_batches=args.micro_batches),
    )
    # Not a DistributedSampler: it repeats samples, which would then count twice.
    val_set = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(
        val_set,
        # More than a rank's micro-batch at a time may not fit.
        batch_size=args.batch_size // (world_size * args.micro_batches),
        collate_fn=collate,
    )
    return train_loader, val_loader


def main():
    parser = make_parser()
    args = parse_args(parser)
    device, mesh = init_processes()  # torchrun starts one for each GPU
    train_loader, val_loader = make_loaders(parser, args)
    try:
        model = load_model(args, device, mesh)
    except ModelError as error:  # one line, no traceback
        parser.error(str(error))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train(args, model, optimizer, train_loader, val_loader, device)
    text = generate(model, device)
    weights = gather_weights(model)  # on all ranks: each has a shard
    if dist.get_rank() == 0:
        print("generated:", text)
        save_model(model, weights, args.out)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
