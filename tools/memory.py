"""Will it fit? Print what one GPU keeps while it trains a model of transformers.

python -m tools.memory --gpus 8 --tokens 8192
python -m tools.memory --gpus 8 --tokens 8192 --activation-checkpointing
python -m tools.memory --gpus 8 --tokens 8192 --tensor-parallel 2
python -m tools.memory --gpus 8 --tokens 8192 --strategy pipeline --micro-batches 16
python -m tools.memory --gpus 2 --tokens 4096 --config FOLDER

The states are there at every moment of a step. Each moment needs something in addition,
and the fullest moment decides. The sheet has a line for each of these, with its rule,
and then the totals of other choices.

With FSDP2 the model is sharded as in your_own_script/hugging_face/fsdp.py: each block,
the embedding and the head are groups, and the root has the rest. A tied embedding is
the head, too, and belongs to the root. With the bf16 policy, gradients are reduced in
float32. The loss is computed in float32, and the logits are freed after it. Sequences
have no padding. Gradients count at every moment, as is true from the second micro-batch
on.

With --tensor-parallel, the GPUs of a tp group have the same tokens and share the
layers, as in 14_tensor_parallel: the embedding by rows, queries, keys, values, gate and
up by outputs, what follows them by inputs, the head by outputs; norms are whole. FSDP2
shards these parts over the groups. Each GPU gets all logits for the loss. Twice the
tokens of a group of two are the same global batch.

A pipeline divides the blocks as 14_tensor_parallel/demos/pipeline.py does. The first
GPU also has the embedding, the last the norm and the head; nothing is sharded.
torch's Schedule1F1B runs it, with return_outputs=False, and keeps the logits of a
micro-batch until its backward pass is over. autocast begins again with each
micro-batch. The sheet is that of the GPU which needs most.

The lines count tensors. They leave out the intermediate results inside a block's
backward pass, what the allocator holds and nobody uses, and what CUDA and NCCL take for
themselves. Under autocast a GPU runs some operations in float32 that a CPU runs in
bf16, GPT-2's layer norms for instance, and then keeps more than is counted here.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from common.args import fail
from common.args import one_line_errors
from common.args import positive_int

try:
    import transformers
except ImportError:
    fail("the package transformers is not installed; type: pip install transformers")

BYTES = {"bf16": 2, "float32": 4}
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
STRATEGIES = {"fsdp2": "FSDP2 and AdamW", "ddp": "DDP and AdamW"}
STRATEGIES |= {"single": "AdamW on one GPU", "pipeline": "a pipeline and AdamW"}

# How tensor parallelism splits a layer's weight: torch's ColwiseParallel its outputs,
# which are its rows, and RowwiseParallel its inputs, which are its columns.
COLWISE = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
ROWWISE = {"o_proj", "down_proj"}

# When a line's bytes are there: at every moment of a step, at one, or before training.
STATES = "at every moment"
LOSS = "while the loss is differentiated"
HEAD = "while the head's gradient is reduced"
BLOCK = "while a block is differentiated"
TIED = "while the tied embedding's gradients are added"
TABLE = "while the embedding's gradient is split"
STEP = "while the optimizer takes its step"
READING = "in the CPU memory of each process, once it has read the weights"


# ---- plain numbers -------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Choices:
    """What a reader can choose, as the flags say.

    tokens: of a micro-batch of a GPU, or of a tp group; micro_batches: of a pipeline's
    step, None for as many as GPUs.
    """

    gpus: int = 8
    tokens: int = 8192
    strategy: str = "fsdp2"
    policy: str = "bf16"
    master: str = "float32"
    activation_checkpointing: bool = False
    grad_accum: bool = False
    tensor_parallel: int = 1
    micro_batches: int | None = None

    @property
    def ranks(self):
        """How many GPUs have a shard of a weight, or of a tp group's part of it."""
        return self.gpus // self.tensor_parallel if self.strategy == "fsdp2" else 1

    @property
    def autocast(self):
        """Whether autocast copies weights to bf16; FSDP2's policy gathers them so."""
        return self.strategy != "fsdp2" and self.policy != self.master


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shapes of the weights that a GPU computes with, by what FSDP2 gathers.

    blocks: a list of shapes for each; root: those that are in no other group;
    embedding: of the input; head: empty if the embedding is tied, and in the root;
    tied: whether the embedding is the head, too; vocab_size: of the logits; whole:
    the parameters of the model, of which a GPU may have a part.
    """

    blocks: list
    embedding: list
    head: list
    root: list
    tied: bool
    vocab_size: int
    whole: int

    @property
    def table(self):
        """How many numbers are in the whole embedding."""
        return self.vocab_size * self.embedding[0][1] if self.embedding else 0

    @property
    def tensors(self):
        """All weights."""
        embedding = [] if self.tied else self.embedding
        blocks = [one for block in self.blocks for one in block]
        return [*embedding, *blocks, *self.head, *self.root]


class Activations(NamedTuple):
    """The bytes that a forward pass keeps for the backward pass, without the loss.

    kept: without activation checkpointing; checkpointed: with it; recomputed: what the
    block that is differentiated then keeps in addition; copies: of weights, by
    autocast; copies_outside: of those that are in no block; received, sent: by a stage
    of a pipeline, which are not in the others
    """

    kept: int
    checkpointed: int
    recomputed: int
    copies: int
    copies_outside: int
    received: int
    sent: int


class Line(NamedTuple):
    """A line of the sheet; when: STATES, READING or a moment."""

    when: str
    name: str
    rule: str
    bytes: int


def numel(tensors, ranks=1):
    """Return how many numbers are in tensors of these shapes, or in rank 0's shards.

    FSDP2 splits rows as torch.chunk does, and pads the last rank's to the same size.
    """
    return sum(-(-rows // ranks) * torch.Size(rest).numel() for rows, *rest in tensors)


def lines(shape, activations, choices, rank=0):
    """Return the Lines of one GPU; nothing is counted here.

    shape: a Shape; activations: of choices.tokens tokens, in choices.policy; rank: of
    the GPU in a pipeline, of which the two are.
    """
    found = []

    def add(when, name, rule, size):
        found.append(Line(when, name, rule, size))

    master, policy = choices.master, choices.policy
    size, computed = BYTES[master], BYTES[policy]
    sharded, ranks = choices.strategy == "fsdp2", choices.ranks
    own, whole = numel(shape.tensors, ranks), numel(shape.tensors)
    p = "p" if whole < shape.whole else "P"
    of_ranks = f"{p} / N" if sharded else p

    add(STATES, f"weights, {master}", f"{size} {of_ranks}", size * own)
    if sharded and choices.grad_accum:
        add(STATES, "gradients, whole, float32", f"4 {p}", 4 * whole)
        others = shape.table - numel(shape.embedding)
        if others and not shape.tied:
            # They are split when they are reduced.
            name = "gradients of other ranks' embedding"
            add(STATES, name, "4 E - 4 e", 4 * others)
    else:
        add(STATES, f"gradients, {master}", f"{size} {of_ranks}", size * own)
    rule = f"{size + size} {of_ranks}"
    add(STATES, f"AdamW's two averages, {master}", rule, 2 * size * own)
    if choices.strategy == "ddp":
        add(STATES, "DDP's buckets", f"{size} P", size * whole)

    if choices.strategy == "pipeline":
        add_stage(add, shape, activations, choices, rank)
    else:
        add_activations(add, shape, activations, choices)
    if sharded:
        add_gathered(add, shape, ranks, computed)
    # As on a GPU, where AdamW updates all weights at once (`foreach`).
    add(STEP, "square roots of AdamW's averages", f"{size} {of_ranks}", size * own)

    add(READING, f"from_pretrained, {master}", f"{size} P", size * shape.whole)
    if sharded:
        add(READING, "dcp.load into its shards", f"{size} {of_ranks}", size * own)
    return found


def add_activations(add, shape, activations, choices):
    """Add the Lines of what is kept for a backward pass through the whole model."""
    kept, name = activations.kept, "activations"
    if choices.activation_checkpointing:
        kept, name = activations.checkpointed, "activations, checkpointed"
    with_head = choices.strategy == "fsdp2" and not shape.tied
    for moment in (LOSS, HEAD, BLOCK) if with_head else (LOSS, BLOCK):
        add(moment, name, f"{kept / choices.tokens:,.0f} T, counted", kept)
    if choices.activation_checkpointing:
        kept, name = activations.recomputed, "activations of the block, recomputed"
        add(BLOCK, name, f"{kept / choices.tokens:,.0f} T, counted", kept)
    add_loss(add, shape, choices)
    if choices.autocast:
        # With activation checkpointing, most of them are freed just before, as autocast
        # ends. Those of one block are made again.
        copies = ("autocast's copies of weights", "counted", activations.copies)
        add(LOSS, *copies)
        if not choices.activation_checkpointing:
            add(BLOCK, *copies)


def add_loss(add, shape, choices):
    logits = 4 * choices.tokens * shape.vocab_size
    add(LOSS, "log-softmax and two gradients, float32", "(4 + 4 + 4) T V", 3 * logits)


def add_stage(add, shape, activations, choices, rank):
    """Add the Lines of what a stage of a pipeline keeps for its backward passes."""
    # With 1F1B, a backward pass follows each forward pass as soon as rank r has those
    # of N - r micro-batches in flight.
    in_flight = choices.gpus - rank
    batches = choices.micro_batches or choices.gpus
    first, last = rank == 0, in_flight == 1
    # torch makes the buffers of all micro-batches in the first step, and keeps them.
    if not first:
        size = batches * activations.received
        add(STATES, "buffers of received activations", "M A", size)
    if not last:
        size = batches * activations.sent
        add(STATES, "buffers of received gradients", "M A", size)

    kept, name = activations.kept, "activations"
    copies = activations.copies
    if choices.activation_checkpointing:
        kept, name = activations.checkpointed, "activations, checkpointed"
        copies = activations.copies_outside
    for moment in (LOSS, BLOCK) if last else (BLOCK,):
        rule = f"{in_flight} x {kept / choices.tokens:,.0f} T"
        add(moment, f"{name}, in flight", rule, in_flight * kept)
        if choices.autocast:
            rule = f"{in_flight} x counted"
            add(moment, "autocast's copies of weights", rule, in_flight * copies)
        if not first:
            add(moment, "gradient of an input, being sent", "A", activations.received)
        if last:
            computed = BYTES[choices.policy]
            size = computed * choices.tokens * shape.vocab_size
            add(moment, "logits, which the stage keeps", f"{computed} T V", size)
        else:
            # The handle of the last send before the first backward pass keeps an output
            # longer than the stage does, if there are enough micro-batches after it.
            more = batches >= 2 * in_flight - 1
            rule = f"({in_flight} + {more:d}) A"
            size = (in_flight + more) * activations.sent
            add(moment, "outputs, in flight and sent", rule, size)
    if choices.activation_checkpointing:
        kept, name = activations.recomputed, "activations of the block, recomputed"
        add(BLOCK, name, f"{kept / choices.tokens:,.0f} T, counted", kept)
    if last:
        add_loss(add, shape, choices)


def add_gathered(add, shape, ranks, computed):
    """Add the Lines of what FSDP2 gathers and reduces; computed: bytes of a number."""
    b, e, h, r = (f"{computed} {letter}" for letter in "behr")
    root, embedding, head = shape.root, shape.embedding, shape.head
    block = max(shape.blocks, key=numel)

    def gathered(group):
        return computed * ranks * numel(group, ranks)

    def gradients(group):
        return computed * numel(group)

    def given(group):  # to a reduce-scatter, whose result is a shard of it
        return 4 * ranks * numel(group, ranks)

    if shape.tied:
        add(LOSS, "weights of the root", r, gathered(root))
    else:
        rule, size = f"{h} + {r}", gathered(head) + gathered(root)
        add(LOSS, "weights of the head and the root", rule, size)
        add(HEAD, "gradients of the head", h, gradients(head))
        size = given(head) + given(head) // ranks
        add(HEAD, "reduce-scatter of the head", "4 h + 4 h / N", size)
        rule, size = f"{b} + {r}", gathered(block) + gathered(root)
        add(HEAD, "weights of the next block and the root", rule, size)
    for moment in (BLOCK, TIED) if shape.tied else (BLOCK,):
        rule, size = f"{r} + {r}", gathered(root) + gradients(root)
        add(moment, "weights and gradients of the root", rule, size)
    add(BLOCK, "weights of the block", b, gathered(block))
    add(BLOCK, "weights of the next block, prefetched", b, gathered(block))
    add(BLOCK, "gradients of the block", b, gradients(block))
    if numel(head) > numel(block):
        add(BLOCK, "reduce-scatter of the head", "4 h", given(head))
    else:
        add(BLOCK, "reduce-scatter of the block before", "4 b", given(block))
    is_part = numel(embedding) < shape.table
    if shape.tied:
        size = 2 * gradients(embedding)
        add(TIED, "the embedding's other gradient, the sum", f"{e} + {e}", size)
        add(TIED, "reduce-scatter of a block", "4 b", given(block))
    elif is_part:
        rule, size = f"{e} + {r}", gathered(embedding) + gathered(root)
        add(TABLE, "weights of the embedding and the root", rule, size)
        add(TABLE, "gradients of the embedding", e, gradients(embedding))
    if is_part:
        # DTensor computes the gradient of all rows on each rank, and then takes some.
        moment, size = TIED if shape.tied else TABLE, computed * shape.table
        add(moment, "gradients of all ranks' embedding", f"{computed} E", size)


def totals(found):
    """Return {moment: bytes}, with the states, the fullest moment first."""
    states = sum(line.bytes for line in found if line.when == STATES)
    sums = {line.when: states for line in found if line.when not in (STATES, READING)}
    for line in found:
        if line.when in sums:
            sums[line.when] += line.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


# ---- counting a model ----------------------------------------------------------------
def attention(_module, query, key, value, _mask, scaling=None, **_):
    """Causal attention by torch's fused kernels, which take no mask for it."""
    result = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result.transpose(1, 2).contiguous(), None


