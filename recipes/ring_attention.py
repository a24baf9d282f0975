"""How do I split one long sequence over the ranks (context parallel, ring attention)?

Each rank keeps the queries of its own tokens, while the keys and values of all ranks
travel around a ring (Liu et al., 2023, "Ring Attention with Blockwise Transformers").
The softmax is merged block by block, by the log of the sum of the exponentials so far
(Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"; Dao et al.,
2022, "FlashAttention", do it within one GPU). Backward sends the keys and values around
again, so that a rank holds at most three blocks of them, however many ranks there are:
its own, the one it works on, and the one that arrives. With four ranks or more, it thus
never holds all keys. With N ranks, each sends N - 1 blocks in forward and 2N - 1 in
backward, where the gradients of the keys and values travel, too. With a causal mask,
split the sequence in a zigzag: with contiguous parts, the last rank has the most to
compute, and the others wait for it. The lines below count the query-key pairs that the
mask leaves, and the scores that are computed for them. The other layers see each token
alone, so they stay as they are. The rest of a model needs care in three places.
Position embeddings and RoPE take a token's position in the whole sequence. The targets
are shifted before they are split, because the next token can be on another rank. The
loss is a sum over a rank's tokens, divided by the number of tokens on all ranks, and
the gradients of the weights are summed over the ranks; DDP averages them, so multiply
the loss by the number of ranks. If the ranks can divide the heads, ulysses.py sends
less, and keeps attention as it is. torch has a prototype for the attention of GPUs,
`torch.distributed.tensor.experimental.context_parallel`, which was not tried on GPUs
here. On a CPU it fails: "Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding
strategy registered." (torch 2.14 and 2.15).

$ torchrun --standalone --nproc-per-node=2 recipes/ring_attention.py
contiguous: query-key pairs per rank [300, 876], scores computed [576, 1152]
zigzag: query-key pairs per rank [588, 588], scores computed [864, 864]
output and gradients of q, k and v: within 1e-10 of one process's
keys and values on a rank: at most 147456 of 147456 bytes, 2 of 2 blocks
sent by a rank: 73728 bytes in forward, 221184 in backward, 1 and 3 blocks
gradients of a language model's weights: within 1e-10 of one process's
"""

import os
import sys
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


# ---- the lines to copy ---------------------------------------------------------------
# Both splits return the positions of each rank's tokens, ascending: [ranks, tokens].
# They are on the CPU, otherwise each slice made from them waits for the GPU.
def contiguous(length, world_size):
    """Rank r has the r-th chunk of the sequence.

    A query sees the keys up to its own position. So the queries of rank 0 see only the
    keys of rank 0, those of the last rank see all keys, and the others wait for it.
    """
    return torch.arange(length, device="cpu").view(world_size, -1)


def zigzag(length, world_size):
    """Rank r has chunks r and 2N - 1 - r of the 2N chunks for N ranks.

    The queries of chunk c see the c chunks before it and half of their own, and
    r + (2N - 1 - r) is the same for all ranks: all have equally much to compute.
    """
    chunks = torch.arange(length, device="cpu").view(2 * world_size, -1)
    return torch.cat([chunks[:world_size], chunks.flip(0)[:world_size]], dim=1)


def pass_on(block, arriving):
    """Start to send a block to the next rank, and to receive one from the previous.

    Returns a function that waits for both and returns the block that has arrived. If
    the ring is one dimension of a device mesh, give its group to get_rank and the
    others, and to P2POp as P2POp(dist.isend, block, group=group, group_peer=...).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return lambda: block
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size),
        ]
    )

    def arrive():
        for work in works:
            work.wait()
        return arriving

    return arrive


def ring(block):
    """Yield the blocks of all ranks, each as (rank, block), starting with our own.

    The next block arrives while the caller works on this one. Two buffers take turns:
    one is read and sent on while the other one is filled.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffers = [torch.empty_like(block) for _ in range(min(world_size - 1, 2))]
    for step in range(world_size - 1):
        arrive = pass_on(block, buffers[step % 2])
        yield (rank - step) % world_size, block
        block = arrive()
    yield (rank + 1) % world_size, block


