"""What the choices of fsdp.py cost and change, measured; the argument names one.

torchrun --standalone --nproc-per-node=2 \
    13_sharded_checkpoints/demos/pretrained_choices.py moved FOLDER
"""

import argparse
import gc
import itertools
import json
import sys
import types
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "your_own_script/hugging_face")]

import fsdp
from nbtools.counting import Collectives

CPU = torch.device("cpu")


# ---- what they share -----------------------------------------------------------------
def make_mesh():
    """Return the mesh of all processes."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def load(folder, dtype="float32", policy=False):
    """Return the sharded model of a folder, loaded as fsdp.py does."""
    args = types.SimpleNamespace(model=folder, dtype=dtype, bf16=policy)
    return fsdp.load_model(args, CPU, make_mesh())


def my_samples(count):
    """Return this rank's part of `count` sequences, dealt out as cards are."""
    return fsdp.make_dataset(count, seed=1)[dist.get_rank() :: dist.get_world_size()]


def get_loss_sum(model, inputs, labels, autocast=False):
    """Return the sum of the loss over all tokens, as fsdp.py computes it."""
    args = types.SimpleNamespace(bf16=autocast)
    return fsdp.get_loss_sum(args, model, inputs, labels, CPU)


def tell(text):
    """Print a text on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---- groups --------------------------------------------------------------------------
def root_alone(model, mesh):
    fully_shard(model, mesh=mesh)


def blocks_and_root(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def as_in_fsdp_py(model, mesh):
    fsdp.shard_model(model, mesh, bf16=False)


def norm_with_the_head(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    last = [model.model.norm, model.lm_head]
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


WAYS = (root_alone, blocks_and_root, as_in_fsdp_py, norm_with_the_head)


def groups(folder):
    """Count the collectives of a step, and the gathered bytes, of a Llama in groups.

    It has the shape of the model in the folder, and a vocabulary of 1,024 words: its
    embedding is larger than a block, as in Llama-3-8B. The weights are random. How many
    bytes were gathered at each look is written to gathered.json in the folder.
    """
    tell(f"{'':26}all-gathers  reduce-scatters  most gathered bytes  of the model")
    looks = {}
    for way, tied in [(way, False) for way in WAYS] + [(as_in_fsdp_py, True)]:
        config = AutoConfig.from_pretrained(
            folder, vocab_size=1024, tie_word_embeddings=tied
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        total = sum(weight.nbytes for weight in model.parameters())
        way(model, make_mesh())
        name = way.__name__ + ", tied" * tied
        calls, looks[name] = step(model)
        gathers = calls["all_gather"]["calls"]
        scatters = calls["reduce_scatter"]["calls"]
        most = max(looks[name])
        tell(f"{name:26}{gathers:11}{scatters:17}{most:21,}{total:14,}")
    if dist.get_rank() == 0:
        (folder / "gathered.json").write_text(json.dumps(looks))


class AllGather:
    """Gather as FSDP does, and know how many bytes of the results are in memory.

    FSDP copies the weights of a group out of the result, and frees it later. gloo gets
    copies: its threads hold what they were given for a moment longer.
    """

    def __init__(self):
        self.results = weakref.WeakSet()

    def allocate(self, size, *, dtype, device):
        result = torch.empty(*size, dtype=dtype, device=device)
        self.results.add(result.untyped_storage())
        return result

    def __call__(self, output_tensor, input_tensor, group, **_):
        copy = torch.empty_like(output_tensor)
        parts = list(copy.chunk(dist.get_world_size(group)))
        dist.all_gather(parts, input_tensor.clone(), group=group)
        output_tensor.copy_(copy)

    def bytes(self):
        return sum(storage.nbytes() for storage in self.results)


def step(model):
    """Go forward and backward; return the collectives, and the bytes gathered.

    The bytes are counted before and after each layer computes, forward and backward.
    They are those of whole weights, and of the results of all-gathers that FSDP holds:
    for the next group, or from which it has copied the weights.
    """
    gathered, gather = [], AllGather()

    def look(*_):
        weights = [w for w in model.parameters() if not isinstance(w, DTensor)]
        gathered.append(gather.bytes() + sum(weight.nbytes for weight in weights))

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)
            module.register_full_backward_pre_hook(look)
            module.register_full_backward_hook(look)
    tokens = torch.arange(64).view(2, 32)
    with Collectives() as collectives:
        model(tokens, use_cache=False).logits.square().mean().backward()
    return collectives.total(), gathered


# ---- bfloat16 ------------------------------------------------------------------------
CASES = (("float32", False), ("bfloat16", False), ("bfloat16", True))


def moved(folder):
    """Print the share of the weights that change in five steps of AdamW."""
    tell("learning rate   float32  bfloat16  bfloat16 with the policy")
    for lr in (1e-6, 1e-5, 1e-4, 1e-3):
        shares = []
        for dtype, policy in CASES:
            model = load(folder, dtype, policy)
            before = [weight.to_local().clone() for weight in model.parameters()]
            train(model, policy, lr)
            shares.append(share_changed(before, model))
        tell("{:13.0e}{:10.1%}{:10.1%}{:12.1%}".format(lr, *shares))


def train(model, policy, lr):
    """Take five optimizer steps, of eight sequences each."""
    args = types.SimpleNamespace(bf16=policy)
    size = 8 // dist.get_world_size()
    loader = DataLoader(my_samples(40), batch_size=size, collate_fn=fsdp.collate)
    # Otherwise weights change that have no gradient.
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0)
    fsdp.train_one_epoch(args, model, loader, optimizer, CPU)


def share_changed(before, model):
    """Return the share of the weights, on all ranks, that differ from `before`."""
    after = [weight.to_local() for weight in model.parameters()]
    changed = sum((a != b).sum() for a, b in zip(after, before, strict=True))
    counts = torch.tensor([changed, sum(each.numel() for each in before)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def kept(folder):
    """Print what a rank keeps from forward to backward, in 16 bits, and its loss.

    Returns {(policy, autocast): (bytes, loss of a token)}.
    """
    results = {}
    tell("policy  autocast  16-bit copies of weights kept  loss of a token")
    for policy, autocast in itertools.product((False, True), repeat=2):
        model = load(folder, policy=policy)
        size, loss = results[policy, autocast] = keep(model, autocast)
        row = "{:6}{:>10}".format(*("yes" if on else "no" for on in (policy, autocast)))
        tell(f"{row}{size:24,} bytes  {loss.item():.6f} ({loss.dtype})")
    return results


def keep(model, autocast):
    """Go forward; return the bytes of 16-bit weights kept for backward, and the loss.

    A kept tensor is a copy of a weight if it has the shape of one, or of its transpose.
    """
    inputs, labels = fsdp.collate(my_samples(4))[0]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        loss = get_loss_sum(model, inputs, labels, autocast)
    shapes = {weight.shape for weight in model.parameters() if weight.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    copies = [t for t in saved if t.dtype == torch.bfloat16 and t.shape in shapes]
    storages = [copy.untyped_storage() for copy in copies]
    size = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    loss.backward()
    return size, loss / fsdp.count_labels([(inputs, labels)])


# ---- the loss ------------------------------------------------------------------------
def over_all_tokens(model, inputs, labels, tokens):
    """Do what fsdp.py does."""
    return get_loss_sum(model, inputs, labels) * dist.get_world_size() / tokens


def loss_of_transformers(model, inputs, labels, tokens):
    # It shifts the labels itself, so it gets those that are not shifted.
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels, num_items_in_batch=tokens).loss
    return loss * dist.get_world_size()


def mean_of_each_rank(model, inputs, labels, _):
    mine = fsdp.count_labels([(inputs, labels)])
    return get_loss_sum(model, inputs, labels) / mine  # the mistake


def without_world_size(model, inputs, labels, tokens):
    return get_loss_sum(model, inputs, labels) / tokens  # the mistake


LOSSES = (over_all_tokens, loss_of_transformers, mean_of_each_rank, without_world_size)


def loss(folder):
    """Compare gradients of several losses with that of one process, in float64."""
    inputs, labels = fsdp.collate(my_samples(4))[0]
    tokens = fsdp.count_labels([(inputs, labels)])
    counts = [torch.zeros_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, tokens)
    dist.all_reduce(tokens)
    tell(f"tokens on the ranks: {' and '.join(str(each.item()) for each in counts)}")
    right = gradient_of_one_process(folder)
    tell(f"{'':22}gradient is off by")
    for function in LOSSES:
        model = load(folder, "float64")
        function(model, inputs, labels, tokens).backward()
        grads = {name: w.grad.full_tensor() for name, w in model.named_parameters()}
        off = sum((grads[name] - right[name]).square().sum() for name in right).sqrt()
        off /= sum(grad.square().sum() for grad in right.values()).sqrt()
        tell(f"{function.__name__:22}{off:18.1e}")


def gradient_of_one_process(folder):
    """Return {name: gradient} of a plain model, on the sequences of all ranks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    inputs, labels = fsdp.collate(fsdp.make_dataset(4, seed=1))[0]
    loss_sum = get_loss_sum(model, inputs, labels)
    (loss_sum / fsdp.count_labels([(inputs, labels)])).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


# ---- the run -------------------------------------------------------------------------
CHOICES = {function.__name__: function for function in (groups, moved, kept, loss)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("choice", choices=CHOICES)
    parser.add_argument("folder", type=Path, help="config.json and *.safetensors")
    args = parser.parse_args()
    if not list(args.folder.glob("*.safetensors")):
        parser.error(f"there is no *.safetensors in {args.folder}")
    dist.init_process_group("gloo")
    CHOICES[args.choice](args.folder)


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
