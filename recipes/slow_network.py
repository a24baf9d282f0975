"""How do I send less over a slow network: gradients in bf16, or local SGD?

`bf16_compress_hook` has DDP average the gradients in bfloat16: weights, gradients and
optimizer stay as they are, and each sum is rounded to 8 significant bits. Local SGD
(Stich, 2018) sends nothing in most steps: each rank trains on its own, without DDP, and
after every H steps the weights become their mean over the ranks. This is a different
training: compare the loss on new samples. Even H = 1 is DDP only if a step is linear in
the gradients, as with SGD, its momentum and weight decay, but not with AdamW. Average
before you evaluate or save; otherwise rank 0's weights are its own, without an error.
The optimizer's state stays different, so each rank saves its own.

$ torchrun --standalone --nproc-per-node=2 recipes/slow_network.py
the weights, beside those of one process:
DDP: equal
bf16_compress_hook: different
H = 1, SGD with momentum: equal
H = 1, AdamW: different
H = 10, SGD with momentum: different
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


# ---- the lines to copy ---------------------------------------------------------------
def compress(model):
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, bf16_compress_hook)  # None: among all ranks
    return wrapped


@torch.no_grad()
def average(model, group=None):
    """Give the ranks of a group the mean of their weights; all of them call it."""
    mean = nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    nn.utils.vector_to_parameters(mean, model.parameters())


# ---- the proof -----------------------------------------------------------------------
STEPS = 40


def sgd(weights):
    return torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=1e-3)


# {what is printed: (what wraps the model, its optimizer, H, equal to one process)}
WAYS = {
    "DDP": (DistributedDataParallel, sgd, None, True),
    "bf16_compress_hook": (compress, sgd, None, False),
    "H = 1, SGD with momentum": (nn.Sequential, sgd, 1, True),
    "H = 1, AdamW": (nn.Sequential, torch.optim.AdamW, 1, False),
    "H = 10, SGD with momentum": (nn.Sequential, sgd, 10, False),
}


def train(batches, wrap, make_optimizer, every=None):
    """Train; return the weights as one vector."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 1)))
    optimizer = make_optimizer(model.parameters())
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
        if every and step % every == 0:
            average(model)
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
    torch.manual_seed(1)
    batches = torch.randn(STEPS, 24, 16)
    own = batches[:, dist.get_rank() :: dist.get_world_size()]
    if dist.get_rank() == 0:
        print("the weights, beside those of one process:")
    for name, (wrap, make_optimizer, every, is_equal) in WAYS.items():
        weights = train(own, wrap, make_optimizer, every)
        expected = train(batches, nn.Sequential, make_optimizer)
        difference = (weights - expected).abs().max()
        assert difference < 1e-10 if is_equal else difference > 1e-5, name
        if dist.get_rank() == 0:
            print(f"{name}: {'equal' if is_equal else 'different'}")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
