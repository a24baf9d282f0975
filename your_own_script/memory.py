"""Will it fit? Print the most that each GPU allocates while it trains a transformer.

python memory.py --gpus 8 --tokens 8192 --activation-checkpointing
python memory.py --room 79 --tokens 8192 --activation-checkpointing
python memory.py --gpus 1 --tokens 4096 --lora-rank 8 --config FOLDER
python memory.py --gpus 64 --tokens-per-second 7000 --total-tokens 15e9 --bandwidth 40

The model is Llama-3-8B, or that of a config.json of transformers (--config), with a
Llama's blocks. --room says how many GPUs it takes, with a twentieth of each left free.
The table has a column for each moment of a training step. Its lines are upper bounds,
and so is the fullest column. That column was compared with the bytes that a small Llama
takes on two CPU ranks, by default and with float32, --ddp, --activation-checkpointing
and --lora-rank. --room, --grad-accum, adamw-8bit, one weight for embedding and head,
Qwen3's norms and hours are not tested.

What it assumes:
- AdamW as on a GPU, where it updates all weights at once. Weights, gradients and
  averages are in float32. --precision bf16 is autocast, with FSDP2 also its policy,
  MixedPrecisionPolicy(bfloat16, reduce_dtype=float32). Gradients are there all the
  time, as from the second micro-batch on.
- --lora-rank freezes the weights, in bf16 unless --precision is float32, and adds two
  matrices of this rank, in float32, to each linear layer of a block.
- --optimizer adamw-8bit has averages of a byte, in blocks of 256, as torchao has; those
  of vectors and adapters stay in float32. It updates one tensor at a time.
- fully_shard is called on each block, the embedding, the head, and then the model. If
  the head has the embedding's weight, both stay in the root. --ddp is DDP instead.
- Attention by fused kernels, which keep no scores. Norms compute in float32 and keep
  their inputs so, as under autocast on a GPU. No dropout, no torch.compile.
- The loss is that of all logits at once, in float32. Your loop has a name for the
  logits, which keeps them until the next forward pass.

It leaves out biases, memory that the allocator reserves and nobody uses, the CUDA
context, NCCL's buffers, and what your script keeps in addition. So compare it with
torch.cuda.max_memory_allocated() after two steps, and leave a few GiB free.

--tokens-per-second is what one GPU trained with the same flags. A step lasts as long as
it computes or sends, whichever is longer. --bandwidth is what check_cluster.py calls
bus. The hours leave out the slowest rank, data, evaluation, checkpoints and restarts.
"""

import argparse
import dataclasses
import inspect
import json
import math
from pathlib import Path

MOMENTS = ("forward", "loss", "backward", "last group", "optimizer")
LOW = {"bf16": 2, "float32": 4}  # bytes of a number in matrix products
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
# cuBLAS's and cuBLASLt's, for the threads of the two passes, on a Hopper:
# docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces
WORKSPACES = 4 * 32 * 2**20
KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
}


# ---- the model -----------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; the defaults are Llama-3-8B's.

    kv_heads: of keys and values; inner: the width of the MLP; tied: the head has the
    embedding's weight; head_norm: queries and keys have norms, as Qwen3's.
    """

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    tied: bool = False
    head_norm: bool = False

    @property
    def matrices(self):
        """The number of weights of a block's linear layers."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.width * self.inner

    @property
    def of_block(self):
        """The number of weights of a block."""
        return self.matrices + 2 * self.width + 2 * self.head_dim * self.head_norm

    @property
    def embedding(self):
        """The number of weights of the embedding, which are those of the head."""
        return self.vocabulary * self.width

    @property
    def parameters(self):
        """The number of all weights."""
        ends = self.embedding * (1 if self.tied else 2)
        return ends + self.layers * self.of_block + self.width

    def adapters(self, rank):
        """The number of weights of a block's adapters, two matrices for each layer."""
        attention = 4 * self.width + 2 * (self.heads + self.kv_heads) * self.head_dim
        return (rank or 0) * (attention + 3 * (self.width + self.inner))