# For its own attention, transformers looks into the tokens, and fake ones have no data.
transformers.AttentionInterface.register("causal", attention)


def make_model(config, dtype):
    """Return a model in training mode. Raises ValueError if transformers has none."""
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError("transformers has no causal language model of this type")
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="causal"
    ).train()


def blocks_of(model):
    """Return the model's blocks: the largest of its lists of modules.

    Raises ValueError if there are none.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    blocks = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    if not len(blocks):
        raise ValueError("the model has no blocks")
    return blocks


def split_config(config, ranks):
    """Return the configuration of the model that a rank of a tp group computes with.

    Raises ValueError if so many ranks cannot share each layer, or nobody knows how.
    """
    if ranks == 1:
        return config
    with FakeTensorMode():
        model = make_model(config, torch.float32)
    for name, weight in blocks_of(model).named_parameters():
        if weight.dim() > 1 and layer_of(name) not in COLWISE | ROWWISE:
            raise ValueError(f"--tensor-parallel cannot split {layer_of(name)}")
    own = copy.deepcopy(config)
    own.head_dim = getattr(config, "head_dim", None)
    own.head_dim = own.head_dim or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name, None)
        if size is None:
            raise ValueError(f"--tensor-parallel: there is no {name} to divide")
        if size % ranks:
            raise ValueError(f"--tensor-parallel must divide {name} ({size})")
        setattr(own, name, size // ranks)
    own.vocab_size, own.pad_token_id = -(-config.vocab_size // ranks), None
    with FakeTensorMode():
        part = make_model(own, torch.float32)
    outer = [model.get_input_embeddings(), model.get_output_embeddings()]
    of_tokens = {id(module.weight) for module in outer}
    weights = zip(model.named_parameters(), part.parameters(), strict=True)
    for (name, weight), one in weights:
        in_tokens, layer = id(weight) in of_tokens, layer_of(name)
        dim = 0 if in_tokens or layer in COLWISE else 1 if layer in ROWWISE else None
        if one.shape != split_shape(weight.shape, dim, ranks):
            raise ValueError(f"--tensor-parallel cannot split {name}")
    return own


def split_shape(shape, dim, ranks):
    """Return the shape of rank 0's part of a weight that a tp group has split.

    dim: 0 for the rows of a layer's weight and bias, which are its outputs; 1 for the
    columns, its inputs, which a bias has not; None for what all ranks have whole.
    """
    shape = list(shape)
    if dim is not None and dim < len(shape):
        shape[dim] = -(-shape[dim] // ranks)
    return torch.Size(shape)


def layer_of(name):
    """Return the name of the module that has a parameter, without those around it."""
    return f".{name}".split(".")[-2]


def count_shapes(config, stages=1, tensor_parallel=1):
    """Return the Shape of each stage of a pipeline; of one, it is the whole model's.

    tensor_parallel: the ranks that share each layer; the Shapes are of rank 0's part.
    Raises ValueError if there cannot be so many stages.
    """
    own = split_config(config, tensor_parallel)
    with FakeTensorMode():
        model = make_model(config, torch.float32)
        part = make_model(own, torch.float32)
    blocks, weights = blocks_of(part), list(part.parameters())
    embedding, head = part.get_input_embeddings(), part.get_output_embeddings()
    tied = embedding.weight is head.weight
    if tied and stages > 1:
        raise ValueError(
            "--strategy pipeline: the embedding is the head, too, and the first GPU has"
            " one, the last the other"
        )
    if len(blocks) < stages:
        raise ValueError(
            f"--strategy pipeline: {stages} GPUs need a block each, and the model has"
            f" {len(blocks)}"
        )
    apart = [*blocks] if tied else [*blocks, embedding, head]
    grouped = {id(one) for module in apart for one in module.parameters()}
    in_block = next(id(one) for one in blocks.parameters())
    start = [id(one) for one in weights].index(in_block)

    def shapes(some):
        return [tuple(one.shape) for one in some if id(one) not in grouped]

    def of(module):
        return [tuple(one.shape) for one in module.parameters()]

    found = []
    for stage, numbers in enumerate(split_blocks(len(blocks), stages)):
        first, last = stage == 0, stage == stages - 1
        before = shapes(weights[:start]) if first else []
        after = shapes(weights[start:]) if last else []
        found.append(
            Shape(
                blocks=[of(blocks[n]) for n in numbers],
                embedding=of(embedding) if first else [],
                head=of(head) if last and not tied else [],
                root=before + after,
                tied=tied,
                vocab_size=len(model.get_output_embeddings().weight),
                whole=sum(one.numel() for one in model.parameters()),
            )
        )
    return found


def split_blocks(blocks, stages):
    """Return the numbers of each stage's blocks, as a range."""
    # The first stages have one more if they cannot be divided equally.
    sizes = [blocks // stages + (stage < blocks % stages) for stage in range(stages)]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


class Forward(NamedTuple):
    """What a forward pass of fake tensors keeps, by places.

    A place is n in block n, n + 0.5 between it and the next, -0.5 before them all.
    kept: {storage: {places}} of activations; copies: the same of autocast's copies of
    weights; taken: {storage: {blocks}} of what blocks take; outputs: {n: {storages}}
    """

    kept: dict
    copies: dict
    taken: dict
    outputs: dict


def forward(model, tokens):
    """Run a forward pass; return kept, taken and outputs, as in Forward."""
    kept, taken, outputs, place = {}, {}, {}, -0.5

    def storages(*values):
        tensors = (one for one in tree_leaves(values) if torch.is_tensor(one))
        return {tensor.untyped_storage() for tensor in tensors}

    def enter(number, _block, *arguments):
        nonlocal place
        place = number
        for storage in storages(arguments):
            taken.setdefault(storage, set()).add(number)

    def leave(number, _block, _arguments, output):
        nonlocal place
        place = number + 0.5
        outputs[number] = storages(output)

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage(), set()).add(place)
        return tensor

    hooks = []
    for number, block in enumerate(blocks_of(model)):
        before = functools.partial(enter, number)
        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.register_forward_hook(functools.partial(leave, number)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return kept, taken, outputs


def count_forward(config, num_tokens, dtype, autocast):
    """Return the Forward of a model.

    dtype: of the weights. Fake tensors have a shape and no data. They are not on the
    meta device, where torch's attention would keep tokens x tokens numbers. These have
    it keep what a GPU's fused kernels keep: queries, keys, values, the result, and a
    number per head and token.
    """
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, autocast):
        model = make_model(config, dtype)
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
        # Activations are another pass's own. What two passes keep both is weights, and
        # autocast's copies of them.
        first, *_ = forward(model, tokens)
        kept, taken, outputs = forward(model, tokens)
    given = {one.untyped_storage() for one in (tokens, *model.parameters())}
    shared = first.keys() & kept.keys()
    copies = {one: kept[one] for one in shared - given}
    kept = {one: places for one, places in kept.items() if one not in shared}
    return Forward(kept, copies, taken, outputs)


