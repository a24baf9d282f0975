"""How do I send less over a slow network: gradients in bf16, or local SGD?

`bf16_compress_hook` has DDP average the gradients in bfloat16: weights, gradients and
optimizer stay as they are, and each sum is rounded to 8 significant bits. Local SGD
(Stich, 2018) sends nothing in most steps: each rank trains on its own, without DDP, and
after every H steps the weights become their mean over the ranks. This is a different
training, in which the ranks drift apart between two means: compare the loss on new
samples. (torch's PeriodicModelAverager does this, too, but makes no mean in the end.)
Even H = 1 is DDP only if a step is linear in the gradients, as with SGD, its momentum
and weight decay. AdamW divides by the root of an average of squares, and clipping
divides by a norm: both are different on each rank. Average before you evaluate or save;
otherwise rank 0's weights are its own, without an error. The optimizer's state stays
different, so each rank saves its own. Buffers, such as batch norm's, need a mean of
their own. If only the network between machines is slow, use DDP within a machine, and
average over a group that has one rank of each. DiLoCo (Douillard et al., 2023) has H =
500 and AdamW, and a second optimizer, whose gradient is the change of the mean; it was
not run here.

$ torchrun --standalone --nproc-per-node=2 recipes/slow_network.py
given to all-reduces, and the weights beside those of one process:
DDP: 5313 numbers of 8 bytes per step, equal
bf16_compress_hook: 5313 numbers of 2 bytes per step, different
H = 1, SGD with momentum: 5313 numbers of 8 bytes per step, equal
H = 1, SGD with clipping: 5313 numbers of 8 bytes per step, different
H = 1, AdamW: 5313 numbers of 8 bytes per step, different
H = 10, SGD with momentum: 531 numbers of 8 bytes per step, different
loss on new samples: DDP 0.041, bf16 0.041, H = 10 0.050, rank 0 alone 0.120
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


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


def train(model, optimizer, batches, every=None, max_norm=None):
    """Train; with a number, average the weights each time after so many steps."""
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        get_loss(model, batch).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if every and (step % every == 0 or step == len(batches)):
            average(model)


# ---- the proof -----------------------------------------------------------------------
STEPS = 200


class Sent(TorchDispatchMode):
    """Inside `with`, count what is given to all-reduces, not what is on the wire."""

    def __init__(self):
        super().__init__()
        self.numbers, self.size = 0, None  # size: the bytes of a number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allreduce" in str(function):
            self.numbers += sum(tensor.numel() for tensor in args[0])
            self.size = args[0][0].itemsize
        return function(*args, **(kwargs or {}))


def make_model():
    """Return a model, with the same weights each time."""
    torch.manual_seed(0)
    hidden = (nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
    return nn.Sequential(*hidden, nn.Linear(64, 1))


def get_loss(model, samples):
    targets = samples[:, :4].sum(1, keepdim=True).sin()
    return (model(samples) - targets).square().mean()


def sgd(weights):
    return torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(weights):
    return torch.optim.AdamW(weights, 0.01)


# {what is printed: (what wraps the model, its optimizer, H, the norm to clip at)}
WAYS = {
    "DDP": (DistributedDataParallel, sgd, None, None),
    "bf16_compress_hook": (compress, sgd, None, None),
    "H = 1, SGD with momentum": (nn.Sequential, sgd, 1, None),
    "H = 1, SGD with clipping": (nn.Sequential, sgd, 1, 0.1),
    "H = 1, AdamW": (nn.Sequential, adamw, 1, None),
    "H = 10, SGD with momentum": (nn.Sequential, sgd, 10, None),
}
SAME = ("DDP", "H = 1, SGD with momentum")  # as one process


def try_way(batches, wrap, make_optimizer, every, max_norm):
    """Train; return the weights as one vector, the loss on new samples, and a Sent."""
    model = wrap(make_model())
    with Sent() as sent:
        train(model, make_optimizer(model.parameters()), batches, every, max_norm)
    torch.manual_seed(2)
    with torch.no_grad():
        loss = get_loss(model, torch.randn(4000, 16)).item()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), loss, sent


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
    losses = []
    if dist.get_rank() == 0:
        print("given to all-reduces, and the weights beside those of one process:")
    for name, way in WAYS.items():
        weights, loss, sent = try_way(own, *way)
        _, optimizer, every, max_norm = way
        # as one process does it: all samples of each batch
        expected, *_ = try_way(batches, nn.Sequential, optimizer, None, max_norm)
        difference = (weights - expected).abs().max()
        assert difference < 1e-10 if name in SAME else difference > 1e-5, name
        numbers = sent.numbers // STEPS
        assert numbers == len(weights) // (every or 1)
        assert sent.size == (2 if name == "bf16_compress_hook" else 8)
        losses.append(f"{loss:.3f}")
        if dist.get_rank() == 0:
            found = "equal" if name in SAME else "different"
            sizes = f"{numbers} numbers of {sent.size} bytes per step"
            print(f"{name}: {sizes}, {found}")
    weights, loss, _ = try_way(own, nn.Sequential, sgd, None, None)
    of_rank0 = weights.clone()
    dist.broadcast(of_rank0, src=0)
    assert dist.get_rank() == 0 or not weights.equal(of_rank0)
    if dist.get_rank() == 0:
        shown = f"DDP {losses[0]}, bf16 {losses[1]}, H = 10 {losses[-1]}"
        print(f"loss on new samples: {shown}, rank 0 alone {loss:.3f}")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
