"""docs/what_can_be_split.md is true: what a step sends, what a rank keeps.

tests/pages/test_pages.py runs the page's command.
"""

import copy
import re
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from common.gpt import GPT
from harness import commands
from harness.counting import Collectives
from harness.stages import ROOT
from harness.stages import first_with
from tests import fsdp_ranks

DEMOS = ROOT / first_with("tensor_parallel") / "demos"
sys.path.insert(0, str(DEMOS))

import as_the_world_grows as program
import mistakes

pytestmark = pytest.mark.ci

PAGE = (ROOT / "docs/what_can_be_split.md").read_text()
WIDTH, DEPTH = 128, program.DEPTH
PROCESSES, PER_MACHINE, MANY = 4, 2, 16


# ---- what the processes do -----------------------------------------------------------
def keep(kind):
    """Take a step; return the bytes of weights, gradients and moments on this rank."""
    model, optimizer = program.prepare(
        kind, WIDTH, program.make_mesh(kind, PER_MACHINE)
    )
    program.take_step(model, optimizer, WIDTH, 1)
    weights = [*model.parameters()]
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO-1's own
    moments = [one for state in states for one in state.values() if one.dim()]
    return fsdp_ranks.local_bytes([*weights, *(one.grad for one in weights), *moments])


def count(_rank=0, _processes=1):
    """Return {kind: its calls, and the bytes that this rank keeps}."""
    return {
        kind: (program.count_step(kind, WIDTH, PER_MACHINE), keep(kind))
        for kind in program.KINDS
    }


def count_without_hook(_rank, _processes):
    """Return the calls of DDP, which averages the gradients by itself."""
    ddp = nn.parallel.DistributedDataParallel
    with mock.patch.object(ddp, "register_comm_hook"):
        return program.count_step("DDP", WIDTH, PER_MACHINE)


def count_alone(path):
    """Save what rank 0 counts without other processes: {ranks: counts}."""
    found = {}
    for ranks in (PROCESSES, MANY, 256):
        dist.init_process_group("fake", rank=0, world_size=ranks)
        found[ranks] = count()
        dist.destroy_process_group()
    torch.save(found, path)


def on_each_process(function, folder):
    """Return what a function returns on each process of a group that uses gloo."""
    calls = [(function, rank, PROCESSES, folder) for rank in range(PROCESSES)]
    commands.call_in_forks(fsdp_ranks.in_group, calls)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "found.pt"
    commands.call_in_forks(count_alone, [(path,)])
    return torch.load(path)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return on_each_process(count, tmp_path_factory.mktemp("real"))


# ---- the program ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", program.KINDS)
def test_alone_a_rank_calls_and_keeps_what_it_does_among_others(kind, alone, real):
    """The collectives in their order, with sizes and ranks; all ranks send as many."""
    calls, kept = alone[PROCESSES][kind]
    assert len(calls) >= 2
    assert real[0][kind] == (calls, kept)
    for other in real[1:]:
        assert [call[:2] for call in other[kind][0]] == [call[:2] for call in calls]


def test_the_hook_calls_what_ddp_calls_without_it(real, tmp_path):
    without = on_each_process(count_without_hook, tmp_path)
    assert without == [rank["DDP"][0] for rank in real]


def weights(depth=DEPTH):
    """Return the bytes of a GPT's weights in float32."""
    model = GPT(WIDTH, WIDTH, WIDTH, depth, heads=2)
    return sum(weight.nbytes for weight in model.parameters())


def formulas():
    """Return {kind: bytes that a rank of MANY sends outside of inner groups, inside}.

    Exact up to norms, of which each rank of a tp group has a copy.
    """
    around, across = (MANY - 1) / MANY, (MANY - PER_MACHINE) / MANY
    inside = (PER_MACHINE - 1) / PER_MACHINE
    # gathered twice, except what is in no block; and gradients are scattered
    whole, sharded = weights(), 3 * weights() - weights(depth=0)
    # the sums of the blocks, of tokens, positions and the head's input; and the logits
    activations = (2 * (4 * DEPTH + 3) + 1) * 4 * WIDTH * WIDTH
    tensor = sharded / PER_MACHINE * across, activations * inside
    return {
        "DDP": (2 * whole * around, 0),
        "DDP, ZeRO-1": (3 * whole * around, 0),
        "FSDP": (sharded * around, 0),
        "HSDP": (2 * whole / PER_MACHINE * across, sharded * inside),
        "TP x FSDP": tensor,
        "TP across machines": tensor,
    }