def stage_activations(counted, numbers):
    """Return the Activations of a stage with these blocks; counted: a Forward."""
    last = numbers[-1] == max(counted.outputs)
    first = -0.5 if numbers[0] == 0 else numbers[0]
    received = counted.outputs.get(numbers[0] - 1, set())
    sent = set() if last else counted.outputs[numbers[-1]]

    def own(places):
        """Of storages; the others are of other stages, or counted as received, sent."""
        found = {}
        for one, where in places.items():
            here = {n for n in where if first <= n < numbers[-1] + 1}
            if here and one not in received | sent:
                found[one] = here
        return found

    def size(storages):
        return sum(one.nbytes() for one in storages)

    kept, copies, taken = map(own, (counted.kept, counted.copies, counted.taken))
    outside = {one for one, places in kept.items() if any(n % 1 for n in places)}
    checkpointed = taken.keys() | outside
    recomputed = dict.fromkeys(numbers, 0)
    for one in kept.keys() - checkpointed:
        for number in kept[one]:
            recomputed[number] += one.nbytes()
    return Activations(
        kept=size(kept),
        checkpointed=size(checkpointed),
        recomputed=max(recomputed.values()),
        copies=size(copies),
        copies_outside=size(
            one for one, places in copies.items() if any(n % 1 for n in places)
        ),
        received=size(received),
        sent=size(sent),
    )


