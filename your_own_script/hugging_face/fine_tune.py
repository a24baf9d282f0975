"""Fine-tune a model: torchrun --standalone --nproc-per-node=N fine_tune.py MODEL

MODEL is a folder with config.json and *.safetensors, of a causal language model.
sharded.py has what concerns the shards: copy it with this script.
"""

import argparse
import functools
import gc
import importlib.util
import json
import math
import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM
from transformers import AutoTokenizer

import sharded

IGNORED = -100  # the label of a position without a loss, also in transformers


# ---- flags and processes -------------------------------------------------------------
def model_folder(text):
    """Return the path of a folder that has a model."""
    for needed in ("*.safetensors", "config.json"):
        if not list(Path(text).glob(needed)):
            raise argparse.ArgumentTypeError(f"there is no {needed} in {text}")
    return Path(text)


def make_parser():
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # errors are one line
    add = parser.add_argument
    add("model", type=model_folder)
    add("--data", type=Path, help="JSON lines with text or messages; default: a toy")
    add("--val-data", type=Path, help="the same, for the evaluation")
    add("--length", type=int, default=1024, help="the most tokens of a sample")
    add("--lora-rank", type=int, default=0, help="train adapters alone, by peft")
    add("--rank-0-reads", action="store_true", help="if names in the files differ")
    add("--out", type=Path, default=Path("tuned"))
    add("--checkpoint-dir", type=Path)
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=24, help="of all processes together")
    add("--micro-batches", type=int, default=2)
    add("--lr", type=float, default=3e-3)
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    add("--activation-checkpointing", action="store_true")
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
    if bool(args.data) != bool(args.val_data):
        parser.error("--data and --val-data go together")
    if args.lora_rank and importlib.util.find_spec("peft") is None:
        parser.error("--lora-rank needs the package peft: pip install peft")
    if args.lora_rank and args.rank_0_reads:
        parser.error("--lora-rank does not go with --rank-0-reads")
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


