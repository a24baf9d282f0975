"""Will it fit? Print the most that each GPU allocates while it trains a transformer.

python memory.py --gpus 8 --tokens 8192
python memory.py --gpus 8 --tokens 8192 --activation-checkpointing
python memory.py --gpus 16 --tokens 8192 --tensor-parallel 2
python memory.py --gpus 1 --tokens 480 --config FOLDER
python memory.py --gpus 1 --tokens 32768 --block gpt --layers 16 --width 1024 \\
    --heads 16 --vocabulary 256 --context-length 1024 --groups blocks

Without a shape it takes that of Llama-3-8B. --config reads the config.json of a Llama,
Mistral or Qwen2, without transformers. --block gpt has GPT-2's blocks, with GELU and a
head of its own. The table has a column for each moment of a training step. Its lines
are upper bounds, which are not all reached at once, so the fullest column is one, too.

What it assumes:
- AdamW as on a GPU, where it updates all weights at once. Weights, gradients and
  averages are in float32. --precision bf16 is autocast, with FSDP2 also its policy,
  MixedPrecisionPolicy(bfloat16, reduce_dtype=float32). Gradients are there all the
  time, as from the second micro-batch on.
- --groups says what fully_shard is called on: "ends": each block, the embedding, the
  head, and then the model (if the head has the embedding's weight, both stay in the
  root); "blocks": each block and the model; "whole": the model alone. Their weights are
  freed after the forward pass. "ddp" is DDP instead. Shards are of equal size.
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

It knows no pipelines and no experts: for these, docs/what_can_be_split.md has the
bytes.

What it leaves out: memory that the allocator reserves and nobody uses, the CUDA
context, NCCL's buffers, other processes on the GPU, batches that wait to be used, and
what your script keeps in addition, such as an average of the weights. So compare it
with torch.cuda.max_memory_allocated() after two steps, and leave a few GiB free.

How close it is: with 2,048 tokens and more, at most 16 % above what was counted for
small models on a CPU (19 with tensor parallelism, on 2 and 4 processes), most of it for
the logits' name; with 64 tokens a third, because gathered weights, gradients and copies
are not all there at once. On one H100 it is 5 and 7 % above two runs of a GPT. A
Llama's activations, and tensor parallelism, were not compared on a GPU.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

MOMENTS = ("forward", "loss", "backward", "last group", "optimizer")
GROUPS = ("ends", "blocks", "whole", "ddp")
LLAMAS = ("llama", "mistral", "qwen2")  # with the same blocks
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


# ---- the model -----------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; the defaults are Llama-3-8B's.

    kv_heads: of keys and values; inner: the width of the MLP; positions: how many
    positions have a learned embedding; tied: the head has the embedding's weight;
    qkv_bias: of a Llama, as Qwen2 has it; a GPT always has biases.
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
        biases = (queries + 2 * keys) * self.qkv_bias
        return attention + 3 * self.width * self.inner + biases + 2 * self.norm

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
        if type(value) is not int or value < 1:
            text = f"{key} is {value!r}, and should be an integer, 1 or more"
            raise ValueError(text)
        return value

    width, heads = number("hidden_size"), number("num_attention_heads")
    return Shape(
        layers=number("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", width // heads),
        inner=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=kind == "qwen2",
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
    block = 2 * norm + attention + mlp * low
    # and the tokens, their positions, the targets, and the rotations of a Llama
    outside = norm + 24 + (0 if shape.block == "gpt" else 2 * 4 * shape.head_dim)
    # of an MLP, or of a norm, which computes in float32
    return block, outside, max((2 * inner + 2 * width) * low, 4 * 4 * width)


def split(shape, groups):
    """Return the weights of the root, and a list of those of the other groups."""
    blocks = [shape.of_block] * shape.layers
    root = shape.parameters - sum(blocks)
    if groups == "whole":
        return shape.parameters, []
    if groups == "ends" and not shape.tied:
        root -= 2 * shape.embedding
        # The last norm may be in the root or with the head, so it counts in both.
        return root, [shape.embedding, *blocks, shape.embedding + shape.norm]
    return root, blocks


def at_once(before, groups):
    """Return how many gathered weights, at most, are there in a pass over groups.

    While a group's are copied out of the buffer that they were gathered into, both are
    there, and so is the buffer of the group before. before: the weights of that group.
    """
    pairs = zip([before, *groups], groups, strict=False)
    return max((one + 2 * group for one, group in pairs), default=0)


def table(
    shape,
    gpus=8,
    tokens=8192,
    precision="bf16",
    groups="ends",
    activation_checkpointing=False,
    grad_accum=False,
    tensor_parallel=1,
):
    """Return {line: bytes at each of MOMENTS} of one GPU.

    tokens: of a micro-batch of this GPU; grad_accum: gradients are reduced only after
    the last micro-batch, by set_requires_gradient_sync; tensor_parallel: how many GPUs
    split each layer, a number for which misfit() returns "". The moments are: the
    forward pass; when the loss is differentiated; the backward pass, as far as blocks
    and head; when the last group's gradients are reduced; and AdamW's step.
    """
    low, sharded = 2 if precision == "bf16" else 4, groups != "ddp"
    whole = shape
    shape, gpus = shape.divided(tensor_parallel), gpus // tensor_parallel
    weights = shape.parameters
    own = -(-weights // gpus) if sharded else weights
    lines = {
        "weights, float32": [4 * own] * 5,
        "gradients, float32": [4 * (weights if grad_accum else own)] * 5,
        "AdamW's averages, float32": [8 * own] * 5,
        "square roots of averages": [0, 0, 0, 0, 4 * own],
    }
    if sharded:
        lines |= of_groups(shape, gpus, low, groups)
        if tensor_parallel > 1:
            lines["embedding's gradient"] = [0, 0, 0, low * whole.embedding, 0]
    else:
        lines["DDP's buckets"] = [4 * weights] * 5
        # of all but embeddings, which are looked up
        used = shape.layers * shape.of_block + shape.norm + shape.embedding
        lines["autocast's copies of weights"] = [2 * used * (low == 2)] * 3 + [0, 0]

    residual = low if sharded else 4
    block, outside, moving = activations(shape, low, residual)
    kept, again = shape.layers * block + outside, 0
    if activation_checkpointing:
        kept, again = shape.layers * residual * shape.width + outside, block
    # The one that is recomputed last, or first, has its gradients in addition.
    most = [kept + again, kept, kept + again + moving, moving, 0]
    lines["activations"] = [tokens * one for one in most]

    # Kept are the logits and their log-softmax. At the peak there are the gradients of
    # both in float32, too; then only that of the logits.
    numbers = tokens * whole.vocabulary
    most = [low + 4, low + 4 + 4 + 4, low + low, low, low]
    lines["logits and loss"] = [numbers * one for one in most]
    lines["workspaces of cuBLAS"] = [WORKSPACES] * 5
    return lines


def of_groups(shape, gpus, low, groups):
    """Return the lines of what FSDP2 gathers and reduces; low: bytes of a number."""
    root, others = split(shape, groups)
    apart = len(others) > shape.layers
    head = others[-1] if apart else 0
    first = others[0] if apart else 0
    largest = max(others, default=0)
    # The head's gradient waits in the root for the embedding's, which is added to it if
    # the two are one weight.
    waiting = 0 if apart else shape.embedding if others else root
    last = root + first + (2 * shape.embedding if shape.tied else 0)
    reduced = largest, max(root, first)
    return {
        "gathered weights": [
            low * max(2 * root, root + at_once(root, others)),
            low * (root + head),
            low * (root + at_once(0, others[::-1])),
            low * (root + 2 * first),
            0,
        ],
        "whole gradients": [0, 0, low * (waiting + largest), low * last, 0],
        # in float32, and the shard that is left of it
        "copy to reduce": [0, 0, *(4 * (one + one // gpus) for one in reduced), 0],
    }


def misfit(shape, gpus, groups, tensor_parallel):
    """Return why a number of GPUs of a tensor-parallel group does not fit, or ""."""
    if tensor_parallel == 1:
        return ""
    if groups == "ddp":
        return "goes with FSDP2, not with DDP"
    sizes = {"number of GPUs": gpus}
    sizes |= {text: getattr(shape, name) for name, text in DIVIDED.items()}
    wrong = [one for one in sizes.items() if one[1] % tensor_parallel]
    return "must divide the {} ({})".format(*wrong[0]) if wrong else ""


def together(lines):
    """Return the sum of all lines at each of MOMENTS."""
    return [sum(column) for column in zip(*lines.values(), strict=True)]


# ---- the command ---------------------------------------------------------------------
def positive(text):
    """Return a flag's number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer, 1 or more")
    return int(text)


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
    add("--gpus", type=positive, default=8, help="how many share the work")
    text = "of a micro-batch of one GPU, or of a tensor-parallel group"
    add("--tokens", type=positive, default=8192, help=text)
    text = "GPUs that split each layer, for the same tokens; default: 1"
    add("--tensor-parallel", type=positive, default=1, metavar="T", help=text)
    add("--precision", choices=("bf16", "float32"), default="bf16")
    add("--groups", choices=GROUPS, default="ends", help="how FSDP2 wraps the model")
    add("--activation-checkpointing", action="store_true", help="of each block")
    add("--grad-accum", action="store_true", help="reduce after the last micro-batch")
    add("--config", type=Path, metavar="FOLDER", help="or a config.json")
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
    if args.groups == "ddp" and args.grad_accum:
        parser.error("--grad-accum is FSDP2's; DDP holds whole gradients anyway")
    names = ("block", "layers", "width", "heads", "kv_heads", "inner", "vocabulary")
    given = {name: getattr(args, name) for name in (*names, "context_length", "tied")}
    given = {name: value for name, value in given.items() if value}
    shape = shape_of(parser, args, given)
    wrong = misfit(shape, args.gpus, args.groups, args.tensor_parallel)
    if wrong:
        parser.error(f"--tensor-parallel {wrong}")
    return args, shape


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
    options = ("gpus", "tokens", "precision", "groups", "activation_checkpointing")
    options = (*options, "grad_accum", "tensor_parallel")
    options = {name: getattr(args, name) for name in options}
    lines = table(shape, **options)
    sums = together(lines)
    print(f"{shape.parameters:,} parameters; GiB on each GPU, at most:")
    print(" " * 29 + "".join(f"{name:>11}" for name in MOMENTS))
    for name, sizes in {**lines, "together": sums}.items():
        cells = [f"{size / 2**30:.2f}" if size else "-" for size in sizes]
        print(f"{name:29}" + "".join(f"{cell:>11}" for cell in cells))
    print(f"at most {max(sums) / 2**30:.1f} GiB: {MOMENTS[sums.index(max(sums))]}")


if __name__ == "__main__":
    main()