def count_shape(config, tensor_parallel=1):
    """Return the Shape of the model that a configuration describes."""
    return count_shapes(config, tensor_parallel=tensor_parallel)[0]


def count_activations(config, num_tokens, dtype, autocast):
    """Return the Activations of a whole model; for the arguments see count_forward."""
    counted = count_forward(config, num_tokens, dtype, autocast)
    return stage_activations(counted, range(len(counted.outputs)))


# ---- the sheet -----------------------------------------------------------------------
def row(name, rule, size):
    return f"  {name:<40}{rule:<20}{size:>16,}{size / 2**30:>10.3f}"


def rows(found, when):
    """Return a row for each Line that is there then."""
    return [row(one.name, one.rule, one.bytes) for one in found if one.when == when]


def letters(shape, activations, choices, rank):
    """Return what the letters of the rules stand for."""
    whole, own = shape.whole, numel(shape.tensors)
    groups, of = choices.gpus // choices.tensor_parallel, choices.tensor_parallel
    per = "tp group and micro-batch" if of > 1 else "GPU and micro-batch"
    text = []
    if choices.strategy == "pipeline":
        batches = choices.micro_batches or choices.gpus
        text.append(f"N = {choices.gpus:,} GPUs")
        text.append(f"M = {batches:,} micro-batches per step")
        size = max(activations.received, activations.sent)
        text.append(f"A = {size:,} bytes of an activation between two blocks")
        per = "micro-batch"
    elif of > 1:
        text.append(f"N = {groups:,} tp groups of {of:,} GPUs")
    elif choices.strategy != "single":
        text.append(f"N = {choices.gpus:,} GPUs")
    text += [
        f"T = {choices.tokens:,} tokens per {per}",
        f"V = {shape.vocab_size:,} tokens in the vocabulary",
        f"P = {whole:,} parameters",
    ]
    of_them = "of them"
    if choices.strategy == "pipeline":
        blocks = len(shape.blocks)
        text.append(f"p = {own:,} of them on rank {rank}, which has {blocks} blocks")
    elif of > 1:
        text.append(f"p = {own:,} of them in a GPU's part, which FSDP2 shards")
        of_them = "of these"
    if choices.strategy == "fsdp2":
        text.append(
            f"b = {max(map(numel, shape.blocks)):,} {of_them} in the largest block"
        )
        if of > 1:
            text.append(f"E = {shape.table:,} in the whole embedding")
        if shape.tied:
            text.append(f"e = {numel(shape.embedding):,} in the tied embedding")
            text.append(f"r = {numel(shape.root):,} in the root: this, and the rest")
        else:
            text.append(f"e = {numel(shape.embedding):,} in the embedding")
            text.append(f"h = {numel(shape.head):,} in the head")
            text.append(f"r = {numel(shape.root):,} in the root, which has the rest")
    return text