@pytest.mark.parametrize("kind", program.KINDS)
def test_the_bytes_follow_the_formulas_of_the_page(kind, alone):
    outer, inner = formulas()[kind]
    sends, leaves, _ = program.add_up(alone[MANY][kind][0], PER_MACHINE)
    assert sends == pytest.approx(outer + inner, rel=0.02)
    # a ring of neighbors leaves a machine once, and one with gaps from every rank
    expected = {
        "HSDP": PER_MACHINE * outer,
        "TP x FSDP": PER_MACHINE * outer,
        "TP across machines": outer + PER_MACHINE * inner,
    }
    assert leaves == pytest.approx(expected.get(kind, outer), rel=0.02)


def test_messages_are_those_of_rings(alone):
    """FSDP gathers blocks twice and the rest once, and scatters each gradient."""
    calls, machines = 3 * DEPTH + 2, MANY // PER_MACHINE
    wanted = {
        "FSDP": calls * (MANY - 1),
        "HSDP": calls * (PER_MACHINE - 1) + (DEPTH + 1) * 2 * (machines - 1),
    }
    for kind, messages in wanted.items():
        assert program.add_up(alone[MANY][kind][0], PER_MACHINE)[2] == messages


# ---- the layers of a Llama -----------------------------------------------------------
TOKENS = 16  # in each of two sequences


class LlamaAttention(nn.Module):
    """As in common/gpt.py, with a layer each for queries, keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        heads = [each(x).unflatten(-1, (-1, self.head_dim)) for each in self.layers()]
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def layers(self):
        return self.q, self.k, self.v


class LlamaMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, norm):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.mlp = LlamaAttention(width, heads), LlamaMLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_gpt(depth):
    torch.manual_seed(0)
    return GPT(WIDTH, TOKENS, WIDTH, depth, heads=4)


def make_llama(depth, norm=nn.RMSNorm):
    """Return a GPT with the blocks of a Llama."""
    model = make_gpt(depth)
    blocks = (LlamaBlock(WIDTH, 4, norm) for _ in range(depth))
    model.blocks, model.norm = nn.ModuleList(blocks), norm(WIDTH)
    return model


def split(model, plan):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)
    return distribute_module(model, mesh)


def llama_plan():
    """Return stage 14's plan, with the names of a Llama's layers."""
    plan = mistakes.make_plan()
    del plan["blocks.*.attention.qkv"]
    columns, rows = plan.pop("blocks.*.up"), plan.pop("blocks.*.down")
    plan |= {f"blocks.*.attention.{name}": columns for name in "qkv"}
    plan |= {"blocks.*.mlp.gate": columns, "blocks.*.mlp.up": columns}
    return plan | {"blocks.*.mlp.down": rows}


def plain_norms():
    """Return what the norms need to give plain tensors to the layers after them."""
    style = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate()
    )
    return {"blocks.*.norm*": style, "norm": style}


def shared_inputs():
    """Return what makes of such a tensor one DTensor, for all layers that it enters."""
    style = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    )
    return {"blocks.*.attention": style, "blocks.*.mlp": style}


def all_reduces(make, plan, checkpointed=False):
    """Return how many activations a block all-reduces, forward and backward."""
    found = []
    for depth in (1, 2):
        model = split(make(depth), plan)
        for block in model.blocks if checkpointed else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        with Collectives() as collectives:
            program.counts.get_loss(model, torch.ones(2, TOKENS).long()).backward()
        size = 2 * TOKENS * WIDTH * 4  # bytes
        seen = [name for name, _, _, whole in collectives.seen if whole == size]
        found.append(seen.count("all_reduce"))
    return found[1] - found[0]


def count_in_blocks(path):
    dist.init_process_group("fake", rank=0, world_size=PROCESSES)
    plan, plain, shared = mistakes.make_plan(), plain_norms(), shared_inputs()
    found = {
        "qkv": all_reduces(make_gpt, plan),
        "checkpointed": all_reduces(make_gpt, plan, checkpointed=True),
        "layer norm": all_reduces(partial(make_llama, norm=nn.LayerNorm), llama_plan()),
        "plain": all_reduces(make_llama, llama_plan() | plain),
        "shared": all_reduces(make_llama, llama_plan() | plain | shared),
    }
    with pytest.raises(AssertionError, match="Redistribution from one partial type"):
        all_reduces(make_llama, llama_plan())
    torch.save(found, path)
    dist.destroy_process_group()


def test_how_often_the_ranks_of_a_block_add_up_an_activation(tmp_path):
    """An all-reduce sends it twice: 4 of them in each block are 8 L A."""
    commands.call_in_forks(count_in_blocks, [(tmp_path / "found.pt",)])
    assert torch.load(tmp_path / "found.pt") == {
        "qkv": 4,
        "checkpointed": 5,
        "layer norm": 4,
        "plain": 7,
        "shared": 4,
    }


def train_llama(_rank, _processes):
    """Return the largest difference of a gradient from one process's, and the norms."""
    one = make_llama(depth=2).double()
    model = split(copy.deepcopy(one), llama_plan() | plain_norms() | shared_inputs())
    tokens = torch.arange(2 * TOKENS).view(2, TOKENS) % WIDTH
    for each in (one, model):
        program.counts.get_loss(each, tokens).backward()
    found = [weight.grad.full_tensor() for weight in model.parameters()]
    pairs = zip(found, (weight.grad for weight in one.parameters()), strict=True)
    off = max((grad - wanted).abs().max().item() for grad, wanted in pairs)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (one, model)]
    return off, norms[0].item(), norms[1].full_tensor().item()