def visible(positions, source, device):
    """Return which of our queries see keys of rank `source`, which keys, which pairs.

    Returns a slice of the queries, a slice of the keys, and the causal mask of what is
    in both, [queries, keys]. No score outside of the slices is computed, and this is
    the work that a zigzag balances. Where nothing is visible, the slices are empty.
    """
    queries, keys = positions[dist.get_rank()], positions[source]
    rows = slice(int((queries < keys[0]).sum()), None)  # later than the first key
    columns = slice(int((keys <= queries[-1]).sum()))  # not later than the last query
    mask = queries[rows, None].to(device) >= keys[columns].to(device)
    return rows, columns, mask


class RingAttention(torch.autograd.Function):
    """Attention of q, [B, heads, tokens, size], to kv, [2, B, heads, tokens, size].

    By hand, with the scores of a block in memory. A fused kernel can take the place of
    these lines if it also returns the log of the sum.
    """

    @staticmethod
    def forward(ctx, q, kv, positions):
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:-1], 1), -torch.inf)  # log of the sum of exp(score)
        for source, block in ring(kv):
            rows, columns, mask = visible(positions, source, q.device)
            key, value = block[..., columns, :]
            scores = (q[..., rows, :] @ key.mT).masked_fill(~mask, -torch.inf)
            old = lse[..., rows, :]
            new = torch.logaddexp(old, scores.logsumexp(-1, keepdim=True))
            # What was summed so far was divided by exp(old), and has to be by exp(new).
            out[..., rows, :] *= (old - new).exp()
            out[..., rows, :] += (scores - new).exp() @ value
            lse[..., rows, :] = new
        ctx.save_for_backward(q, kv, out, lse)
        ctx.positions = positions
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, kv, out, lse = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        # The backward of a softmax subtracts a sum over the keys of all blocks, that of
        # weights * (grad @ value.mT). It equals this one, which needs no keys.
        total = (grad_out * out).sum(-1, keepdim=True)
        grad_kv, spare, arrive = torch.zeros_like(kv), torch.empty_like(kv), None
        for source, block in ring(kv):
            rows, columns, mask = visible(ctx.positions, source, q.device)
            key, value = block[..., columns, :]
            query, grad = q[..., rows, :], grad_out[..., rows, :]
            scores = (query @ key.mT).masked_fill(~mask, -torch.inf)
            weights = (scores - lse[..., rows, :]).exp()  # the softmax over all blocks
            grad_scores = weights * (grad @ value.mT - total[..., rows, :])
            grad_q[..., rows, :] += grad_scores @ key
            # The gradient of a block follows the block, and each rank adds its own.
            if arrive:  # not in the first step, which begins with zeros
                grad_kv, spare = arrive(), grad_kv
            grad_kv[0][..., columns, :] += grad_scores.mT @ query
            grad_kv[1][..., columns, :] += weights.mT @ grad
            arrive = pass_on(grad_kv, spare)
        # The last block was the next rank's, so one more pass takes the gradient home.
        return grad_q, arrive(), None


def ring_attention(q, k, v, positions):
    """Return the causal attention of this rank's queries to the keys of all ranks.

    q, k, v: of this rank's tokens, [B, heads, tokens, size]; all ranks have equally
    many. positions: of all ranks' tokens, from zigzag() or contiguous(). In bfloat16,
    make `out`, `lse` and the gradients float32, because many blocks are added up.
    """
    q = q * q.shape[-1] ** -0.5  # out here, autograd also scales the gradient
    return RingAttention.apply(q, torch.stack([k, v]), positions)


# ---- the proof -----------------------------------------------------------------------
BATCH, HEADS, LENGTH, SIZE, VOCABULARY = 2, 6, 48, 16, 32


class Traffic(TorchDispatchMode):
    """Count the bytes sent, and how many received blocks are in memory at most."""

    def __init__(self):
        super().__init__()
        self.sent, self.most, self.received = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.c10d.send.default:
            self.sent += sum(tensor.nbytes for tensor in args[0])
        elif function is torch.ops.c10d.recv_.default:
            self.received.update(tensor.untyped_storage() for tensor in args[0])
            self.most = max(self.most, len(self.received))
        return function(*args, **(kwargs or {}))