def from_config(path):
    """Return the Shape in a config.json of transformers, or in a folder with one.

    Raises ValueError or OSError if there is none, or if it is of another architecture.
    """
    path = path / "config.json" if path.is_dir() else path
    config = json.loads(path.read_text())
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in LLAMAS:
        raise ValueError(f"cannot count a {kind!r}; known are {', '.join(LLAMAS)}")
    found = {name: config.get(key) for name, key in KEYS.items()}
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{KEYS[name]} is {value!r}, not an integer above 0")
    head_dim = config.get("head_dim") or found["width"] // found["heads"]
    tied = bool(config.get("tie_word_embeddings"))
    return Shape(**found, head_dim=head_dim, tied=tied, head_norm=kind == "qwen3")


# ---- bytes ---------------------------------------------------------------------------
def activations(shape, low, residual):
    """Return bytes per token that the forward pass keeps for the backward pass.

    They are those of a block; of what is in no block; and what a block's backward pass
    adds for a moment: the gradients of activations. low: bytes of a number in matrix
    products; residual: of one between the blocks.
    """
    width, heads, inner = shape.width, shape.heads, shape.inner
    # its input, in float32; the scaled input, which is multiplied by the weight; its
    # output, as the next layer takes it; and a number
    norm = (4 + residual + low) * width + 4
    # queries, keys, values and result, and a number for each head; keys and values are
    # repeated for all heads
    attention = 4 * heads * shape.head_dim * low + 4 * heads
    if shape.head_norm:  # of queries and keys, as the other norms
        attention += 2 * heads * ((4 + 2 * low) * shape.head_dim + 4)
    # gate, SiLU of gate, up, and their product
    block = 2 * norm + attention + 4 * inner * low
    if residual > low:  # autocast converts a norm's output for each layer that takes it
        block += 3 * width * low
    # and the tokens, their positions, the targets, and the rotations
    outside = norm + 24 + 2 * 4 * shape.head_dim
    # of an MLP, or of a norm, which computes in float32
    return block, outside, max((2 * inner + 2 * width) * low, 4 * 4 * width)


def split(shape, block, end, norm):
    """Return what the root has, and a list of what the other groups have.

    block, end, norm: what each block, the embedding or the head, and the last norm
    have.
    """
    blocks = [block] * shape.layers
    if shape.tied:
        return end + norm, blocks
    # The last norm may be in the root or with the head, so it counts in both.
    return norm, [end, *blocks, end + norm]


def at_once(before, groups):
    """Return how many gathered weights, at most, are there in a pass over groups.

    While a group's are copied out of the buffer that they were gathered into, both are
    there, and so is the buffer of the group before. before: the weights of that group.
    """
    pairs = zip([before, *groups], groups, strict=False)
    return max(one + 2 * group for one, group in pairs)


def in_parts(shape, low, adapters):
    """Return the bytes that FSDP2 gathers, and the numbers that it reduces.

    Each is a list: of a block, an embedding or head, and the last norm.
    """
    trained = [shape.of_block, shape.embedding, shape.width]
    gathered = [low * one for one in trained]
    gathered[0] += low * adapters
    return gathered, [adapters, 0, 0] if adapters else trained