class Sheet(NamedTuple):
    """What is counted of a GPU, and its Lines."""

    shape: Shape
    activations: Activations
    lines: list

    @property
    def most(self):
        """Return the bytes at the fullest moment."""
        return max(totals(self.lines).values())


def counter(config):
    """Return a function: for Choices, the Sheets of a pipeline's stages, or one.

    It counts once what several choices have in common. Raises ValueError for those that
    the model does not allow.
    """
    shapes = functools.cache(functools.partial(count_shapes, config))

    @functools.cache
    def forward_of(tensor_parallel, *arguments):
        return count_forward(split_config(config, tensor_parallel), *arguments)

    def sheets_of(choices):
        stages = choices.gpus if choices.strategy == "pipeline" else 1
        dtype = DTYPES[choices.master if choices.autocast else choices.policy]
        found = []
        for rank, shape in enumerate(shapes(stages, choices.tensor_parallel)):
            counted = forward_of(
                choices.tensor_parallel, choices.tokens, dtype, choices.autocast
            )
            numbers = split_blocks(len(counted.outputs), stages)[rank]
            activations = stage_activations(counted, numbers)
            of_rank = lines(shape, activations, choices, rank)
            found.append(Sheet(shape, activations, of_rank))
        return found

    return sheets_of


def other_choices(choices):
    """Return {flags: Choices} of those that differ in one of them."""
    found = {}
    flags = ["activation_checkpointing"]
    if choices.strategy == "fsdp2":
        flags.append("grad_accum")
    for flag in flags:
        chosen = getattr(choices, flag)
        name = f"{'without ' if chosen else ''}--{flag.replace('_', '-')}"
        found[name] = dataclasses.replace(choices, **{flag: not chosen})
    alone = ""
    if choices.strategy == "fsdp2":
        for ranks in (1, 2, 4):
            if ranks != choices.tensor_parallel and choices.gpus % ranks == 0:
                changed = dataclasses.replace(choices, tensor_parallel=ranks)
                found[f"--tensor-parallel {ranks}"] = changed
        alone = "--tensor-parallel 1 " if choices.tensor_parallel > 1 else ""
    for strategy in (one for one in STRATEGIES if one != choices.strategy):
        if strategy != "pipeline" or can_be_pipeline(choices):
            changed = {"strategy": strategy, "tensor_parallel": 1}
            name = f"{alone}--strategy {strategy}"
            found[name] = dataclasses.replace(choices, **changed)
    return found


