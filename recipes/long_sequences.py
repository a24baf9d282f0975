"""How do I split one long sequence over the ranks (context parallel, ring, Ulysses)?

In two ways, and with both, the other layers see each token alone, so they stay as they
are. **Around a ring** (Liu et al., 2023, "Ring Attention with Blockwise Transformers"),
each rank keeps the queries of its own tokens, while the keys and values of all ranks
travel. The softmax is merged block by block, by the log of the sum of the exponentials
so far (Milakov and Gimelshein, 2018; Dao et al., 2022, "FlashAttention", do it within
one GPU). With a causal mask, split the sequence in a zigzag: with contiguous parts, the
last rank has the most to compute, and the others wait for it. **By heads** (Jacobs et
al., 2023, "DeepSpeed Ulysses"), an all-to-all gives a rank all tokens of its part of
the heads, and a second one takes the results back. Attention sees whole sequences, so
it stays as it is, with fused kernels and any mask. The number of ranks must divide the
number of heads. With N ranks, a rank sends N - 1 blocks of keys and values around the
ring in forward and 2N - 1 in backward; by heads, it sends twice (N - 1)/N of such a
block, in each. Nothing fails if you forget one of three things. Position embeddings
take a token's position in the whole sequence. The targets are shifted before they are
split, because the next token can be on another rank. The loss is a sum over a rank's
tokens, divided by the number of targets on all ranks, and the gradients are summed over
the ranks; DDP and fully_shard average them, so multiply the loss by the number of
ranks. torch has a prototype, `torch.distributed.tensor.experimental.context_parallel`,
which was not tried here.

$ torchrun --standalone --nproc-per-node=2 recipes/long_sequences.py
query-key pairs per rank: contiguous [300, 876], zigzag [588, 588]
a ring: equal to full attention; sent 1 and 3 blocks, forward and backward
by heads: equal to full attention; sent 1 and 1 blocks, forward and backward
a language model's gradients, a ring: equal to one process's
a language model's gradients, by heads: equal to one process's
with positions counted from 0 on each rank: not equal
with targets shifted after the split: not equal
with the mean over each rank's own targets: not equal
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode


# ---- the lines to copy: around a ring ------------------------------------------------
def zigzag(length, world_size):
    """Return the positions of each rank's tokens, ascending: [ranks, tokens].

    Rank r has chunks r and 2N - 1 - r of the 2N chunks for N ranks. The queries of
    chunk c see the c chunks before it and half of their own, and r + (2N - 1 - r) is
    the same for all ranks: all have equally much to compute. The positions are on the
    CPU, otherwise each slice made from them waits for the GPU.
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
    many. positions: of all ranks' tokens, from zigzag(). In bfloat16, make `out`, `lse`
    and the gradients float32, because many blocks are added up.
    """
    q = q * q.shape[-1] ** -0.5  # out here, autograd also scales the gradient
    return RingAttention.apply(q, torch.stack([k, v]), positions)


# ---- the lines to copy: by heads -----------------------------------------------------
def exchange(x, split, join, group):
    """Give each rank its part of dimension `split`, with all of dimension `join`."""
    parts = x.unflatten(split, (group.size(), -1)).movedim(split, 0)  # one per rank
    parts = all_to_all_single_autograd(parts.contiguous(), None, None, group)
    return parts.movedim(0, join).flatten(join, join + 1)


def by_heads(q, k, v, group, **options):
    """Return attention's results for this rank's tokens, [B, heads, tokens, size].

    q, k, v: of this rank's tokens, equally many on each rank of the group, in order.
    options: what attention takes, such as a mask, for the tokens of the whole sequence.
    """
    q, k, v = (exchange(x, 1, 2, group) for x in (q, k, v))  # own heads, all tokens
    return exchange(scaled_dot_product_attention(q, k, v, **options), 2, 1, group)


# ---- the proof -----------------------------------------------------------------------
BATCH, HEADS, LENGTH, SIZE, VOCABULARY = 2, 12, 48, 8, 32


class Sent(TorchDispatchMode):
    """Count the bytes sent to other ranks, by messages and by all-to-alls."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.c10d.send.default:
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        elif "all_to_all_single" in str(function):
            self.bytes += args[0].nbytes * (len(args[1]) - 1) // len(args[1])
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


