"""torch.compile and DDP: in which order, and where does `_orig_mod.` come from?

Call `model.compile()`, and then wrap the model in DDP. This compiles the model in
place: its weights keep their names, and it works for every model.
`torch.compile(model)` returns a wrapper instead, which puts `_orig_mod.` before the
names as DDP puts `module.`. `torch.compile(DDP(model))` works for some models, but in
torch 2.15 it compiles nothing if the model is an nn.Sequential. Save the state_dict()
of the model itself: after `model.compile()` its names are clean.

$ torchrun --standalone --nproc-per-node=2 recipes/torch_compile.py
model.compile(), then DDP: compiled, module.0.weight
DDP(torch.compile(model)): compiled, module._orig_mod.0.weight
torch.compile(DDP(model)): not compiled, _orig_mod.module.0.weight
model.state_dict(): 0.weight
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


def make_model():
    """Return a model, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))


def compiled_first(model, backend):
    return DistributedDataParallel(torch.compile(model, backend=backend))


def wrapped_first(model, backend):
    return torch.compile(DistributedDataParallel(model), backend=backend)


ORDERS = {
    "model.compile(), then DDP": compile_and_wrap,
    "DDP(torch.compile(model))": compiled_first,
    "torch.compile(DDP(model))": wrapped_first,
}


def train(called, model):
    """Train for five steps; return all weights as one tensor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        torch.manual_seed(step)
        samples = torch.randn(12, 64)[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        called(samples).square().mean().backward()
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
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float64)  # so that only rounding errors differ
    plain = make_model()
    expected = train(DistributedDataParallel(plain), plain)
    for order, prepare in ORDERS.items():
        torch.compiler.reset()
        model, counter = make_model(), Counter()
        called = prepare(model, counter)
        torch.testing.assert_close(train(called, model), expected, rtol=0, atol=1e-12)
        name = next(iter(called.state_dict()))
        assert (counter.graphs > 0) == (prepare is not wrapped_first)
        assert ("_orig_mod." in name) == (prepare is not compile_and_wrap)
        if dist.get_rank() == 0:
            result = "compiled" if counter.graphs else "not compiled"
            print(f"{order}: {result}, {name}", flush=True)
    if dist.get_rank() == 0:
        print("model.state_dict():", next(iter(model.state_dict())))
        print("weights within 1e-12 of those without compile")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
