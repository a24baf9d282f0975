"""Will it fit? Print the most that each GPU allocates while it trains a transformer.

python memory.py --gpus 8 --tokens 8192
python memory.py --gpus 8 --tokens 8192 --activation-checkpointing
python memory.py --room 79 --tokens 8192 --activation-checkpointing
python memory.py --gpus 1 --groups none --tokens 4096 --train qlora --loss-chunk 512
python memory.py --gpus 16 --tokens 8192 --tensor-parallel 2
python memory.py --gpus 1 --tokens 480 --config FOLDER
python memory.py --gpus 64 --activation-checkpointing --tokens-per-second 7000 \\
    --total-tokens 15e9 --bandwidth 40
python memory.py --gpus 1 --tokens 32768 --block gpt --layers 16 --width 1024 \\
    --heads 16 --vocabulary 256 --context-length 1024 --groups blocks

Without a shape it takes that of Llama-3-8B. --config reads the config.json of a model
whose blocks are a Llama's (LLAMAS lists them), without transformers. Flags of a shape
serve others with such blocks. --block gpt has GPT-2's blocks, with GELU and a head of
its own. --room says how many GPUs it takes, with a twentieth of each left free, and
--tokens-per-second how long a run takes at least. The table has a column for each
moment of a training step. Its lines are upper bounds, which are not all reached at
once, so the fullest column is one, too.

What it assumes:
- AdamW as on a GPU, where it updates all weights at once. Weights, gradients and
  averages are in float32. --precision bf16 is autocast, with FSDP2 also its policy,
  MixedPrecisionPolicy(bfloat16, reduce_dtype=float32). With bf16-weights, weights,
  gradients and averages are in bf16, too; FSDP2 still reduces in float32. Gradients are
  there all the time, as from the second micro-batch on.
- --train lora freezes the weights, and adds two matrices of --lora-rank to each linear
  layer of a block, or with --targets qv to the queries' and values' alone. Adapters are
  in float32. qlora keeps the linear layers in 4 bits, as bitsandbytes does with nf4 and
  double quantization, and the others in bf16. The scales are whole on each GPU. Only
  the weights were counted; what a step adds for them was read from its source.
- --optimizer adamw-8bit has averages of a byte, as torchao and bitsandbytes have, in
  blocks of 256; those of vectors and adapters stay in float32. It updates one tensor at
  a time.
- --offload is FSDP2's CPUOffloadPolicy: weights, gradients and averages are in host
  memory, where AdamW runs; GPUs have what they gather, and a group's shards on their
  way (as torch's source says).
- --loss-chunk C computes head and loss for C tokens at a time, each under
  torch.utils.checkpoint. torch's own linear_cross_entropy keeps other buffers.
- --groups says what fully_shard is called on: "ends": each block, the embedding, the
  head, and then the model (if the head has the embedding's weight, both stay in the
  root); "blocks": each block and the model; "whole": the model alone. Their weights are
  freed after the forward pass. "ddp" is DDP instead, and "none" is neither, on one GPU.
  Shards are of equal size.
- Attention by fused kernels, which keep no scores. Keys and values are repeated for all
  heads. Norms compute in float32 and keep their inputs so, as under autocast on a GPU.
  No dropout, no torch.compile. Activation checkpointing is that of each block.
- The loss is that of all logits at once, in float32. Your loop has a name for the
  logits, which keeps them until the next forward pass. If they are local to a function
  that has returned, 2 bytes of each number are gone (float32: 4), as in the stages.
- --tensor-parallel T splits each layer among T GPUs, which get the same tokens, as
  stage 14 does; FSDP2 shards what each has over --gpus / T. Divided by T are the heads,
  the hidden units, the rows of embeddings and head, and what attention and the MLP keep
  of them. Whole on each GPU are the norms, the biases of layers whose results are
  summed, what flows between the layers, and the logits: there is neither sequence
  parallelism nor loss_parallel. The embedding's gradient is whole for a moment, because
  torch computes all its rows and then takes the GPU's. If the head has the embedding's
  weight, it has it again after parallelize_module, which makes two of it.

It knows no pipelines, no experts, and no GPUs that share a sequence: for these,
docs/what_can_be_split.md has the bytes.

What it leaves out: memory that the allocator reserves and nobody uses, the CUDA
context, NCCL's buffers, other processes on the GPU, batches that wait to be used, and
what your script keeps in addition, such as an average of the weights. So compare it
with torch.cuda.max_memory_allocated() after two steps, and leave a few GiB free.

How close it is: with 2,048 tokens and more, at most 16 % above what was counted for
small models on a CPU (19 with tensor parallelism, on 2 and 4 processes), most of it for
the logits' name; with 64 tokens a third, because gathered weights, gradients and copies
are not all there at once. On one H100 it is 5 and 7 % above two runs of a GPT. On an
H200, a GPT with --offload took 1.0 GiB, where it says 1.9. A Llama's activations,
tensor parallelism, and all but AdamW on float32 weights were not compared on a GPU.

How long it takes: --tokens-per-second is what one GPU trained with the same flags, in
your own steps. Before you can measure, guess: find the number that gives 40 % of the
peak, on an H100 in bf16 400 TFLOP/s. N GPUs are at best N times as fast. A step lasts
as long as its --tokens compute, or as long as the GPU sends, whichever is longer: at
best, the two overlap. It sends the bytes of a ring, once per --tokens; with
--grad-accum, FSDP2 only gathers. --bandwidth is what check_cluster.py calls bus.
TFLOP/s are of matrix products, with attention as without a mask, and with what
activation checkpointing recomputes, which MFU leaves out.

The hours leave out waiting for the slowest rank, for data, evaluation, checkpoints and
restarts, and that a GPU is slower with fewer tokens. Measure several micro-batches per
step: FSDP2 also divides AdamW's step.
"""

