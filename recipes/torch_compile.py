"""torch.compile and DDP: in which order, and where does `_orig_mod.` come from?

Call `model.compile()`, and then wrap the model in DDP. This compiles the model in
place: its weights keep their names. `torch.compile(model)` returns a wrapper instead,
which puts `_orig_mod.` before the names as DDP puts `module.`.
`torch.compile(DDP(model))` compiles nothing if the model is an nn.Sequential, and
`DDP(torch.compile(model))` does. (In torch 2.11, `model.compile()` does not compile an
nn.Sequential either.) Save the state_dict() of the model itself: after
`model.compile()` its names are clean.

$ torchrun --standalone --nproc-per-node=2 recipes/torch_compile.py
model.compile(), then DDP: compiled, module.up.weight
DDP(torch.compile(model)): compiled, module._orig_mod.up.weight
torch.compile(DDP(model)): compiled, _orig_mod.module.up.weight
torch.compile(DDP(nn.Sequential(...))): not compiled, _orig_mod.module.0.weight
DDP(torch.compile(nn.Sequential(...))): compiled, module._orig_mod.0.weight
model.state_dict(): up.weight
weights within 1e-12 of those without compile
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def compile_and_wrap(model, backend="inductor"):
    model.compile(backend=backend)  # in place, and before DDP
    return DistributedDataParallel(model)


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


def sequential():
    """Return the same model without a class of one's own."""
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))


def compiled_first(model, backend):
    return DistributedDataParallel(torch.compile(model, backend=backend))


def wrapped_first(model, backend):
    return torch.compile(DistributedDataParallel(model), backend=backend)


# {what is printed: (what compiles and wraps the model, what makes it)}
ORDERS = {
    "model.compile(), then DDP": (compile_and_wrap, MLP),
    "DDP(torch.compile(model))": (compiled_first, MLP),
    "torch.compile(DDP(model))": (wrapped_first, MLP),
    "torch.compile(DDP(nn.Sequential(...)))": (wrapped_first, sequential),
    "DDP(torch.compile(nn.Sequential(...)))": (compiled_first, sequential),
}


def train(called, model):
    """Train for five steps; return all weights as one tensor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        torch.manual_seed(step)
        samples = torch.randn(12, 64)[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        called(samples.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    for order, (prepare, make) in ORDERS.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        plain, model, counter = make().to(device), make().to(device), Counter()
        model.load_state_dict(plain.state_dict())
        expected = train(DistributedDataParallel(plain), plain)
        called = prepare(model, counter)
        torch.testing.assert_close(train(called, model), expected, rtol=0, atol=1e-12)
        name = next(iter(called.state_dict()))
        nothing = prepare is wrapped_first and make is sequential
        assert (counter.graphs == 0) == nothing
        assert ("_orig_mod." in name) == (prepare is not compile_and_wrap)
        if dist.get_rank() == 0:
            result = "compiled" if counter.graphs else "not compiled"
            print(f"{order}: {result}, {name}", flush=True)
    if dist.get_rank() == 0:
        print("model.state_dict():", next(iter(MLP().state_dict())))
        print("weights within 1e-12 of those without compile")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
