"""torch.compile: in which order with DDP and FSDP2, and where is `_orig_mod.` from?

With DDP, call `model.compile()`, and then wrap the model. With FSDP2, call
`block.compile()` for each block, and then `fully_shard(block)`: all blocks of one kind
then share a graph. A block whose forward is torch's own, such as nn.Sequential, needs a
class of yours around it. `model.compile()` breaks the graph at the hooks of each block,
without a message. Both compile in place: the weights keep their names.
`torch.compile(model)` returns a wrapper instead, which puts `_orig_mod.` before the
names as DDP puts `module.`. Save the state_dict() of the model itself.

$ torchrun --standalone --nproc-per-node=2 recipes/torch_compile.py
model.compile(), then DDP: 1 graph, module.up.weight
DDP(torch.compile(model)): 1 graph, module._orig_mod.up.weight
torch.compile(DDP(model)): 1 graph, _orig_mod.module.up.weight
block.compile(), then fully_shard(block): 1 graph, blocks.0.up.weight
fully_shard(block), then model.compile(): 2 graphs, blocks.0.up.weight
weights within 1e-12 of those of one process without compile
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def compile_and_wrap(model, backend="inductor"):
    model.compile(backend=backend)  # in place, and before DDP
    return DistributedDataParallel(model)


def compile_and_shard(model, backend="inductor"):
    for block in model.blocks:
        # fullgraph: otherwise a block whose graph breaks is slower without a message
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block)
    return fully_shard(model)


# ---- the proof -----------------------------------------------------------------------
class Counter:
    """A backend that runs the captured graphs as they are, and counts them.

    For a CPU, Inductor takes long.
    """

    graphs = 0

    def __call__(self, graph, _inputs):
        self.graphs += 1
        return graph.forward


class MLP(nn.Module):
    """Two layers. Maps [N, 64] to the same shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class Blocks(nn.Module):
    """A layer, and three such blocks. Maps [N, 64] to the same shape."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        one, two, three = self.blocks
        return three(two(one(self.first(x))))


def compiled_first(model, backend):
    return DistributedDataParallel(torch.compile(model, backend=backend))


def wrapped_first(model, backend):
    return torch.compile(DistributedDataParallel(model), backend=backend)


def compiled_whole(model, backend):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.compile(backend=backend)
    return model


# {what is printed: (what compiles and wraps the model, what makes it, the graphs)}
ORDERS = {
    "model.compile(), then DDP": (compile_and_wrap, MLP, 1),
    "DDP(torch.compile(model))": (compiled_first, MLP, 1),
    "torch.compile(DDP(model))": (wrapped_first, MLP, 1),
    "block.compile(), then fully_shard(block)": (compile_and_shard, Blocks, 1),
    "fully_shard(block), then model.compile()": (compiled_whole, Blocks, 2),
}


def train(called, model, first, every):
    """Train for five steps on every n-th sample; return all weights as one tensor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    device = next(model.parameters()).device
    for step in range(5):
        torch.manual_seed(step)
        samples = torch.randn(12, 64)[first::every].to(device)
        optimizer.zero_grad()
        called(samples).square().mean().backward()
        optimizer.step()
    weights = (
        w.full_tensor() if isinstance(w, DTensor) else w for w in model.parameters()
    )
    return nn.utils.parameters_to_vector(weights).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    for order, (prepare, make, graphs) in ORDERS.items():
        torch.compiler.reset()  # otherwise a graph of the order before is used again
        torch.manual_seed(0)
        plain, model, counter = make().to(device), make().to(device), Counter()
        model.load_state_dict(plain.state_dict())
        expected = train(plain, plain, 0, 1)
        called = prepare(model, counter)
        found = train(called, model, dist.get_rank(), dist.get_world_size())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert counter.graphs == graphs, (order, counter.graphs)
        name = next(iter(called.state_dict()))
        in_place = prepare not in (compiled_first, wrapped_first)
        assert ("_orig_mod." in name) == (not in_place)
        if dist.get_rank() == 0:
            text = f"{graphs} graph{'s' * (graphs != 1)}"
            print(f"{order}: {text}, {name}", flush=True)
    if dist.get_rank() == 0:
        print("weights within 1e-12 of those of one process without compile")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