def table(
    shape,
    gpus=8,
    tokens=8192,
    precision="bf16",
    ddp=False,
    activation_checkpointing=False,
    grad_accum=False,
    optimizer="adamw",
    lora_rank=None,
):
    """Return {line: bytes at each of MOMENTS} of one GPU.

    tokens: of a micro-batch of this GPU; grad_accum: gradients are reduced only after
    the last micro-batch, by set_requires_gradient_sync; lora_rank: None trains
    all weights. The moments are: the forward pass; when the loss is differentiated; the
    backward pass, as far as blocks and head; when the last group's gradients are
    reduced; and AdamW's step.
    """
    low = LOW[precision]
    adapters = shape.adapters(lora_rank)
    ranks = 1 if ddp else gpus
    lines = kept_all_the_time(shape, ranks, low, adapters, optimizer, grad_accum)
    if not ddp:
        lines |= of_groups(shape, gpus, low, *in_parts(shape, low, adapters))
    else:
        numbers = shape.layers * adapters or shape.parameters
        lines["DDP's buckets"] = [4 * numbers] * 5
        # The embedding is looked up, not converted; frozen weights are in bf16 already.
        used = shape.layers * shape.of_block + shape.width + shape.embedding
        copies = 2 * (shape.layers * adapters or used) * (low == 2)
        lines["autocast's copies of weights"] = [copies] * 3 + [0, 0]

    residual = 4 if ddp and not adapters else low
    block, outside, moving = activations(shape, low, residual)
    if adapters:  # what is between the two matrices; the sum with the layer's own
        block += 7 * lora_rank * low
        moving += 2 * shape.inner * low
    kept, again = shape.layers * block + outside, 0
    if activation_checkpointing:
        kept, again = shape.layers * residual * shape.width + outside, block
    # The one that is recomputed last, or first, has its gradients in addition.
    most = [kept + again, kept, kept + again + moving, moving, 0]
    lines["activations"] = [tokens * one for one in most]
    # Kept are the logits and their log-softmax. At the peak there are the gradients of
    # both in float32, too; then only that of the logits.
    most = [low + 4, low + 4 + 4 + 4, low + low, low, low]
    lines["logits and loss"] = [tokens * shape.vocabulary * one for one in most]
    lines["workspaces of cuBLAS"] = [WORKSPACES] * 5
    return lines