def can_be_pipeline(choices):
    return 1 < choices.gpus <= (choices.micro_batches or choices.gpus)


def sheet(name, config, choices):
    """Return the lines of text of a model's sheet.

    Raises ValueError if the model does not allow the choices.
    """
    sheets_of = counter(config)
    sheets = sheets_of(choices)
    rank = max(range(len(sheets)), key=lambda rank: sheets[rank].most)
    shape, activations, found = sheets[rank]
    how = STRATEGIES[choices.strategy]
    if choices.tensor_parallel > 1:
        how = "tensor parallelism, FSDP2 and AdamW"
    text = [
        f"{name}, trained with {how}.",
        "This is arithmetic: no GPU ran it.",
        "",
        *letters(shape, activations, choices, rank),
        "",
        f"{'':<42}{'rule':<20}{'bytes':>16}{'GiB':>10}",
        STATES,
        *rows(found, STATES),
        row("together", "", sum(one.bytes for one in found if one.when == STATES)),
    ]
    for number, (moment, together) in enumerate(totals(found).items()):
        text.append(moment if number else f"{moment}, the fullest moment")
        text += [*rows(found, moment), row("together with the states", "", together)]
    if len(sheets) > 1:
        text += ["", "the fullest moment of each rank"]
        text += [row(f"rank {n}", "", one.most) for n, one in enumerate(sheets)]
    text += ["", "the fullest moment with another choice"]
    for flags, changed in other_choices(choices).items():
        with contextlib.suppress(ValueError):  # this model does not allow it
            size = max(one.most for one in sheets_of(changed))
            text.append(row(flags, "", size))
    return [*text, "", READING, *rows(found, READING)]


