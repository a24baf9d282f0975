"""How do I split long sequences by heads (Ulysses), packed ones, and under fully_shard?

The ranks that share a sequence read the same batch, and each takes its part of the
tokens. In attention, an all-to-all gives a rank all tokens of its part of the heads,
and a second one takes the results back (Jacobs et al., 2023, "DeepSpeed Ulysses").
Attention sees whole sequences, so it stays as it is, with fused kernels and the mask of
packed documents. (That mask has a number for each pair of tokens: for long sequences,
take a kernel that is given the documents' lengths, such as torch's varlen_attn for
GPUs. It was not tried here.) The number of ranks, n, must divide the number of heads,
with grouped-query attention also that of the key and value heads. If these are equally
many, a rank sends 4 (n - 1)/n times the bytes of its queries forward, and as many
backward; ring_attention.py sends 2 (n - 1) and 2 (2n - 1) times those. fully_shard
divides the weights over all ranks, also those that share a sequence. Nothing fails if
you forget one of four things. A token's position counts from the beginning of its
document, not of the rank's part. The mask keeps documents apart. Targets are shifted
before the split. The loss is a sum over a rank's tokens, divided by the number of
targets on all ranks, and multiplied by the number of ranks, because fully_shard
averages gradients.

$ torchrun --standalone --nproc-per-node=2 recipes/ulysses.py
weights after 3 steps: within 1e-10 of one process's
with checkpoint(block, x) around each block: within 1e-10
with positions counted from 0 on each rank: not within 1e-3
with documents that see each other (is_causal=True): not within 1e-3
with targets shifted after the split: not within 1e-3
with the mean over each rank's own targets: not within 1e-3
sent by a rank in a layer: 73728 bytes in forward, 73728 in backward
"""

import gc
import math
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


# ---- the lines to copy ---------------------------------------------------------------
def exchange(x, split, join, group):
    """Give each rank its part of dimension `split`, with all of dimension `join`."""
    parts = x.unflatten(split, (group.size(), -1)).movedim(split, 0)  # one per rank
    parts = all_to_all_single_autograd(parts.contiguous(), None, None, group)
    return parts.movedim(0, join).flatten(join, join + 1)


def ulysses(q, k, v, group, **options):
    """Return attention's results for this rank's tokens, [B, heads, tokens, size].

    q, k, v: of this rank's tokens, equally many on each rank of the group, in order.
    options: what attention takes, such as a mask, for the tokens of the whole sequence.
    """
    q, k, v = (exchange(x, 1, 2, group) for x in (q, k, v))  # own heads, all tokens
    return exchange(scaled_dot_product_attention(q, k, v, **options), 2, 1, group)


def pack(lengths, tokens):
    """Return positions and targets, [T], and the mask, [T, T], of documents in a row.

    lengths: of the documents; tokens: [T], the last of which may be padding.
    """
    lengths = torch.tensor([*lengths, len(tokens) - sum(lengths)])
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    targets = tokens.roll(-1)
    targets[lengths.cumsum(0) - 1] = -100  # the next token is of another document
    targets[documents == len(lengths) - 1] = -100  # padding
    mask = (documents[:, None] == documents).tril()
    return positions, targets, mask


def get_loss(logits, targets):
    """Return this rank's part of the mean over the targets of all ranks."""
    count = (targets >= 0).sum()
    dist.all_reduce(count)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return total / count * dist.get_world_size()  # which fully_shard divides by


# ---- the proof -----------------------------------------------------------------------
BATCH, HEADS, LENGTH, SIZE, VOCABULARY = 2, 6, 48, 16, 32
PACKS = [[20, 17, 11], [5, 30, 6]]  # the second ends with padding


class Block(nn.Module):
    """Attention and a layer. Maps [B, T, width] to the same shape."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def forward(self, x, attention):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return x + self.out(attention(q, k, v).transpose(1, 2).flatten(2)).tanh()


class LanguageModel(nn.Module):
    """Two blocks. Maps tokens and positions, [B, T], to logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, HEADS * SIZE)
        self.positions = nn.Embedding(LENGTH, HEADS * SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HEADS * SIZE, VOCABULARY)

    def forward(self, tokens, positions, attention):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


