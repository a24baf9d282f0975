"""Train adapters alone: torchrun --standalone --nproc-per-node=N lora.py MODEL"""

import argparse
import functools
import gc
import json
import math
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig

try:
    import peft
except ModuleNotFoundError:
    peft = None  # only --peft needs it

# What state dicts hold: the frozen weights are in the pretrained model's files.
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def without_frozen(model, weights):
    """Return a state dict without frozen weights, which TRAINED leaves in if tied."""
    trained = {name for name, w in model.named_parameters() if w.requires_grad}
    return {name: value for name, value in weights.items() if name in trained}


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


class LoRA(nn.Module):
    """A frozen linear layer, plus the product of two small matrices that are trained.

    From "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al., 2021). There,
    what is added is multiplied by alpha / r, which is 2 here.
    """

    def __init__(self, layer, rank, dtype):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))


def add_lora(model, targets, rank, dtype):
    """Freeze all weights, and add adapters to the linear layers of these names."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in targets and isinstance(layer, nn.Linear):
            adapted = LoRA(layer, rank, dtype)
            setattr(model.get_submodule(parent), last, adapted)
    if not any(weight.requires_grad for weight in model.parameters()):
        text = f"no linear layer is named {' or '.join(targets)}: --targets"
        raise argparse.ArgumentTypeError(text)


def add_lora_by_peft(model, targets, rank, dtype):
    """Do the same with peft."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:  # for instance none of these layers
        raise argparse.ArgumentTypeError(str(error).partition("\n")[0]) from error
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if "lora_" not in name:  # for instance of peft's modules_to_save
            text = f"{name} is to be trained, but is not an adapter: it is not loaded"
            raise argparse.ArgumentTypeError(text)
        weight.data = weight.data.to(dtype)  # peft makes all adapters float32
    return model


@torch.no_grad()
def init_adapters(model):
    """Draw the adapters that every number of processes begins with."""
    torch.manual_seed(0)
    adapters = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        adapters[name] = torch.zeros(weight.shape, dtype=weight.dtype)
        if "lora_A" in name:  # B stays 0, so at first the model is as it was
            nn.init.kaiming_uniform_(adapters[name], a=math.sqrt(5))
    # Every rank has drawn all of them, and keeps its shards. Drawn in shards, they
    # would depend on the number of processes.
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, adapters, options=options)


def warn_of_others(model, parts):
    """Say so if much of a model is in none of its parts: the root then gathers it."""
    known = {weight for part in parts for weight in part.parameters()}
    total = sum(weight.numel() for weight in model.parameters())
    others = total - sum(weight.numel() for weight in known)
    if others > 0.1 * total and dist.get_rank() == 0:
        print(
            f"{others:,} of {total:,} parameters are in no block, and stay whole during"
            " the entire step: shard their blocks, too, in shard_model",
            file=sys.stderr,
        )


def shard_model(model, mesh, bf16):
    """Shard each block, the embedding and the head; the root takes what is left."""
    options = {"mesh": mesh}
    if bf16:  # gather the weights in 16 bits, and average the gradients in 32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    # The list of blocks, model.layers of a Llama or transformer.h of a GPT-2. A list of
    # another length is of something else, such as a vision tower.
    depth = model.config.get_text_config().num_hidden_layers
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    blocks = next((each for each in lists if len(each) == depth), None)
    if blocks is None:
        text = f"there is no list of {depth} blocks: name yours in shard_model"
        raise argparse.ArgumentTypeError(text)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [each for each in (embedding, head) if hasattr(each, "weight")]
    warn_of_others(model, [*blocks, *ends])
    for block in blocks:
        fully_shard(block, **options)
    if len({each.weight for each in ends}) == len(ends):  # otherwise they are tied, and
        for each in ends:  # one weight cannot be in two groups
            # Backward begins with the head, so there is no use in freeing it before.
            fully_shard(each, reshard_after_forward=each is not head, **options)
    fully_shard(model, **options)


def make_model(config, dtype):
    """Return a model of the class of its files; another one would lack parts of it."""
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        text = str(error).partition("\n")[0]  # below it are all classes that there are
        raise argparse.ArgumentTypeError(text) from error
    ours, theirs = type(model).__name__, config.architectures or []
    if theirs and ours not in theirs:
        raise argparse.ArgumentTypeError(
            f"config.json is of a {' or '.join(theirs)}, not of a {ours}: name that "
            "class in make_model"
        )
    return model