def test_the_plan_of_a_llama_gives_the_gradient_of_one_process(tmp_path):
    for off, wanted, norm in on_each_process(train_llama, tmp_path):
        assert off < 1e-12 and wanted > 0.1
        assert norm == pytest.approx(wanted, rel=1e-9)


# ---- the page ------------------------------------------------------------------------
def test_a_rank_keeps_what_the_page_says(real, alone):
    whole = weights()
    kept = {kind: [rank[kind][1] for rank in real] for kind in program.KINDS}
    assert kept["DDP"] == [4 * whole] * PROCESSES
    # every rank has weights and gradients; the moments are dealt out
    shares = [one - 2 * whole for one in kept["DDP, ZeRO-1"]]
    assert sum(shares) == 2 * whole and min(shares) > 0
    assert alone[256]["DDP, ZeRO-1"][1] == alone[MANY]["DDP, ZeRO-1"][1]
    assert sum(kept["FSDP"]) == 4 * whole
    assert sum(kept["HSDP"]) == PROCESSES / PER_MACHINE * 4 * whole
    # of the norms and of what follows a sum, each rank of a tp group has a copy
    assert 4 * whole < sum(kept["TP x FSDP"]) < 1.05 * 4 * whole


def test_rows_that_are_not_a_multiple_of_the_ranks_are_padded(alone):
    """With FSDP; HSDP has only two shards."""
    sent = {
        (ranks, kind): program.add_up(alone[ranks][kind][0], PER_MACHINE)[0]
        for ranks in (MANY, 256)
        for kind in ("FSDP", "HSDP")
    }
    assert sent[256, "FSDP"] > 1.2 * sent[MANY, "FSDP"]
    assert sent[256, "HSDP"] < 1.1 * sent[MANY, "HSDP"]


def test_the_numbers_in_the_text_are_those_of_the_table():
    """Each number with a unit, and each large one."""
    section = (ROOT / "docs/as_the_world_grows.md").read_text()
    _, table, text = section.split("```")
    numbers = re.findall(r"\d[\d,.]* MB|\d+,\d{3}", text)
    assert len(numbers) >= 10
    # the ranks; the rows of `qkv` with another width, and with padding
    table += f" {program.RANKS[-1]:,} {3 * 512:,} {2 * 1024:,}"
    for number in numbers:
        assert re.search(rf"(?<![\d,.]){re.escape(number)}", table), number
