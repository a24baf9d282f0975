"""docs/what_can_be_split.md, *RMS norm*: the lines with which a Llama is split."""

import copy
import re

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from common.gpt import GPT
from harness import commands
from harness.stages import ROOT
from tests import fsdp_ranks

pytestmark = pytest.mark.ci
PAGE = (ROOT / "docs/what_can_be_split.md").read_text()
(LINES,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STYLES = {
    each.__name__: each for each in (Replicate, PrepareModuleInput, PrepareModuleOutput)
}
TOKENS = torch.arange(32).view(2, 16)
WIDTH = 64


class Attention(nn.Module):
    """As in common/gpt.py, with a layer each for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        heads = (each(x).unflatten(-1, (-1, 16)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make():
    """Return a GPT with the blocks of a Llama."""
    torch.manual_seed(0)
    model = GPT(32, 16, WIDTH, depth=2, heads=4)
    model.blocks = nn.ModuleList(Block() for _ in range(2))
    model.norm = nn.RMSNorm(WIDTH)
    return model.double()


def split(model, lines):
    """Split the layers by stage 14's plan, and what some lines add to it."""
    columns, rows = ColwiseParallel(), RowwiseParallel(use_local_output=False)
    same = RowwiseParallel(input_layouts=Replicate(), use_local_output=False)
    plan = {f"blocks.*.attention.{name}": columns for name in "qkv"}
    plan |= {"blocks.*.mlp.gate": columns, "blocks.*.mlp.up": columns}
    plan |= {"blocks.*.attention.out": rows, "blocks.*.mlp.down": rows}
    plan |= {"tokens": same, "positions": same}
    plan |= {"head": ColwiseParallel(output_layouts=Replicate())}
    names = {**STYLES, "plan": plan}
    exec(lines, names)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, names["plan"])
    return distribute_module(model, mesh)


def backward(model):
    functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    return model


def train(_rank, _processes):
    """Return how far the gradients are from those of one process."""
    with pytest.raises(AssertionError, match="Redistribution from one partial type"):
        backward(split(make(), ""))
    model = make()
    one, split_model = backward(copy.deepcopy(model)), backward(split(model, LINES))
    pairs = zip(one.parameters(), split_model.parameters(), strict=True)
    return max((a.grad - b.grad.full_tensor()).abs().max().item() for a, b in pairs)


def test_the_lines_of_the_page_give_the_gradient_of_one_process(tmp_path):
    """Without them, there is an error."""
    calls = [(train, rank, 2, tmp_path) for rank in range(2)]
    commands.call_in_forks(fsdp_ranks.in_group, calls)
    assert torch.load(tmp_path / "0.pt") < 1e-12