def load_model(args, device, mesh):
    """Return the sharded model; every rank reads its own slices of the files."""
    # On the meta device, a model has shapes and no memory: no rank ever holds it whole.
    try:
        config = AutoConfig.from_pretrained(args.model)
    except ValueError as error:  # for instance an unknown architecture
        raise argparse.ArgumentTypeError(str(error).partition("\n")[0]) from error
    with torch.device("meta"):
        # The frozen weights stay bfloat16, because nothing is added to them.
        dtype = getattr(torch, args.dtype)
        model = make_model(config, dtype)
        if (args.model / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(args.model)
        # Before fully_shard: adapters that are added later are not sharded, and their
        # gradients are not averaged. They are float32, because they are trained.
        trained_dtype = torch.promote_types(dtype, torch.float32)
        choices = args.targets, args.lora_rank, trained_dtype
        if args.peft:
            model = add_lora_by_peft(model, *choices)
        else:
            add_lora(model, *choices)
    base_model = model.get_base_model() if args.peft else model
    shard_model(base_model, mesh, args.bf16)
    model.to_empty(device=device)
    # Otherwise what is not in the files, such as the frequencies of Llama's positions,
    # is whatever to_empty() found in memory. It draws weights, too: so before loading.
    warnings.filterwarnings("ignore", "DTensor random operators")  # not quite on a CPU
    model.initialize_weights()
    reader = dcp.HuggingFaceStorageReader(args.model)
    names = reader.read_metadata().state_dict_metadata
    # A file of the base model, such as GPT-2's, has names without this prefix.
    prefix = f"{model.base_model_prefix}."
    weights, found = {}, set()
    for name, tensor in base_model.state_dict().items():
        in_file = name.replace(".base_layer", "")  # the files know nothing of adapters
        in_file = in_file if in_file in names else in_file.removeprefix(prefix)
        if in_file in names:  # state_dict() has a tied weight twice, and the files once
            weights[in_file] = tensor
            found.add(name)
    frozen = [name for name, w in base_model.named_parameters() if not w.requires_grad]
    missing = set(frozen) - found  # adapters are in no file
    if missing:
        raise argparse.ArgumentTypeError(
            f"{min(missing)} is not in the files of {args.model}. Is the download "
            "complete? For a layer that is new, and for files with other names, see "
            "README.md, weights that are not found"
        )
    dcp.load(weights, storage_reader=reader)  # in place, and converted to their dtype
    init_adapters(model)  # they are in no file
    return model


def save_checkpoint(folder, epoch, model, optimizer):
    """Write what is needed to resume after this epoch; all ranks call it."""
    path = folder / f"epoch-{epoch:04}"
    unfinished = folder / f".{path.name}.tmp"
    if dist.get_rank() == 0:  # otherwise shards that a killed save has left stay in it
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()  # otherwise rank 0 can remove new shards, too
    weights, state = get_state_dict(model, optimizer, options=TRAINED)  # no frozen ones
    weights = without_frozen(model, weights)
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
    # dcp.load fills the tensors that it is given: get_state_dict makes them.
    weights, state = get_state_dict(model, optimizer, options=TRAINED)  # no frozen ones
    weights = without_frozen(model, weights)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=found[0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=state,
        options=TRAINED,  # otherwise it misses the frozen weights
    )
    if dist.get_rank() == 0:
        print(f"resumed from {found[0]}")
    return int(found[0].name.removeprefix("epoch-"))


def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # errors are one line
    parser.add_argument("model", type=model_folder, help="config.json, *.safetensors")
    # Another folder than that of fsdp.py, which writes a whole model.
    parser.add_argument("--out", type=Path, default=Path("adapters"))
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    dtypes = ("float32", "bfloat16", "float64")
    # Of the frozen weights. An adapter is float32, or float64 if they are.
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16")
    parser.add_argument("--peft", action="store_true", help="adapters made by peft")
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--activation-checkpointing", action="store_true")
    args = parser.parse_args()
    # Otherwise a float32 adapter gets bfloat16 inputs, and refuses them.
    args.bf16 = args.dtype == "bfloat16"
    if "LOCAL_RANK" not in os.environ:  # otherwise KeyError: 'LOCAL_RANK'
        parser.error("run this script with torchrun --standalone --nproc-per-node=N")
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % (world_size * args.micro_batches):
        parser.error(
            "--batch-size must be divisible by processes * --micro-batches "
            f"({world_size * args.micro_batches})"
        )
    if args.peft and peft is None:  # one line, not a traceback
        parser.error("--peft needs the package peft: pip install peft")
    train_set, val_set = make_dataset(505, seed=1), make_dataset(97, seed=2)
    if len(train_set) < args.batch_size:  # an incomplete batch is dropped
        parser.error(f"--batch-size is more than the {len(train_set)} training samples")
    if len(val_set) < world_size:  # evaluate needs one on each rank
        parser.error(f"{len(val_set)} samples for {world_size} processes to evaluate")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)  # otherwise all ranks share GPU 0
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    mesh = dist.init_device_mesh(device.type, (world_size,))

    # Otherwise every rank trains on all samples. The sampler shuffles them.
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // world_size,  # --batch-size is the global batch
        sampler=sampler,
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

    try:
        model = load_model(args, device, mesh)
    except argparse.ArgumentTypeError as error:  # one line, no traceback
        parser.error(str(error))
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
    # Frozen weights never get a gradient, and need no state.
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    first = 1
    if args.checkpoint_dir:
        first += load_latest(args.checkpoint_dir, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = args.lr  # otherwise that of the checkpoint
    torch.manual_seed(rank)  # otherwise all ranks draw the same dropout
    for epoch in range(first, args.epochs + 1):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        norm = train_one_epoch(args, model, train_loader, optimizer, device)
        if args.checkpoint_dir:
            save_checkpoint(args.checkpoint_dir, epoch, model, optimizer)
        loss = evaluate(args, model, val_loader, device)
        if rank == 0:  # otherwise every rank prints
            print(f"epoch {epoch}: loss {loss:.4f}", end=", ")
            print(f"norm of the last gradient {norm:.4f}")

    prompt = torch.tensor([[5, 8, 11, 14, 17, 20, 23, 26]], device=device)
    model.eval()
    # On all ranks, because each token is a forward pass, which gathers the weights.
    text = model.generate(prompt, max_new_tokens=6, do_sample=False)
    # On all ranks, too, and of the adapters alone.
    adapters = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
    )
    weights = without_frozen(model, get_model_state_dict(model, options=adapters))
    if rank == 0:
        print("generated:", *text[0, prompt.shape[1] :].tolist())
        args.out.mkdir(parents=True, exist_ok=True)
        if args.peft:  # with the adapter_config.json that PeftModel needs
            model.save_pretrained(args.out, state_dict=weights)
        else:
            save_file(weights, args.out / "adapters.safetensors")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