def full(q, k, v):
    """Return the attention to compare with: one process, the whole sequence."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def is_equal(found, expected):
    """Return whether tensors are equal, on all ranks."""
    pairs = zip(found, expected, strict=True)
    most = torch.stack([(one - other).abs().max() for one, other in pairs]).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item() < 1e-10


def check_attention(attention, own):
    """Compare output and gradients with full attention; own: this rank's positions.

    Returns the bytes that this rank sends, forward and backward.
    """
    torch.manual_seed(0)
    *inputs, grad_out = torch.randn(4, BATCH, HEADS, LENGTH, SIZE)
    whole = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = full(*whole)
    expected.backward(grad_out)
    expected = [expected, *(tensor.grad for tensor in whole)]
    parts = [tensor[..., own, :].requires_grad_() for tensor in inputs]
    with Sent() as forward:
        out = attention(*parts)
    with Sent() as backward:
        out.backward(grad_out[..., own, :])
    found = [out, *(tensor.grad for tensor in parts)]
    assert is_equal(found, [tensor[..., own, :] for tensor in expected])
    return forward.bytes, backward.bytes


def gradients(attention, own, mistake=None):
    """Return the gradients of a model's weights, of the loss of all ranks' tokens.

    own: the positions of this rank's tokens.
    """
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    inputs, targets = text[:, :-1], text[:, 1:].clone()  # shifted before the split
    targets[0, 3 * LENGTH // 4 :] = -100  # padding, of which ranks have unequal parts
    count, positions, targets = (targets >= 0).sum(), own, targets[:, own].clone()
    if mistake == "positions counted from 0 on each rank":
        positions = torch.arange(len(own), device=own.device)
    elif mistake == "targets shifted after the split":
        targets[:, -1] = -100  # the next token is on another rank
    elif mistake == "the mean over each rank's own targets":
        count = (targets >= 0).sum() * dist.get_world_size()
    model = LanguageModel(attention)
    logits = model(inputs[:, own], positions.to(inputs.device)).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    return torch.autograd.grad(total / count, list(model.parameters()))


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
    rank, n = dist.get_rank(), dist.get_world_size()
    everything = torch.arange(LENGTH, device="cpu")
    contiguous, balanced = everything.view(n, -1), zigzag(LENGTH, n)
    pairs = [
        (positions[..., None] >= everything).sum((1, 2)).tolist()
        for positions in (contiguous, balanced)
    ]
    assert len({*pairs[1]}) == 1
    lines = [f"query-key pairs per rank: contiguous {pairs[0]}, zigzag {pairs[1]}"]
    block = 2 * BATCH * HEADS * LENGTH // n * SIZE * 8  # bytes of keys and values
    ways = {
        "a ring": (lambda *qkv: ring_attention(*qkv, balanced), balanced[rank]),
        "by heads": (
            lambda *qkv: by_heads(*qkv, dist.group.WORLD, is_causal=True),
            contiguous[rank],
        ),
    }
    for name, way in ways.items():
        sent = check_attention(*way)
        there, back = (f"{each / block:g}" for each in sent)
        expected = (n - 1, 2 * n - 1) if name == "a ring" else [2 * (n - 1) / n] * 2
        assert n == 1 or [each / block for each in sent] == [*expected]
        text = f"sent {there} and {back} blocks, forward and backward"
        lines.append(f"{name}: equal to full attention; {text}")
    expected = gradients(full, everything)

    def is_right(way, mistake=None):
        found = gradients(*way, mistake)
        for gradient in found:
            dist.all_reduce(gradient)  # the sum
        return is_equal(found, expected)

    for name, way in ways.items():
        assert is_right(way)
        lines.append(f"a language model's gradients, {name}: equal to one process's")
    for mistake in (
        "positions counted from 0 on each rank",
        "targets shifted after the split",
        "the mean over each rank's own targets",
    ):
        assert n == 1 or not is_right(ways["by heads"], mistake)
        lines.append(f"with {mistake}: not equal")
    if rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
