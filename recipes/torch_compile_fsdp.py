"""torch.compile and FSDP2: in which order, and what becomes of names and graphs?

Call `block.compile()` for each block, before `fully_shard(block)` or after it. This
compiles the block in place: the names stay as they are, FSDP's hooks run outside the
compiled code, and all blocks of one kind share a graph, so a deeper model gives the
compiler no more to do. Activation checkpointing goes around a compiled block.
`torch.compile(block)` returns a wrapper instead, which puts `_orig_mod.` into the names
of state_dict() and named_parameters(); get_model_state_dict() takes it out again.
`model.compile()` breaks the graph at the hooks of each block. If forward() calls the
blocks in a loop, nothing outside the blocks is compiled, and with activation
checkpointing around them nothing at all. Nothing is printed then. The last line is
about Inductor, which on a CPU needs a C++ compiler. (There, that of torch 2.11 fails in
float64.)

$ torchrun --standalone --nproc-per-node=2 recipes/torch_compile_fsdp.py
block.compile(), then fully_shard(block): operations per graph [20], breaks 0
fully_shard(block), then block.compile(): operations per graph [20], breaks 0
block.compile(), checkpoint(block, x): operations per graph [20], breaks 0
torch.compile(block): operations per graph [20], breaks 0
model.compile(): operations per graph [20], breaks 1
model.compile(), checkpoint(block, x): operations per graph [], breaks 1
model.compile(), no loop in forward(): operations per graph [1, 20, 2], breaks 4
gradients within 1e-12 of those of one process without compile
names after block.compile(): blocks.0.norm1.weight
names after torch.compile(block): blocks.0._orig_mod.norm1.weight
load_state_dict(): Missing key(s) in state_dict: "blocks.0._orig_mod.norm1.weight"
names in get_model_state_dict(): blocks.0.norm1.weight
weights after five steps within 1e-12 of those without compile
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


# ---- the lines to copy ---------------------------------------------------------------
def compile_and_shard(model, backend="inductor"):
    for block in model.blocks:
        # fullgraph: otherwise a block whose graph breaks is slower without a message
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block)
    fully_shard(model)


# ---- the proof -----------------------------------------------------------------------
class Counter:
    """A backend that counts the operations of each graph, and runs it as it is.

    Make one after each reset: it also counts the graph breaks from then on.
    """

    def __init__(self):
        self.operations = []  # of each graph
        counters.clear()

    def __call__(self, graph, _inputs):
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        self.operations.append(len(calls))
        return graph.forward

    def breaks(self):
        """Return how often a graph broke; in a loop, Dynamo gives up the function."""
        frames = counters["frames"]
        given_up = frames["total"] - frames["ok"]
        return sum(counters["graph_break"].values()) + given_up


class Block(nn.Module):
    """Attention with 4 heads, and an MLP. Maps [B, T, 64] to the same shape."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 16)).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def own_device():
    """Return this rank's GPU, or the CPU."""
    return torch.device(
        torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    )