def kept_all_the_time(shape, ranks, low, adapters, optimizer, grad_accum):
    """Return the lines of weights, gradients and averages on one of some ranks.

    low: bytes of a frozen weight; adapters: the weights of those of a block.
    """

    def own(numbers):
        return -(-numbers // ranks)

    lines, trained, name = {}, shape.parameters, "weights"
    if adapters:
        kind = "float32" if low == 4 else "bf16"
        lines[f"frozen weights, {kind}"] = [low * own(trained)] * 5
        trained, name = shape.layers * adapters, "adapters"
    lines[f"{name}, float32"] = [4 * own(trained)] * 5
    # FSDP2 adds them up as it reduces them.
    lines["gradients, float32"] = [4 * (trained if grad_accum else own(trained))] * 5
    averages, kind = 8 * own(trained), "float32"
    if optimizer == "adamw-8bit" and not adapters:
        vectors = shape.layers * (shape.of_block - shape.matrices) + shape.width
        # of each number a byte, and of 256 a scale
        averages = 2 * (1 + 4 / 256) * own(trained - vectors) + 8 * own(vectors)
        # and for each matrix the two tables of what its numbers mean
        averages, kind = int(averages) + 2 * 1024 * (7 * shape.layers + 2), "8 bits"
    lines[f"AdamW's averages, {kind}"] = [averages] * 5
    if optimizer == "adamw":
        lines["square roots of averages"] = [0, 0, 0, 0, 4 * own(trained)]
    return lines


def of_groups(shape, gpus, low, gathered, trained):
    """Return the lines of what FSDP2 gathers and reduces; low: bytes of a gradient.

    gathered, trained: as in_parts returns them.
    """
    root, others = split(shape, *gathered)
    first, head = (0, 0) if shape.tied else (others[0], others[-1])
    forward = max(2 * root, root + at_once(root, others))
    backward = root + at_once(0, others[::-1])
    most = [forward, root + head, backward, root + 2 * first, 0]
    lines = {"gathered weights": most}
    root, others = split(shape, *trained)
    first, largest = 0 if shape.tied else others[0], max(others)
    # The head's gradient waits in the root for the embedding's, which is added to it if
    # the two are one weight.
    waiting = trained[1] if shape.tied else 0
    last = root + first + 2 * waiting
    lines["whole gradients"] = [0, 0, low * (waiting + largest), low * last, 0]
    # in float32, and the shard that is left of it
    copies = [4 * (one + one // gpus) for one in (largest, max(root, first))]
    return lines | {"copy to reduce": [0, 0, *copies, 0]}


def together(lines):
    """Return the sum of all lines at each of MOMENTS."""
    return [sum(column) for column in zip(*lines.values(), strict=True)]


def smallest(shape, room, options):
    """Return how many GPUs of room GiB it takes, or None if more do not help."""
    for gpus in range(1, 2 if options["ddp"] else 4096 + 1):
        lines = table(shape, **{**options, "gpus": gpus})
        if max(together(lines)) <= 0.95 * room * 2**30:
            return gpus
    return None


def sent(shape, options):
    """Return the bytes that a GPU sends in a step of one micro-batch, around a ring."""
    gpus, low = options["gpus"], LOW[options["precision"]]
    adapters = shape.layers * shape.adapters(options["lora_rank"])
    reduced = 4 * (adapters or shape.parameters)
    if options["ddp"]:
        return 2 * reduced * (gpus - 1) / gpus
    # The backward pass gathers again what was freed: neither the root nor the head, and
    # no frozen embedding (sharded.py's is not gathered: nobody would wait for it).
    again = shape.layers * shape.of_block + adapters
    if not shape.tied and not adapters:
        again += shape.embedding
    gathered = low * (shape.parameters + adapters + again)
    return (gathered + reduced * (not options["grad_accum"])) * (gpus - 1) / gpus


# ---- the command ---------------------------------------------------------------------
def parse_args(words=None):
    """Return the flags, and the Shape that they mean."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # errors are one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=int, help="that share the work; default: 8, or --room's")
    add("--tokens", type=int, default=8192, help="of a micro-batch of one GPU")
    add("--room", type=int, metavar="GIB", help="of a GPU: how many are enough?")
    add("--precision", choices=LOW, default="bf16")
    add("--optimizer", choices=("adamw", "adamw-8bit"), default="adamw")
    add("--lora-rank", type=int, help="train adapters alone")
    add("--ddp", action="store_true", help="in place of FSDP2")
    add("--activation-checkpointing", action="store_true", help="of each block")
    add("--grad-accum", action="store_true", help="FSDP2 reduces after the last")
    add("--tokens-per-second", type=float, metavar="X", help="measured on one GPU")
    add("--total-tokens", type=float, metavar="T", help="of the run, such as 15e9")
    text = "GB/s that a GPU sends; default: sending takes no time"
    add("--bandwidth", type=float, default=math.inf, help=text)
    add("--config", type=Path, metavar="FOLDER", help="or a config.json")
    args = parser.parse_args(words)
    try:
        shape = from_config(args.config) if args.config else Shape()
    except (OSError, ValueError) as error:
        parser.error(f"--config: {error}")
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0:
            parser.error(f"--{name.replace('_', '-')} {value} has to be above 0")
    if bool(args.tokens_per_second) != bool(args.total_tokens):
        parser.error("--tokens-per-second and --total-tokens go together")
    args.smallest = smallest(shape, args.room, options_of(args)) if args.room else None
    args.gpus = args.gpus or args.smallest or 8
    return args, shape


def options_of(args):
    """Return the flags that table() takes."""
    names = list(inspect.signature(table).parameters)[1:]
    return {name: getattr(args, name) for name in names}


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
    if args.smallest:
        print(f"so many GPUs of {args.room} GiB are enough: {args.smallest}")
    elif args.room:
        print(f"more GPUs of {args.room} GiB alone do not make it fit")
    if args.tokens_per_second:
        computes = args.tokens / args.tokens_per_second
        sends = sent(shape, options) / (1e9 * args.bandwidth)
        step = max(computes, sends)
        hours = args.total_tokens / (args.gpus * args.tokens) * step / 3600
        share = f"{1 - computes / step:.0%} of them wait for the network"
        print(f"at least {hours:,.1f} hours, {hours * args.gpus:,.1f} of GPUs; {share}")


if __name__ == "__main__":
    main()