# ---- the command ---------------------------------------------------------------------
class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line."""

    def error(self, message):
        fail(message.removeprefix("argument "))


def parse_args():
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=positive_int, default=8, help="how many share the work")
    add(
        "--tokens",
        type=positive_int,
        default=8192,
        help="of all sequences of a micro-batch: of a GPU's, or of a tp group's",
    )
    add(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="with a config.json of transformers; the default is Llama-3-8B's shape",
    )
    add("--strategy", choices=STRATEGIES, default="fsdp2", help="single: one GPU alone")
    add(
        "--policy",
        choices=BYTES,
        default="bf16",
        help="dtype of the computation: FSDP2's param_dtype, or autocast's",
    )
    add(
        "--master",
        choices=BYTES,
        default="float32",
        help="dtype of the weights that AdamW updates",
    )
    add(
        "--activation-checkpointing",
        action="store_true",
        help="keep a block's inputs, and compute the rest again when it is needed",
    )
    add(
        "--grad-accum",
        action="store_true",
        help="FSDP2: reduce gradients only after the last micro-batch",
    )
    add(
        "--tensor-parallel",
        type=positive_int,
        default=1,
        help="FSDP2: how many GPUs share each layer, as a tp group",
    )
    add(
        "--micro-batches",
        type=positive_int,
        help="of a pipeline's step; the default is as many as GPUs",
    )
    args = parser.parse_args()
    if (args.master, args.policy) == ("bf16", "float32"):
        parser.error("--policy float32: weights in bf16 compute in bf16")
    if args.tensor_parallel > 1 and args.strategy != "fsdp2":
        parser.error(f"--tensor-parallel: not with --strategy {args.strategy}")
    if args.gpus % args.tensor_parallel:
        parser.error(f"--tensor-parallel must divide --gpus ({args.gpus})")
    if args.strategy == "pipeline" and args.gpus == 1:
        parser.error("--strategy pipeline needs --gpus 2 or more")
    if args.strategy == "pipeline" and (args.micro_batches or args.gpus) < args.gpus:
        parser.error(
            f"--micro-batches {args.micro_batches}: 1F1B needs as many as there are"
            f" GPUs ({args.gpus}), or more"
        )
    return args


def llama_3_8b():
    """Return a configuration with the shape of Llama-3-8B."""
    return transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def read_config(folder):
    """Return the configuration in a folder; nothing is downloaded."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("there is no config.json in this folder")
    return transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def main():
    args = vars(parse_args())
    transformers.logging.set_verbosity_error()
    folder = args.pop("config")
    choices = Choices(**args)
    if folder is None:
        name, config = "A model of Llama-3-8B's shape", llama_3_8b()
        with one_line_errors():
            text = sheet(name, config, choices)
    else:
        # Wrong values in a file raise errors of many types.
        with one_line_errors(f"--config {folder}:", Exception):
            config = read_config(folder)
        kind = config.model_type
        with one_line_errors(f"--config {folder}: cannot count a {kind}:", Exception):
            text = sheet(f"{folder} ({kind})", config, choices)
    print(*text, sep="\n")


if __name__ == "__main__":
    main()
