"""A layer that the loss does not use: the error, and three remedies.

python 03_ddp_launch/demos/unused_parameter.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.spare = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, images):
        return self.head(images)  # and never self.spare


class AllReduces(TorchDispatchMode):
    """Inside `with`, note how many bytes each all-reduce is given."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allreduce" in str(function):
            self.sizes += [tensor.nbytes for tensor in args[0]]
        return function(*args, **(kwargs or {}))


def step(wrapped):
    """Go forward and backward; return what that exchanged."""
    with AllReduces() as seen:
        wrapped(torch.ones(2, 8)).sum().backward()
    return f"{len(seen.sizes)} all-reduces, {sum(seen.sizes)} bytes"


# A group of one process makes the same calls as a larger one.
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

wrapped = DistributedDataParallel(Net())
print("step 1:", step(wrapped))
try:
    step(wrapped)
except RuntimeError as error:
    first, *lines = str(error).splitlines()
    print("step 2:", first.partition(" You can")[0])
    print(*[line for line in lines if line.startswith("Parameter indices")])

frozen = Net()
frozen.spare.requires_grad_(False)
remedies = {
    "find_unused_parameters=True": (Net(), {"find_unused_parameters": True}),
    "static_graph=True": (Net(), {"static_graph": True}),
    "spare.requires_grad_(False)": (frozen, {}),
}
for name, (net, options) in remedies.items():
    wrapped = DistributedDataParallel(net, **options)
    exchanged = [step(wrapped) for _ in range(3)]
    print(f"step 3 with {name:27} {exchanged[-1]}")