class Sent(TorchDispatchMode):
    """Count the bytes that all-to-alls send to other ranks."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "all_to_all_single" in str(function):
            ranks = len(args[1])
            self.bytes += args[0].nbytes * (ranks - 1) // ranks
        return function(*args, **(kwargs or {}))


def make_batch(step, number):
    """Return tokens, positions, targets, [B, T], and masks of a number of packs."""
    torch.manual_seed(step)
    tokens = torch.randint(VOCABULARY, (number, LENGTH))
    packed = [pack(PACKS[row % 2], tokens[row]) for row in range(number)]
    positions, targets, masks = map(torch.stack, zip(*packed, strict=True))
    return tokens, positions, targets, masks[:, None]  # for all heads


def train(model, get_step_loss):
    """Take three steps; return all weights as one vector."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        get_step_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = (getattr(w, "full_tensor", w.detach)() for w in model.parameters())
    return nn.utils.parameters_to_vector(weights)


def loss_of_one(model, step, number):
    """Return the mean over a number of packs, as one process does it."""
    tokens, positions, targets, mask = make_batch(step, number)
    attention = partial(scaled_dot_product_attention, attn_mask=mask)
    logits = model(tokens, positions, attention).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten())


def loss_of_rank(model, step, mesh, mistake=None):
    """Return the loss of this rank's tokens of its packs, right or with a mistake."""
    row, column = mesh.get_coordinate()
    batch = make_batch(step, BATCH * mesh.size(0))
    *batch, mask = (x[row * BATCH :][:BATCH] for x in batch)
    tokens, positions, targets = (x.chunk(mesh.size(1), 1)[column] for x in batch)
    options = {"attn_mask": mask}
    if mistake == "positions":
        positions = torch.arange(positions.shape[1]).expand_as(positions)
    elif mistake == "documents":
        options = {"is_causal": True}
    elif mistake == "targets":
        targets = targets.clone()
        targets[:, -1] = -100  # the next token is on the next rank
    attention = partial(ulysses, group=mesh.get_group(1), **options)
    logits = model(tokens, positions, attention)
    if mistake == "mean":
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return get_loss(logits, targets)


def make_sharded(checkpointed=False):
    """Return a model over all ranks, with activation checkpointing or without."""
    model = LanguageModel()
    for block in model.blocks:
        if checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block)
    return fully_shard(model)


def count_bytes(mesh):
    """Return the bytes that a rank sends for attention, forward and backward."""
    n, group = mesh.size(1), mesh.get_group(1)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH // n, SIZE, requires_grad=True)
    with Sent() as forward:
        out = ulysses(q, k, v, group, is_causal=True)
    with Sent() as backward:
        out.sum().backward()
    assert forward.bytes == backward.bytes == 4 * q.nbytes * (n - 1) // n
    return forward.bytes, backward.bytes


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
    n = math.gcd(dist.get_world_size(), HEADS)  # that share a sequence
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size() // n, n))
    one = partial(loss_of_one, number=BATCH * mesh.size(0))
    expected = train(LanguageModel(), one)
    forward, backward = count_bytes(mesh)

    def difference(mistake=None, checkpointed=False):
        get_step_loss = partial(loss_of_rank, mesh=mesh, mistake=mistake)
        found = train(make_sharded(checkpointed), get_step_loss)
        return (found - expected).abs().max().item()

    assert difference() < 1e-10
    assert difference(checkpointed=True) < 1e-10
    mistakes = {
        "positions": "positions counted from 0 on each rank",
        "documents": "documents that see each other (is_causal=True)",
        "targets": "targets shifted after the split",
        "mean": "the mean over each rank's own targets",
    }
    for mistake in mistakes:
        assert difference(mistake) > 1e-3, mistake
    if dist.get_rank() == 0:
        print("weights after 3 steps: within 1e-10 of one process's")
        print("with checkpoint(block, x) around each block: within 1e-10")
        for text in mistakes.values():
            print(f"with {text}: not within 1e-3")
        sent = f"{forward} bytes in forward, {backward} in backward"
        print(f"sent by a rank in a layer: {sent}")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
