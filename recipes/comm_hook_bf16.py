"""How do I halve what DDP sends per step (gradient compression, register_comm_hook)?

With `bf16_compress_hook`, DDP averages the gradients over the ranks in bfloat16, and
casts the result back: weights, gradients and optimizer stay in float32. All ranks still
have the same weights, but the gradients and each of their sums are rounded to 8
significant bits, not 24, so compare the losses with and without the hook. It can save
time only where backward has to wait for the network.

$ torchrun --standalone --nproc-per-node=2 recipes/comm_hook_bf16.py
no hook: 21252 bytes sent per step, weights within 1e-6 of one process's
bf16_compress_hook: 10626 bytes sent per step, within 1e-3 but not 1e-5
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


# ---- the lines to copy ---------------------------------------------------------------
def wrap(model, hook=bf16_compress_hook):  # or fp16_compress_hook
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)  # None: among all ranks
    return wrapped


# ---- the proof -----------------------------------------------------------------------
STEPS = 20


class Sent(TorchDispatchMode):
    """Inside `with`, count the bytes given to all-reduces, not those on the wire."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allreduce" in str(function):
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def make_model(device):
    """Return a model, with the same weights each time."""
    torch.manual_seed(0)
    hidden = (nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
    return nn.Sequential(*hidden, nn.Linear(64, 1)).to(device)


def train(model, first, every, device):
    """Train on samples first, first + every, ...; return all weights as one tensor."""
    torch.manual_seed(1)
    samples = torch.randn(STEPS, 24, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in samples[:, first::every]:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    one = train(make_model(device), 0, 1, device)
    lines, differences = [], []
    for hook in (None, bf16_compress_hook):
        model = make_model(device)
        model = wrap(model, hook) if hook else DistributedDataParallel(model)
        with Sent() as sent:
            weights = train(model, rank, world_size, device)
        differences.append((weights - one).abs().max().item())
        lines.append(f"{sent.bytes // STEPS} bytes sent per step")
        assert sent.bytes == STEPS * len(weights) * (2 if hook else 4)
    rank0_weights = weights.clone()
    dist.broadcast(rank0_weights, src=0)
    assert torch.equal(weights, rank0_weights)
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}
    assert differences[0] < 1e-6
    assert 1e-5 < differences[1] < 1e-3
    if rank == 0:
        print(f"no hook: {lines[0]}, weights within 1e-6 of one process's")
        print(f"bf16_compress_hook: {lines[1]}, within 1e-3 but not 1e-5")
        print("differences:", *(f"{d:.1e}" for d in differences), file=sys.stderr)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
