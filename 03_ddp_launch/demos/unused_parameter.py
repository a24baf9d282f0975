"""A layer that the loss does not use: the error, and three remedies.

python 03_ddp_launch/demos/unused_parameter.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.counting import Collectives


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.spare = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, images):
        return self.head(images)  # and never self.spare


def step(wrapped):
    """Go forward and backward; return what that exchanged."""
    with Collectives() as collectives:
        wrapped(torch.ones(2, 8)).sum().backward()
    sizes = [size for name, _, size, _ in collectives.seen if name == "all_reduce"]
    return f"{len(sizes)} all-reduces, {sum(sizes)} bytes"


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
