"""Fine-tune a pretrained language model on one GPU: python before.py MODEL"""

import argparse
import functools
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

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
        optimizer.zero_grad()
        for inputs, labels in batch:
            loss_sum = get_loss_sum(args, model, inputs, labels, device)
            (loss_sum / tokens).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    return norm


@torch.inference_mode()
def evaluate(args, model, loader, device):
    """Return the loss per token."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    for batch in loader:
        for inputs, labels in batch:
            loss_sum += get_loss_sum(args, model, inputs, labels, device).item()
        tokens += count_labels(batch).item()
    return loss_sum / tokens


def load_model(args, device):
    # Without dtype=, the weights keep the file's bfloat16, in which small updates are
    # rounded away.
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    )
    return model.to(device)


def save_checkpoint(folder, epoch, model, optimizer):
    """Write what is needed to resume after this epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "checkpoint.tmp"
    weights, state = model.state_dict(), optimizer.state_dict()
    torch.save({"epoch": epoch, "model": weights, "optimizer": state}, unfinished)
    unfinished.replace(folder / "checkpoint.pt")


def load_latest(folder, model, optimizer):
    """Load the checkpoint, if there is one; return its epoch, or 0."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    print(f"resumed from {path}")
    return checkpoint["epoch"]


def train(args, model, optimizer, train_loader, val_loader, device):
    """Train from the latest checkpoint on; print a line for each epoch."""
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
    first = 1
    if args.checkpoint_dir:
        first += load_latest(args.checkpoint_dir, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = args.lr  # otherwise that of the checkpoint
    torch.manual_seed(0)
    for epoch in range(first, args.epochs + 1):
        norm = train_one_epoch(args, model, train_loader, optimizer, device)
        if args.checkpoint_dir:
            save_checkpoint(args.checkpoint_dir, epoch, model, optimizer)
        loss = evaluate(args, model, val_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f}, norm of the last gradient {norm:.4f}")


def generate(model, device):
    """Return how the model continues a prompt."""
    model.eval()
    prompt = torch.tensor([[5, 8, 11, 14, 17, 20, 23, 26]], device=device)
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
    if args.batch_size % args.micro_batches:
        parser.error("--batch-size must be divisible by --micro-batches")
    return args


def make_loaders(parser, args):
    """Return the loaders for training and evaluation; parser: for its error()."""
    train_set, val_set = make_dataset(505, seed=1), make_dataset(97, seed=2)
    if len(train_set) < args.batch_size:  # an incomplete batch is dropped
        parser.error(f"--batch-size is more than the {len(train_set)} training samples")
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=functools.partial(collate, micro_batches=args.micro_batches),
    )
    val_loader = DataLoader(
        val_set,
        # More than a micro-batch at a time may not fit.
        batch_size=args.batch_size // args.micro_batches,
        collate_fn=collate,
    )
    return train_loader, val_loader


def main():
    parser = make_parser()
    args = parse_args(parser)
    train_loader, val_loader = make_loaders(parser, args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train(args, model, optimizer, train_loader, val_loader, device)
    print("generated:", generate(model, device))
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