import argparse
import bisect
import dataclasses
import inspect
import json
import math
import sys
from pathlib import Path

MOMENTS = ("forward", "loss", "backward", "last group", "optimizer")
GROUPS = ("ends", "blocks", "whole", "ddp", "none")
TARGETS = {"all": ("q", "k", "v", "o", "gate", "up", "down"), "qv": ("q", "v")}
PRECISIONS = ("bf16", "bf16-weights", "float32")
# With a Llama's blocks; Qwen2 adds biases to queries, keys and values, Qwen3 norms.
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
# The sizes of a Shape that tensor parallelism divides, in words.
DIVIDED = {
    "heads": "number of heads",
    "kv_heads": "number of key-value heads",
    "inner": "width of the MLP",
    "vocabulary": "vocabulary",
    "positions": "number of positions",
}
# cuBLAS's and cuBLASLt's, for the threads of the two passes, on a Hopper:
# docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces
WORKSPACES = 4 * 32 * 2**20
# Bytes of one of AdamW's averages in 8 bits: a number, and a scale for 256.
EIGHT_BITS = 1 + 4 / 256
# Of a weight in 4 bits: its bits, sharded; then, for each 64, a scale of one byte, and
# for each 256 of these another of 4. A layer also has two tables and an offset.
FOUR_BITS, SCALES, TABLES = 0.5, 1 / 64 + 4 / (64 * 256), 4 * (16 + 256 + 1)
MOST_GPUS = 4096  # that --room looks at


