"""float8 and FSDP2: in which order, and what does it change in the numbers?

Call `convert_to_float8_training` (`pip install torchao`) first: it replaces each
`nn.Linear` that your filter picks. Then compile and shard, and make the optimizer last.
A filter that picks nothing converts nothing, without a message: count the layers. The
weights stay as they are. Each product rounds its two factors to float8, after scaling
each so that its largest number just fits: three bits of fraction are left in the
forward pass, and two in a gradient. The scales depend on what a rank has in its batch,
so N processes compute what one does only up to errors of float8's size. With
`emulate=True` it runs on any device, rounds in the same way, and is slow.

$ torchrun --standalone --nproc-per-node=2 recipes/float8_fsdp.py
converted: 4 of 5 linear layers
loss after 40 steps: 0.5 in bfloat16; in float8 within 0.03 of it
"""

import gc
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig
from torchao.float8 import convert_to_float8_training


# ---- the lines to copy ---------------------------------------------------------------
def in_a_block(module, name):
    """Return whether to convert this nn.Linear: not the head, nor odd sizes."""
    return name.startswith("blocks.") and all(n % 16 == 0 for n in module.weight.shape)


def convert(model, **options):
    config = Float8LinearConfig(**options)
    convert_to_float8_training(model, config=config, module_filter_fn=in_a_block)


def shard(model, backend="inductor"):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


# ---- the proof -----------------------------------------------------------------------
class Block(nn.Module):
    """A small network that adds to its input. Maps [N, 48] to the same shape."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up, self.down = nn.Linear(48, 192), nn.Linear(192, 48)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a head, always with the same weights. Maps [N, 48] to [N, 10]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(device, *prepare):
    """Return a model that was prepared by some functions, in their order."""
    model = Model().to(device)
    for each in prepare:
        each(model)
    return model


def train(model, device):
    """Train on this rank's part of the samples; return the last loss, of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(192, 48, generator=generator)[rank::world_size].to(device)
        loss = nn.functional.cross_entropy(
            model(inputs).float(), inputs[:, :10].argmax(1)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / world_size


def main():
    device, backend = torch.device("cpu"), "eager"  # Inductor takes a minute here
    if torch.cuda.is_available():
        device, backend = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])),
            "inductor",
        )
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    has_units = device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    in_float8 = partial(convert, emulate=not has_units)
    sharded = partial(shard, backend=backend)
    lines = []

    model = make(device, in_float8, sharded)
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    converted = [each for each in layers if type(each) is not nn.Linear]
    assert len(converted) == 4
    lines.append(f"converted: {len(converted)} of {len(layers)} linear layers")

    wide, narrow = train(make(device, sharded), device), train(model, device)
    assert 0 < abs(wide - narrow) < 0.03
    text = f"{wide:.1f} in bfloat16; in float8 within 0.03 of it"
    lines.append(f"loss after 40 steps: {text}")
    if dist.get_rank() == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