# ---- data ----------------------------------------------------------------------------
def make_dataset(size, seed):
    """Return a toy: sequences of 8 to 40 tokens, each counting up by its own step."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(size):
        first, step = torch.randint(1, 9, (2,), generator=generator).tolist()
        length = torch.randint(8, 41, (1,), generator=generator).item()
        samples.append((first + step * torch.arange(length)) % 251)
    return samples


def read_dataset(path, tokenizer, length):
    """Return samples of a file: [tokens, 2], a token and its label, at most `length`.

    A line is {"text": "..."}, which is cut, or {"messages": [...]}, of which the last
    answer has labels; what is longer is left out. Raises ValueError for another line.
    """
    chat = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    samples = []
    for number, line in enumerate(path.open(), start=1):
        try:
            text, messages = map(json.loads(line).get, ("text", "messages"))
            if messages:
                tokens = chat(messages)
                prompt = chat(messages[:-1], add_generation_prompt=True)
                if tokens[: len(prompt)] != prompt:
                    raise ValueError("the answer does not continue the prompt")
                labels = [IGNORED] * len(prompt) + tokens[len(prompt) :]
            else:  # most tokenizers do not add the end, without which nothing stops
                tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id][:length]
                labels = tokens
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if len(tokens) <= length:
            samples.append(torch.tensor([tokens, labels]).T)
    return samples


def collate(samples, micro_batches=1):
    """Return micro-batches: what the model takes, and the labels, both padded.

    samples: [tokens, 2], or [tokens], which are their own labels.
    """
    pad, batch = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True), []
    pairs = [each.unbind(1) if each.dim() == 2 else (each, each) for each in samples]
    for start in range(micro_batches):
        tokens, labels = zip(*pairs[start::micro_batches], strict=True)
        # Made from the lengths: a position without a label may still be attended to.
        mask = pad([torch.ones_like(each) for each in tokens])
        inputs = {"input_ids": pad(tokens), "attention_mask": mask}
        labels = pad(labels, padding_value=IGNORED)
        # Position t predicts token t + 1, and the last position predicts nothing.
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        batch.append((inputs, labels))
    return batch


def make_loaders(parser, args):
    """Return the loaders for training and evaluation; parser: for its error()."""
    train_set, val_set = make_dataset(505, seed=1), make_dataset(97, seed=2)
    if args.data:
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            train_set = read_dataset(args.data, tokenizer, args.length)
            val_set = read_dataset(args.val_data, tokenizer, args.length)
        except (OSError, ValueError) as error:
            parser.error(str(error).partition("\n")[0])
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


# ---- the model -----------------------------------------------------------------------
def load_model(args, device, mesh):
    """Return the sharded model, with frozen weights and adapters for --lora-rank."""
    dtype = getattr(torch, args.dtype)
    # It has no memory yet, so no rank ever holds it whole.
    model = sharded.make_model(args.model, AutoModelForCausalLM, dtype)
    if args.lora_rank:
        # Before fully_shard: adapters that are added later are not sharded, and their
        # gradients are not averaged.
        model = add_adapters(model, args.lora_rank)
    base_model = model.get_base_model() if args.lora_rank else model
    sharded.shard_model(base_model, mesh, args.bf16)
    sharded.allocate(base_model, device)
    if args.rank_0_reads:
        sharded.load_from_rank_0(model, args.model, AutoModelForCausalLM)
    else:  # each rank reads its slices of the files
        sharded.load_weights(base_model, args.model)
    if args.lora_rank:
        init_adapters(model)
    return model


def add_adapters(model, rank):
    """Freeze a model on the meta device, and add two matrices to each linear layer."""
    import peft  # only --lora-rank needs it

    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, config)
    # The adapters are trained in float32; in float64, if the others have it.
    dtype = torch.promote_types(model.dtype, torch.float32)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)
    return adapted


@torch.no_grad()
def init_adapters(model):
    """Draw the adapters that every number of processes begins with."""
    torch.manual_seed(0)
    adapters = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            adapters[name] = torch.zeros(weight.shape, dtype=weight.dtype)
            if "lora_A" in name:  # B stays 0, so at first the model is as it was
                nn.init.kaiming_uniform_(adapters[name], a=math.sqrt(5))
    # Every rank has drawn all of them, and keeps its shards. Drawn in shards, they
    # would depend on the number of processes.
    options = state_dict.StateDictOptions(full_state_dict=True, strict=False)
    state_dict.set_model_state_dict(model, adapters, options=options)


# ---- training ------------------------------------------------------------------------
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


def train(args, model, optimizer, train_loader, val_loader, device):
    """Train from the latest checkpoint on; print a line for each epoch."""
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
    first = 1
    if args.checkpoint_dir:
        first += sharded.load_latest(args.checkpoint_dir, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = args.lr  # otherwise that of the checkpoint
    torch.manual_seed(dist.get_rank())  # otherwise all ranks draw the same dropout
    for epoch in range(first, args.epochs + 1):
        train_loader.sampler.set_epoch(epoch)  # otherwise each has the same order
        norm = train_one_epoch(args, model, train_loader, optimizer, device)
        if args.checkpoint_dir:
            sharded.save_checkpoint(args.checkpoint_dir, epoch, model, optimizer)
        loss = evaluate(args, model, val_loader, device)
        if dist.get_rank() == 0:  # otherwise every rank prints
            print(f"epoch {epoch}: loss {loss:.4f}", end=", ")
            print(f"norm of the last gradient {norm:.4f}")


def main():
    parser = make_parser()
    args = parse_args(parser)
    device, mesh = init_processes()  # torchrun starts one for each GPU
    train_loader, val_loader = make_loaders(parser, args)
    try:
        model = load_model(args, device, mesh)
    except sharded.ModelError as error:  # one line, no traceback
        parser.error(str(error))
    # Frozen weights never get a gradient, and need no state.
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    train(args, model, optimizer, train_loader, val_loader, device)
    # On all ranks: each has a shard.
    weights = sharded.gather_weights(model, frozen=not args.lora_rank)
    if dist.get_rank() == 0:
        if args.lora_rank:  # with the adapter_config.json that PeftModel needs
            model.save_pretrained(args.out, state_dict=weights)
        else:
            sharded.save_model(model, weights, args.out)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