# ---- the model -----------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; the defaults are Llama-3-8B's.

    kv_heads: of keys and values; inner: the width of the MLP; positions: how many
    positions have a learned embedding; tied: the head has the embedding's weight;
    qkv_bias, output_bias, mlp_bias, head_norm (of queries and keys): of a Llama; a GPT
    always has biases.
    """

    block: str = "llama"
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False

    @property
    def embedding(self):
        """The number of weights of the embedding, which are those of the head."""
        return self.vocabulary * self.width

    @property
    def norm(self):
        """The number of weights of a norm."""
        return self.width * (2 if self.block == "gpt" else 1)

    @property
    def of_block(self):
        """The number of weights of a block."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.width * (queries + keys)
        if self.block == "gpt":
            biases = queries + 2 * keys + self.inner + 2 * self.width
            return attention + 2 * self.width * self.inner + biases + 2 * self.norm
        biases = (queries + 2 * keys) * self.qkv_bias + self.width * self.output_bias
        biases += (2 * self.inner + self.width) * self.mlp_bias
        biases += 2 * self.head_dim * self.head_norm
        return attention + 3 * self.width * self.inner + biases + 2 * self.norm

    @property
    def linears(self):
        """The sizes of a Llama block's linear layers: {name: (inputs, outputs)}."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (self.width, queries),
            "k": (self.width, keys),
            "v": (self.width, keys),
            "o": (queries, self.width),
            "gate": (self.width, self.inner),
            "up": (self.width, self.inner),
            "down": (self.inner, self.width),
        }

    @property
    def matrices(self):
        """The number of weights of a block's matrices; the others are vectors."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = (2 if self.block == "gpt" else 3) * self.width * self.inner
        return 2 * self.width * (queries + keys) + mlp

    def adapters(self, rank, targets):
        """The number of weights of a block's adapters, on "all" its layers or "qv"."""
        sizes = [self.linears[name] for name in TARGETS[targets]]
        return sum(rank * (one + other) for one, other in sizes)

    @property
    def parameters(self):
        """The number of all weights."""
        ends = self.embedding * (1 if self.tied else 2) + self.positions * self.width
        return ends + self.layers * self.of_block + self.norm

    def divided(self, by):
        """Return the Shape of what a GPU of a tensor-parallel group has."""
        parts = {name: getattr(self, name) // by for name in DIVIDED}
        return dataclasses.replace(self, **parts)


def from_config(path):
    """Return the Shape in a config.json of transformers, or in a folder with one.

    Raises ValueError or OSError if there is none, or if it is of another architecture.
    """
    path = path / "config.json" if path.is_dir() else path
    config = json.loads(path.read_text())
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in LLAMAS:
        raise ValueError(f"cannot count a {kind!r}; known are {', '.join(LLAMAS)}")

    def number(key, default=None):
        value = config.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"config.json has no {key}")
        if type(value) is not int or value < 1:
            text = f"{key} is {value!r}, and should be an integer, 1 or more"
            raise ValueError(text)
        return value

    width, heads = number("hidden_size"), number("num_attention_heads")
    biased = kind not in ("mistral", "qwen2") and bool(config.get("attention_bias"))
    has_biases = kind in ("llama", "smollm3", "granite")
    return Shape(
        layers=number("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", width // heads),
        inner=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=kind == "qwen2" or biased,
        output_bias=biased,
        mlp_bias=has_biases and bool(config.get("mlp_bias")),
        head_norm=kind == "qwen3",
    )


# ---- bytes ---------------------------------------------------------------------------
def activations(shape, low, residual):
    """Return bytes per token that the forward pass keeps for the backward pass.

    They are those of a block; of what is in no block; and what a block's backward pass
    adds for a moment: the gradients of activations. low: bytes of a number in matrix
    products; residual: of one between the blocks.
    """
    width, heads, inner = shape.width, shape.heads, shape.inner
    if shape.block == "gpt":
        # its input, in float32, and its output, as the next layer takes it; two numbers
        norm = (4 + low) * width + 8
        mlp = 2 * inner  # before and after GELU
    else:
        # also the scaled input, which is multiplied by the weight
        norm = (4 + residual + low) * width + 4
        mlp = 4 * inner  # gate, SiLU of gate, up, and their product
    # queries, keys, values and result, and a number for each head
    attention = 4 * heads * shape.head_dim * low + 4 * heads
    if shape.head_norm:  # of queries and keys, as the other norms
        attention += 2 * heads * ((4 + 2 * low) * shape.head_dim + 4)
    block = 2 * norm + attention + mlp * low
    # and the tokens, their positions, the targets, and the rotations of a Llama
    outside = norm + 24 + (0 if shape.block == "gpt" else 2 * 4 * shape.head_dim)
    # of an MLP, or of a norm, which computes in float32
    return block, outside, max((2 * inner + 2 * width) * low, 4 * 4 * width)


def split(shape, groups, block, end, norm, positions):
    """Return what the root has, and a list of what the other groups have.

    block, end, norm, positions: what each block, the embedding or the head, the last
    norm, and the embedding of positions have.
    """
    blocks = [block] * shape.layers
    root = (1 if shape.tied else 2) * end + norm + positions
    if groups == "whole":
        return root + sum(blocks), []
    if groups == "ends" and not shape.tied:
        # The last norm may be in the root or with the head, so it counts in both.
        return root - 2 * end, [end, *blocks, end + norm]
    return root, blocks


def at_once(before, groups):
    """Return how many gathered weights, at most, are there in a pass over groups.

    While a group's are copied out of the buffer that they were gathered into, both are
    there, and so is the buffer of the group before. before: the weights of that group.
    """
    pairs = zip([before, *groups], groups, strict=False)
    return max((one + 2 * group for one, group in pairs), default=0)


def in_parts(shape, low, train, adapters):
    """Return the bytes that FSDP2 gathers, and the numbers that it reduces.

    Each is a list: of a block, an embedding, the norm and the embedding of positions.
    """
    positions = shape.positions * shape.width
    trained = [shape.of_block, shape.embedding, shape.norm, positions]
    gathered = [low * one for one in trained]
    if train != "all":
        gathered[0] += low * adapters
        trained = [adapters, 0, 0, 0]
    if train == "qlora":
        gathered[0] -= shape.matrices * (low - FOUR_BITS)
    return gathered, trained


def table(
    shape,
    gpus=8,
    tokens=8192,
    precision="bf16",
    groups="ends",
    activation_checkpointing=False,
    grad_accum=False,
    tensor_parallel=1,
    train="all",
    optimizer="adamw",
    offload=False,
    loss_chunk=0,
    lora_rank=8,
    targets="all",
):
    """Return {line: bytes at each of MOMENTS} of one GPU.

    tokens: of a micro-batch of this GPU; grad_accum: gradients are reduced only after
    the last micro-batch, by set_requires_gradient_sync; tensor_parallel: how many GPUs
    split each layer; train: "all", "lora" or "qlora"; loss_chunk: tokens, 0 is all at
    once. misfit() says which of these go together. The moments are: the forward pass;
    when the loss is differentiated; the backward pass, as far as blocks and head; when
    the last group's gradients are reduced; and AdamW's step.
    """
    low, sharded = 4 if precision == "float32" else 2, groups not in ("ddp", "none")
    whole = shape
    shape, gpus = shape.divided(tensor_parallel), gpus // tensor_parallel
    adapters = 0 if train == "all" else shape.adapters(lora_rank, targets)
    lines = {}
    if not offload:
        ranks, given = gpus if sharded else 1, (precision, train, optimizer, grad_accum)
        lines = kept_all_the_time(shape, ranks, adapters, *given)
    gathered, trained = in_parts(shape, low, train, adapters)
    if sharded:
        lines |= of_groups(shape, gpus, low, groups, gathered, trained)
        if tensor_parallel > 1:
            lines["embedding's gradient"] = [0, 0, 0, low * whole.embedding, 0]
    else:
        size = 2 if train == "all" and precision == "bf16-weights" else 4
        numbers = shape.parameters if train == "all" else shape.layers * adapters
        if groups == "ddp":
            lines["DDP's buckets"] = [size * numbers] * 5
        # of all but embeddings, which are looked up, and of weights that are in bf16
        used = shape.layers * shape.of_block + shape.norm + shape.embedding
        used *= precision == "bf16" and train != "qlora"
        copies = 2 * (used + shape.layers * adapters) * (low == 2)
        lines["autocast's copies of weights"] = [copies] * 3 + [0, 0]
    if offload:  # a group's shards, as they are stored, and converted
        stored = 2 if precision == "bf16-weights" else 4
        bytes_of = stored if stored == low else stored + low
        parts = [one // low for one in gathered]
        root, others = split(shape, groups, *parts)
        moved = bytes_of * -(-max(root, *others, 0) // gpus) + 4 * adapters
        lines["shards on their way"] = [moved] * 4 + [0]
    if train == "qlora":  # with their scales, for one product
        largest = shape.width * max(shape.inner, shape.heads * shape.head_dim)
        moment = int(largest * (low + 4 / 64))
        lines["weights out of 4 bits"] = [moment, 0, moment, 0, 0]

    small = precision == "bf16-weights" or train == "qlora"
    residual = low if sharded or small else 4
    block, outside, moving = activations(shape, low, residual)
    if train != "all":  # what is between the two matrices; the sum with the layer's own
        block += len(TARGETS[targets]) * lora_rank * low
        moving += 2 * shape.inner * low
    kept, again = shape.layers * block + outside, 0
    if activation_checkpointing:
        kept, again = shape.layers * residual * shape.width + outside, block
    # The one that is recomputed last, or first, has its gradients in addition.
    most = [kept + again, kept, kept + again + moving, moving, 0]
    lines["activations"] = [tokens * one for one in most]
    lines |= of_loss(whole, tokens, low, sharded, loss_chunk, train)
    lines["workspaces of cuBLAS"] = [WORKSPACES] * 5
    return lines


def of_loss(shape, tokens, low, sharded, chunk, train):
    """Return the lines of the logits and the loss; chunk: tokens, or 0."""
    if not chunk or chunk >= tokens:
        # Kept are the logits and their log-softmax. At the peak there are the gradients
        # of both in float32, too; then only that of the logits.
        most = [low + 4, low + 4 + 4 + 4, low + low, low, low]
        numbers = tokens * shape.vocabulary
        return {"logits and loss": [numbers * one for one in most]}
    numbers = chunk * shape.vocabulary
    # The gradients of what enters the head are kept, and put together at the end.
    inputs = 2 * tokens * shape.width * low
    lines = {
        "logits and loss": [numbers * (low + 4), numbers * (low + 12) + inputs]
        + [inputs, 0, 0]
    }
    if train == "all":  # of one chunk, and the sum of those before
        both = 2 * low if sharded else 4 + low
        lines["head's gradients"] = [0, both * shape.embedding, 0, 0, 0]
    return lines


def kept_all_the_time(shape, ranks, adapters, precision, train, optimizer, grad_accum):
    """Return the lines of weights, gradients and averages on one of some ranks.

    With --offload they are in host memory. adapters: the weights of those of a block.
    """

    def own(numbers):
        return -(-numbers // ranks)

    lines, number = {}, 2 if precision == "bf16-weights" else 4
    trained, name = shape.parameters, "weights"
    if train != "all":
        frozen, kind = number * own(trained), {2: "bf16", 4: "float32"}[number]
        if train == "qlora":
            bits, kind = shape.layers * shape.matrices, "4 bits"
            frozen = FOUR_BITS * own(bits) + SCALES * bits + 2 * own(trained - bits)
            frozen = int(frozen) + 7 * shape.layers * TABLES
        lines[f"frozen weights, {kind}"] = [frozen] * 5
        trained, name, number = shape.layers * adapters, "adapters", 4
    kind = {2: "bf16", 4: "float32"}[number]
    lines[f"{name}, {kind}"] = [number * own(trained)] * 5
    if grad_accum:  # FSDP2 adds them up as it reduces them
        lines["gradients, float32"] = [4 * trained] * 5
    else:
        lines[f"gradients, {kind}"] = [number * own(trained)] * 5
    averages = 2 * number * own(trained)
    if optimizer == "adamw-8bit" and train == "all":
        ends = shape.embedding * (1 if shape.tied else 2)
        matrices = shape.layers * shape.matrices + ends + shape.positions * shape.width
        averages = 2 * EIGHT_BITS * own(matrices) + 2 * number * own(trained - matrices)
        kind = "8 bits"
        # and for each matrix the two tables of what its numbers mean
        averages = int(averages) + 2 * 1024 * (7 * shape.layers + 3)
    lines[f"AdamW's averages, {kind}"] = [averages] * 5
    if optimizer == "adamw":
        lines["square roots of averages"] = [0, 0, 0, 0, number * own(trained)]
    return lines


def in_host_memory(shape, options):
    """Return the bytes that --offload keeps there for each GPU."""
    by = options["tensor_parallel"]
    shape, train = shape.divided(by), options["train"]
    names = ("precision", "train", "optimizer", "grad_accum")
    given = [options[name] for name in names]
    rank, targets = options["lora_rank"], options["targets"]
    adapters = 0 if train == "all" else shape.adapters(rank, targets)
    lines = kept_all_the_time(shape, options["gpus"] // by, adapters, *given)
    return max(together(lines))


def of_groups(shape, gpus, low, groups, gathered, trained):
    """Return the lines of what FSDP2 gathers and reduces; low: bytes of a gradient.

    gathered: the bytes, and trained: the numbers, that a block, an embedding, the norm
    and the embedding of positions have.
    """
    root, others = split(shape, groups, *gathered)
    apart = len(others) > shape.layers
    head = others[-1] if apart else 0
    first = others[0] if apart else 0
    lines = {
        "gathered weights": [
            max(2 * root, root + at_once(root, others)),
            root + head,
            root + at_once(0, others[::-1]),
            root + 2 * first,
            0,
        ]
    }
    lines["gathered weights"] = [int(one) for one in lines["gathered weights"]]
    root, others = split(shape, groups, *trained)
    first, largest = others[0] if apart else 0, max(others, default=0)
    # The head's gradient waits in the root for the embedding's, which is added to it if
    # the two are one weight.
    end = trained[1]
    waiting = 0 if apart else end if others else root
    last = root + first + (2 * end if shape.tied else 0)
    reduced = largest, max(root, first)
    lines["whole gradients"] = [0, 0, low * (waiting + largest), low * last, 0]
    # in float32, and the shard that is left of it
    copies = [4 * (one + one // gpus) for one in reduced]
    return lines | {"copy to reduce": [0, 0, *copies, 0]}


def misfit(shape, options):
    """Return a flag's name and why it does not go with the others, or ("", "")."""
    by, gpus = options["tensor_parallel"], options["gpus"]
    groups, train = options["groups"], options["train"]
    sharded = groups not in ("ddp", "none")
    if groups == "none" and gpus > 1:
        return "groups", f"none is for one GPU, not for {gpus}"
    if options["grad_accum"] and not sharded:
        return "grad_accum", "is FSDP2's; DDP holds whole gradients anyway"
    if options["offload"] and not sharded:
        return "offload", "goes with FSDP2, whose policy it is"
    if options["offload"] and train == "qlora":
        return "offload", "does not go with weights in 4 bits"
    if train != "all" and shape.block == "gpt":
        return "train", f"{train} is counted for a Llama's blocks, not for GPT-2's"
    if by == 1:
        return "", ""
    if not sharded:
        return "tensor_parallel", "goes with FSDP2, not with DDP"
    if train != "all":
        return "tensor_parallel", f"is not counted with {train}"
    sizes = {"number of GPUs": gpus}
    sizes |= {text: getattr(shape, name) for name, text in DIVIDED.items()}
    wrong = [one for one in sizes.items() if one[1] % by]
    if wrong:
        return "tensor_parallel", "must divide the {} ({})".format(*wrong[0])
    return "", ""


def together(lines):
    """Return the sum of all lines at each of MOMENTS."""
    return [sum(column) for column in zip(*lines.values(), strict=True)]


def smallest(shape, room, options):
    """Return how many GPUs of room GiB it takes, or None if more do not help.

    A twentieth of each stays free, for what the table leaves out.
    """
    by = options["tensor_parallel"]
    many = MOST_GPUS // by if options["groups"] not in ("ddp", "none") else 1

    def fits(groups):
        lines = table(shape, **{**options, "gpus": by * groups})
        return max(together(lines)) <= 0.95 * room * 2**30

    found = bisect.bisect_left(range(1, many + 1), True, key=fits)
    return by * (found + 1) if found < many else None


# ---- how long ------------------------------------------------------------------------
def operations(shape, length, options):
    """Return the floating-point operations of matrix products, of a step, per token.

    length: tokens of a sequence.
    """
    train, rank, targets = (options[n] for n in ("train", "lora_rank", "targets"))
    each = 6 if train == "all" else 4  # no gradient of a frozen weight
    adapters = 0 if train == "all" else shape.adapters(rank, targets)
    attention = 4 * length * shape.heads * shape.head_dim
    block = each * shape.matrices + 6 * adapters + 3 * attention
    if options["activation_checkpointing"]:
        # It stops before the last product: the backward pass does not need the result.
        adapted = train != "all" and "down" in TARGETS[targets]
        last = shape.width * (rank if adapted else shape.inner)
        block += 2 * (shape.matrices + adapters - last) + attention
    return shape.layers * block + each * shape.embedding


def sent(shape, options):
    """Return the bytes that a GPU sends in a step of one micro-batch, around a ring."""
    gpus, groups, train = (options[name] for name in ("gpus", "groups", "train"))
    precision, rank, targets = (
        options[name] for name in ("precision", "lora_rank", "targets")
    )
    low = 4 if precision == "float32" else 2
    adapters = 0 if train == "all" else shape.adapters(rank, targets)
    gathered, trained = in_parts(shape, low, train, adapters)
    reduced, _ = split(shape, "whole", *trained)
    if groups in ("ddp", "none"):
        size = 2 if precision == "bf16-weights" and train == "all" else 4
        return 2 * size * reduced * (gpus - 1) / gpus
    whole, _ = split(shape, "whole", *gathered)
    # The backward pass gathers again what was freed: neither the root nor the head, and
    # no frozen embedding (sharded.py's is not gathered: nobody would wait for it).
    _, others = split(shape, groups, *gathered)
    first = int(len(others) > shape.layers and train != "all")
    again = sum(others[first : shape.layers + 1])
    reduced = 0 if options["grad_accum"] else 4 * reduced
    return (whole + again + reduced) * (gpus - 1) / gpus


def how_long(shape, options, tokens_per_second, total_tokens, bandwidth):
    """Return the hours that a run takes at least, and a step's seconds.

    These are how long it computes, and sends. tokens_per_second: measured on one GPU;
    bandwidth: GB/s that a GPU sends, or 0, with which sending takes no time.
    """
    computes = options["tokens"] / tokens_per_second
    sends = sent(shape, options) / (1e9 * bandwidth) if bandwidth else 0
    steps = total_tokens / (options["gpus"] * options["tokens"])
    return steps * max(computes, sends) / 3600, computes, sends


# ---- the command ---------------------------------------------------------------------
def positive(text):
    """Return a flag's number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer, 1 or more")
    return int(text)


def amount(text):
    """Return a flag's number above 0, such as 2.5 or 15e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


class ArgumentParser(argparse.ArgumentParser):
    """Reports what is wrong in one line."""

    def error(self, message):
        """Print it and exit with code 2."""
        sys.stderr.write(f"{self.prog}: error: {message}\n")
        sys.exit(2)


def parse_args(words=None):
    """Return the flags, and the Shape that they mean."""
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=positive, help="that share the work; default: 8, or --room's")
    text = "of a micro-batch of one GPU, or tensor-parallel group: 1 sequence or more"
    add("--tokens", type=positive, default=8192, help=text)
    text = "GPUs that split each layer, for the same tokens; default: 1"
    add("--tensor-parallel", type=positive, default=1, metavar="T", help=text)
    text = "of a GPU (an H100: 79): how many does it take?"
    add("--room", type=positive, metavar="GIB", help=text)
    text = "all weights, or adapters, of frozen weights or of weights in 4 bits"
    add("--train", choices=("all", "lora", "qlora"), default="all", help=text)
    add("--lora-rank", type=positive, default=8, metavar="R")
    text = "layers with adapters: all of a block, or those of queries and values"
    add("--targets", choices=TARGETS, default="all", help=text)
    add("--precision", choices=PRECISIONS, default="bf16")
    add("--optimizer", choices=("adamw", "adamw-8bit"), default="adamw")
    add("--offload", action="store_true", help="weights and AdamW in host memory")
    text = "tokens whose loss is computed at a time; default: all"
    add("--loss-chunk", type=positive, default=0, metavar="C", help=text)
    add("--groups", choices=GROUPS, default="ends", help="how FSDP2 wraps the model")
    add("--activation-checkpointing", action="store_true", help="of each block")
    add("--grad-accum", action="store_true", help="reduce after the last micro-batch")
    add("--config", type=Path, metavar="FOLDER", help="or a config.json")
    add = parser.add_argument_group("how long").add_argument
    add("--tokens-per-second", type=amount, metavar="X", help="measured on one GPU")
    add("--total-tokens", type=amount, metavar="T", help="of the run, such as 15e9")
    text = "GB/s that a GPU sends; default: sending takes no time"
    add("--bandwidth", type=amount, default=0, help=text)
    text = "tokens of a sequence; default: --context-length, or --tokens"
    add("--length", type=positive, default=0, metavar="L", help=text)
    sizes = parser.add_argument_group("a shape, instead of --config")
    add = sizes.add_argument
    add("--block", choices=("llama", "gpt"), help="default: llama")
    add("--layers", type=positive)
    add("--width", type=positive)
    add("--heads", type=positive)
    add("--kv-heads", type=positive, help="of keys and values; default: --heads")
    add("--inner", type=positive, help="the width of the MLP; default: 4 x --width")
    add("--vocabulary", type=positive)
    add("--context-length", type=positive, help="learned positions, as a gpt has")
    add("--tied", action="store_true", help="the head has the embedding's weight")
    args = parser.parse_args(words)
    names = ("block", "layers", "width", "heads", "kv_heads", "inner", "vocabulary")
    given = {name: getattr(args, name) for name in (*names, "context_length", "tied")}
    given = {name: value for name, value in given.items() if value}
    shape = shape_of(parser, args, given)
    asked, one = args.room and not args.gpus, args.groups == "none"
    args.gpus = args.gpus or (1 if one else args.tensor_parallel if asked else 8)
    name, wrong = misfit(shape, options_of(args))
    if wrong:
        parser.error(f"--{name.replace('_', '-')} {wrong}")
    check_how_long(parser, args, shape)
    args.smallest = smallest(shape, args.room, options_of(args)) if args.room else None
    if asked and args.smallest:
        args.gpus = args.smallest
    return args, shape


def check_how_long(parser, args, shape):
    """Check the flags of "how long", and give --length its default."""
    names = ("tokens_per_second", "total_tokens", "bandwidth", "length")
    flags = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    given = [flag for flag, value in flags.items() if value]
    missing = [flag for flag in [*flags][:2] if given and flag not in given]
    if missing:
        parser.error(f"{given[0]} also needs {' and '.join(missing)}")
    if given and args.tensor_parallel > 1:
        parser.error(f"{given[0]} is not counted with --tensor-parallel")
    if args.length > args.tokens:
        parser.error(f"--length is more than --tokens ({args.tokens})")
    args.length = args.length or min(shape.positions or args.tokens, args.tokens)


def options_of(args):
    """Return the flags that table() takes."""
    names = list(inspect.signature(table).parameters)[1:]
    return {name: getattr(args, name) for name in names}


def shape_of(parser, args, given):
    """Return the Shape that the flags mean; given: those of a shape."""
    if args.config:
        if given:
            parser.error(f"--config has the shape; leave out --{[*given][0]}")
        try:
            return from_config(args.config)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            parser.error(f"--config {args.config}: {reason}")
    if not given:
        return Shape()
    needed = ("layers", "width", "heads", "vocabulary")
    if missing := [f"--{name}" for name in needed if name not in given]:
        parser.error(f"a shape also needs {', '.join(missing)}")
    if args.width % args.heads:
        parser.error(f"--heads must divide --width ({args.width})")
    given["positions"] = given.pop("context_length", 0)
    given.setdefault("kv_heads", args.heads)
    given.setdefault("inner", 4 * args.width)
    return Shape(head_dim=args.width // args.heads, **given)


def main():
    """Print the table."""
    args, shape = parse_args()
    options = options_of(args)
    lines = table(shape, **options)
    sums = together(lines)
    print(f"{shape.parameters:,} parameters; GiB on each GPU, at most:")
    print(" " * 29 + "".join(f"{name:>11}" for name in MOMENTS))
    for name, sizes in {**lines, "together": sums}.items():
        cells = [f"{size / 2**30:.2f}" if size else "-" for size in sizes]
        print(f"{name:29}" + "".join(f"{cell:>11}" for cell in cells))
    print(f"at most {max(sums) / 2**30:.1f} GiB: {MOMENTS[sums.index(max(sums))]}")
    if args.offload:
        size = in_host_memory(shape, options) / 2**30
        print(f"and {size:.1f} GiB of host memory for each GPU")
    if args.smallest:
        gpus = "1 GPU" if args.smallest == 1 else f"{args.smallest} GPUs"
        print(f"it takes {gpus} of {args.room} GiB, with a twentieth of each left free")
    elif args.room:
        print(f"more GPUs of {args.room} GiB alone do not make it fit")
    if args.tokens_per_second:
        print_how_long(args, shape, options)


def print_how_long(args, shape, options):
    """Print hours or days, what the network adds, and what the measured speed means."""
    speed, each = args.tokens_per_second, operations(shape, args.length, options)
    given = speed, args.total_tokens, args.bandwidth
    hours, computes, sends = how_long(shape, options, *given)
    share = 1 - computes / max(computes, sends)
    least = f"{hours / 24:,.2f} days" if hours >= 48 else f"{hours:,.2f} hours"
    waits = f"{share:.0%} of them wait for the network"
    waits = waits if args.bandwidth else "the network is not counted"
    print(f"at least {least}, {hours * args.gpus:,.2f} GPU hours; {waits}")
    rate = f"{speed * each / 1e12:.1f} TFLOP/s, {each / 1e9:.2f} GFLOP each"
    size = f"{sent(shape, options) / 1e9:.2f} GB"
    print(f"{speed:,.0f} tokens/s are {rate}; a step sends {size}")


if __name__ == "__main__":
    main()
