"""torch.compile and DDP: in which order, and where does `_orig_mod.` come from?

Both orders work and give the same graphs, one for each of DDP's buckets, so that a
bucket can be sent while backward is in the next graph; but in torch 2.15,
compile(DDP(model)) compiles nothing if the model is an nn.Sequential.
`torch.compile(model)` returns a wrapper, which puts `_orig_mod.` before the weights'
names as DDP puts `module.`; `model.compile()` compiles in place. Save the state_dict()
of the model itself: its names are clean in all cases.

$ torchrun --standalone --nproc-per-node=2 recipes/torch_compile.py
compile(DDP(model)): 4 graph(s), _orig_mod.module.layers.0.weight
DDP(compile(model)): 4 graph(s), module._orig_mod.layers.0.weight
model.compile(): 4 graph(s), module.layers.0.weight
model.compile(), optimize_ddp=False: 1 graph(s), module.layers.0.weight
model.state_dict(): layers.0.weight
aot_eager, 5 steps: weights within 1e-12 of those without compile
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Four layers with 2 MiB of weights each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, samples):
        for layer in self.layers:
            samples = nn.functional.silu(layer(samples))
        return samples


def train(called, model):
    """Train for five steps; return all weights as one tensor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        torch.manual_seed(step)
        samples = torch.randn(12, 512)[dist.get_rank() :: dist.get_world_size()]
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
    plain = Net()
    expected = train(DistributedDataParallel(plain), plain)
    # For a CPU, Inductor takes long; aot_eager runs the captured graphs as they are.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    orders = ("compile(DDP(model))", "DDP(compile(model))", "model.compile()")
    for order in (*orders, "model.compile(), optimize_ddp=False"):
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = order in orders
        counter = CompileCounterWithBackend(backend)
        model = Net()
        if order == orders[0]:
            called = DistributedDataParallel(model, bucket_cap_mb=2)
            called = torch.compile(called, backend=counter)
        elif order == orders[1]:
            called = torch.compile(model, backend=counter)
            called = DistributedDataParallel(called, bucket_cap_mb=2)
        else:
            model.compile(backend=counter)
            called = DistributedDataParallel(model, bucket_cap_mb=2)
        torch.testing.assert_close(train(called, model), expected, rtol=0, atol=1e-12)
        assert counter.frame_count == (4 if order in orders else 1)
        assert "layers.0.weight" in model.state_dict()
        if dist.get_rank() == 0:
            name = next(iter(called.state_dict()))
            assert ("_orig_mod." in name) == (order in orders[:2])
            print(f"{order}: {counter.frame_count} graph(s), {name}", flush=True)
    if dist.get_rank() == 0:
        print("model.state_dict(): layers.0.weight")
        print(f"{backend}, 5 steps: weights within 1e-12 of those without compile")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