class GPT(nn.Module):
    """Four blocks, with the same weights each time. Maps [B, T] to [B, T, 96]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 96, bias=False)
        self.to(own_device())

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Checkpointed(GPT):
    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class WithoutLoop(GPT):
    def forward(self, tokens):
        first, second, third, fourth = self.blocks
        x = fourth(third(second(first(self.tokens(tokens)))))
        return self.head(self.norm(x))


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def shard_and_compile(model, backend):
    shard(model)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def wrap_and_shard(model, backend="inductor"):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    shard(model)


def compile_whole(model, backend):
    shard(model)
    model.compile(backend=backend)


# FSDP's hooks call torch._dynamo.disable(), which breaks a graph that this call is in.
# A compiled block's own hooks are not in its graph: Module._call_impl() calls them, and
# Dynamo skips that function and traces forward() only. In the graph of the whole model
# they are, because Dynamo follows each call of a block into the block's hooks.
# {what is printed: (the model, what prepares it, the number of graphs, and of breaks)}
WAYS = {
    "block.compile(), then fully_shard(block)": (GPT, compile_and_shard, 1, 0),
    "fully_shard(block), then block.compile()": (GPT, shard_and_compile, 1, 0),
    "block.compile(), checkpoint(block, x)": (Checkpointed, compile_and_shard, 1, 0),
    "torch.compile(block)": (GPT, wrap_and_shard, 1, 0),
    "model.compile()": (GPT, compile_whole, 1, 1),
    "model.compile(), checkpoint(block, x)": (Checkpointed, compile_whole, 0, 1),
    "model.compile(), no loop in forward()": (WithoutLoop, compile_whole, 3, 4),
}


def log(text):
    """Print a line, once for the whole run."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def make_samples(step=0):
    """Return the tokens of all ranks, [12, 17], and this rank's share of them."""
    torch.manual_seed(step)
    samples = torch.randint(96, (12, 17)).to(own_device())
    return samples, samples[dist.get_rank() :: dist.get_world_size()]


def backward(model, samples):
    """Go forward and backward."""
    logits, targets = model(samples[:, :-1]), samples[:, 1:]
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


def whole(tensors):
    """Return tensors, sharded or not, as one vector."""
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return nn.utils.parameters_to_vector(full).detach()


def gradient(model, samples):
    backward(model, samples)
    return whole(weight.grad for weight in model.parameters())


def check_graphs():
    """Compare the gradients, and count graphs and breaks."""
    samples, own = make_samples()
    for way, (make, prepare, graphs, breaks) in WAYS.items():
        expected = gradient(make(), samples)  # as one process would: all samples
        torch.compiler.reset()  # otherwise a graph of the way before is used again
        model, counter = make(), Counter()
        prepare(model, counter)
        found = gradient(model, own)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert len(counter.operations) == graphs, counter.operations
        assert counter.breaks() == breaks, counters
        log(f"{way}: operations per graph {counter.operations}, breaks {breaks}")
    log("gradients within 1e-12 of those of one process without compile")


def check_names():
    """Compare names, and load the weights of a plain model into a wrapped one."""
    plain, compiled, wrapped = GPT(), GPT(), GPT()
    shard(plain)
    compile_and_shard(compiled)
    wrap_and_shard(wrapped)
    names = list(plain.state_dict())
    wrapped_name = list(wrapped.state_dict())[1]
    assert list(compiled.state_dict()) == names
    assert sorted(get_model_state_dict(wrapped)) == sorted(names)  # in another order
    assert wrapped_name == names[1].replace("blocks.0.", "blocks.0._orig_mod.")
    try:
        wrapped.load_state_dict(plain.state_dict())
        message = None
    except RuntimeError as error:
        message = str(error).splitlines()[1].split(",")[0].strip()
    assert message == f'Missing key(s) in state_dict: "{wrapped_name}"'
    log(f"names after block.compile(): {names[1]}")
    log(f"names after torch.compile(block): {wrapped_name}")
    log(f"load_state_dict(): {message}")
    log(f"names in get_model_state_dict(): {names[1]}")


def train(model, prepare):
    """Train for five steps; return all weights as one tensor."""
    torch.compiler.reset()
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        _, own = make_samples(step)
        optimizer.zero_grad()
        backward(model, own)
        optimizer.step()
    return whole(model.parameters())


def check_weights():
    """Train with generated code, with activation checkpointing and without."""
    expected = train(GPT(), shard)
    for model in (GPT(), Checkpointed()):
        trained = train(model, compile_and_shard)
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)
        if dist.get_rank() == 0:
            largest = (trained - expected).abs().max().item()
            print(f"inductor: differences up to {largest:.1e}", file=sys.stderr)
    log("weights after five steps within 1e-12 of those without compile")


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    check_graphs()
    check_names()
    check_weights()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