class LanguageModel(nn.Module):
    """Two layers of attention. Maps tokens, [B, T], and positions, [T], to logits."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * SIZE
        self.attention = attention
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
            x = x + self.attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x)


def log(text):
    """Print a line, once for the whole run."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def everywhere(value):
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attend(q, k, v):
    """Return the attention to compare with: one process, the whole sequence."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def assert_equal(found, expected):
    """Compare tensors; return the largest difference."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    pairs = zip(found, expected, strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


class Measured(NamedTuple):
    difference: float  # the largest
    scores: int  # that this rank computed in forward, for one head of one sample
    block: int  # the bytes of one rank's keys and values
    held: int  # the bytes of keys and values on this rank in forward, at most
    forward: int  # bytes sent
    backward: int


def check_attention(positions):
    """Compare output and gradients with one process's; return a Measured."""
    torch.manual_seed(0)
    own = positions[dist.get_rank()]
    *inputs, grad_out = torch.randn(4, BATCH, HEADS, LENGTH, SIZE)
    whole = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = attend(*whole)
    expected.backward(grad_out)
    expected = [expected, *(tensor.grad for tensor in whole)]
    q, k, v = (tensor[..., own, :].requires_grad_() for tensor in inputs)
    with Traffic() as forward, FlopCounterMode(display=False) as flops:
        out = ring_attention(q, k, v, positions)
    with Traffic() as backward:
        out.backward(grad_out[..., own, :])
    found = [out, q.grad, k.grad, v.grad]
    difference = assert_equal(found, [tensor[..., own, :] for tensor in expected])
    assert backward.most <= forward.most + 2  # two of gradients, which also take turns
    scores = flops.get_total_flops() // (4 * BATCH * HEADS * SIZE)
    block = k.nbytes + v.nbytes
    held = (1 + forward.most) * block  # its own, and those it received
    n = dist.get_world_size()
    assert held == min(n, 3) * block
    assert forward.sent == (n - 1) * block
    assert backward.sent == (n > 1) * (n - 1 + n) * block  # as forward, and gradients
    return Measured(difference, scores, block, held, forward.sent, backward.sent)


def check_model(positions):
    """Compare the gradients of all weights; return the largest difference."""
    torch.manual_seed(0)
    device = torch.get_default_device()
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    inputs, targets = text[:, :-1], text[:, 1:].clone()  # shifted before the split
    targets[0, 3 * LENGTH // 4 :] = -100  # padding, of which ranks have unequal parts
    count = (targets >= 0).sum()  # of all ranks

    def gradients(attention, tokens):
        model = LanguageModel(attention)
        logits = model(inputs[:, tokens], tokens.to(device)).flatten(0, 1)
        labels = targets[:, tokens].flatten()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / count
        return torch.autograd.grad(loss, list(model.parameters()))

    def attention(q, k, v):
        return ring_attention(q, k, v, positions)

    found = gradients(attention, positions[dist.get_rank()])
    for gradient in found:
        dist.all_reduce(gradient)  # the sum
    return assert_equal(found, gradients(attend, torch.arange(LENGTH, device="cpu")))


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
    n, differences = dist.get_world_size(), []
    for split in (contiguous, zigzag):
        positions = split(LENGTH, n)
        pairs = (positions[..., None] >= positions.flatten()).sum((1, 2)).tolist()
        measured = check_attention(positions)
        differences += [measured.difference, check_model(positions)]
        scores = everywhere(measured.scores)
        balanced = split is zigzag or n == 1
        assert (len(set(pairs)) == 1) == (len(set(scores)) == 1) == balanced
        counts = f"query-key pairs per rank {pairs}, scores computed {scores}"
        log(f"{split.__name__}: {counts}")
    log("output and gradients of q, k and v: within 1e-10 of one process's")
    _, _, block, held, *sent = measured
    share = f"at most {held} of {n * block} bytes, {held // block} of {n} blocks"
    log(f"keys and values on a rank: {share}")
    blocks = " and ".join(f"{number // block}" for number in sent)
    traffic = f"{sent[0]} bytes in forward, {sent[1]} in backward, {blocks} blocks"
    log(f"sent by a rank: {traffic}")
    log("gradients of a language model's weights: within 1e-10 of one process's")
    largest = max(everywhere(max(differences)))
    if dist.get_rank() == 0:
        print(f"differences up to {largest:.1e}", file=sys.stderr)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
