"""The memory sheet of tensor parallelism and of a pipeline, against counted tensors.

As in tests/test_memory.py, small models are trained in several processes, which count
all that operations make as long as it is alive.
"""

import functools
import gc
import sys
from typing import NamedTuple

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM

from common.gpt import GPT
from tests import fsdp_ranks
from tests.conftest import only_in_release
from tests.memory_harness import Alive
from tests.memory_harness import assert_one_line
from tests.memory_harness import bytes_of
from tests.memory_harness import in_processes
from tests.memory_harness import make_config
from tests.memory_harness import parse
from tests.memory_harness import prepare
from tests.memory_harness import run_main
from tools import harness
from tools import memory
from tools.memory import BLOCK
from tools.memory import HEAD
from tools.memory import LOSS
from tools.memory import STATES
from tools.memory import STEP
from tools.memory import TABLE
from tools.memory import TIED
from tools.memory import Choices
from tools.memory import totals
from tools.stages import ROOT
from tools.stages import first_with

harness.preloaded += ["tests.test_memory_splits"]

(DEMOS,) = ROOT.glob("*/demos/pipeline.py")
sys.path.insert(0, str(DEMOS.parent))

import pipeline

pytestmark = pytest.mark.ci

INNER, DEPTH = 132, 4  # two tp ranks and two stages can share them
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
COLLECTIVES = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}


class Case(NamedTuple):
    """A training; flags: those of the tool, in pairs."""

    vocab_size: int
    tokens: int
    flags: tuple = ()
    tied: bool = False

    @property
    def config(self):
        kind = "llama-tied" if self.tied else "llama"
        return make_config(kind, self.vocab_size, INNER, DEPTH)

    def choices(self, processes):
        return Choices(processes, self.tokens, **dict(self.flags))


@functools.cache
def sheets_of(case, processes):
    """Return the Sheet of each stage of a pipeline, or one."""
    return memory.counter(case.config)(case.choices(processes))


# ---- what the processes do -----------------------------------------------------------
class AliveOfDTensor(Alive):
    """Alive, with DTensor's collectives on copies that are not counted.

    A thread of gloo may hold what it was given for a moment longer than DTensor does.
    """

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__.partition(".")[0]
        if DTensor in types or name not in COLLECTIVES:
            return super().__torch_dispatch__(operation, types, args, kwargs)
        given, *others = args
        result = operation(given.clone(), *others, **(kwargs or {}))
        result = torch.ops._c10d_functional.wait_tensor(result).clone()
        self.note(operation, args, result)
        return result


def sizes(model, optimizer):
    """Return the bytes of this process's weights, gradients and averages."""
    states = [one for each in optimizer.state.values() for one in each.values()]
    return {
        "params": fsdp_ranks.local_bytes(model.parameters()),
        "grads": fsdp_ranks.local_bytes(one.grad for one in model.parameters()),
        "states": fsdp_ranks.local_bytes(one for one in states if one.dim()),
    }


def train_split(case, processes):
    """Train on two micro-batches, with tensor parallelism and FSDP2.

    Return what `sizes` does, and as test_memory.train does: held, kept and peak. With
    --grad-accum, there is one more between them, and no gradient is reduced any more.
    """
    choices = case.choices(processes)
    tp = choices.tensor_parallel
    mesh = dist.init_device_mesh(
        "cpu", (processes // tp, tp), mesh_dim_names=("dp", "tp")
    )
    tokens = torch.randint(case.vocab_size, (1, case.tokens))

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16, choices.policy == "bf16"):
            logits = model(input_ids=tokens, use_cache=False).logits[0]
            return nn.functional.cross_entropy(logits, tokens[0])

    with AliveOfDTensor() as alive:
        model = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32)
        parallelize_module(model.train(), mesh["tp"], PLAN)
        if case.tied:  # each of the two layers has made a weight of its own
            model.lm_head.weight = model.model.embed_tokens.weight
        prepare(model, choices, mesh["dp"], alive)
        optimizer = torch.optim.AdamW(model.parameters())
        forward(model).backward()
        optimizer.step()
        seen = sizes(model, optimizer)
        if choices.grad_accum:
            optimizer.zero_grad()
            model.set_requires_gradient_sync(False)
            forward(model).backward()
        buffers = sum(one.nbytes for one in model.buffers())  # these are not counted
        seen["held"] = alive.bytes() - buffers
        loss = forward(model)
        seen["kept"] = alive.bytes() - buffers - seen["held"]
        alive.peak = 0
        loss.backward()
        seen["peak"] = alive.peak - buffers
    return seen


class Part(nn.Module):
    """What a rank of a pipeline has of a model of Llama's architecture."""

    def __init__(self, model, rank, ranks, autocast):
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.autocast, self.rotary = autocast, model.model.rotary_emb
        numbers = torch.arange(DEPTH).tensor_split(ranks)[rank].tolist()
        self.blocks = nn.ModuleList(model.model.layers[n] for n in numbers)
        if self.is_first:
            self.embedding = model.model.embed_tokens
        if self.is_last:
            self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, self.autocast):
            if self.is_first:
                x = self.embedding(x)
            positions = torch.arange(x.shape[1])[None]
            rotations = self.rotary(x, positions)
            for block in self.blocks:
                x = block(x, position_embeddings=rotations, position_ids=positions)
            return self.head(self.norm(x)) if self.is_last else x


class Measured(PipelineStage):
    """A stage that notes how many bytes are alive before each backward pass."""

    def __init__(self, alive, *args):
        super().__init__(*args)
        self.alive, self.before = alive, []

    def backward_one_chunk(self, *args, **kwargs):
        self.before.append(self.alive.bytes())
        super().backward_one_chunk(*args, **kwargs)


def train_stage(case, rank, processes):
    """Train with two steps of a pipeline; measure in the second.

    Return what `sizes` does, and bytes of this process: held, of all tensors before the
    step; kept, of what there is in addition before a backward pass, at most; peak, of
    all in the schedule's step; step, and in the optimizer's step.
    """
    choices = case.choices(processes)
    batches = choices.micro_batches
    tokens = torch.randint(case.vocab_size, (batches, case.tokens))
    autocast = choices.autocast

    def loss_fn(logits, targets):
        with torch.autocast("cpu", torch.bfloat16, choices.policy == "bf16"):
            return nn.functional.cross_entropy(logits[0], targets[0])

    with Alive() as alive:
        model = AutoModelForCausalLM.from_config(
            case.config, dtype=memory.DTYPES[choices.master]
        ).train()
        if choices.activation_checkpointing:
            model.gradient_checkpointing_enable()
        part = Part(model, rank, processes, autocast)
        del model
        gc.collect()
        stage = Measured(alive, part, rank, processes, torch.device("cpu"))
        schedule = Schedule1F1B(stage, batches, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(part.parameters(), foreach=True)

        def step():
            inputs = [tokens] if part.is_first else []
            targets = {"target": tokens} if part.is_last else {}
            schedule.step(*inputs, **targets, return_outputs=False)

        step()
        optimizer.step()
        seen = sizes(part, optimizer)
        buffers = sum(one.nbytes for one in part.buffers())
        seen["held"] = alive.bytes() - buffers
        stage.before.clear()
        alive.peak = 0
        step()
        seen["kept"] = max(stage.before) - buffers - seen["held"]
        seen["peak"], alive.peak = alive.peak - buffers, 0
        optimizer.step()
    return {**seen, "step": alive.peak - buffers}


def train_all(rank, processes, split, staged):
    """Return what is measured in each case: of train_split, and of train_stage."""
    found = [train_split(case, processes) for case in split]
    return found + [train_stage(case, rank, processes) for case in staged]


# ---- tensor parallelism --------------------------------------------------------------
SPLIT = (("tensor_parallel", 2),)
CHECKPOINTED = (("activation_checkpointing", True),)
FLOAT32 = (("policy", "float32"),)
AT_LOSS = [
    Case(1024, 128, flags) for flags in (SPLIT, SPLIT + FLOAT32, SPLIT + CHECKPOINTED)
]
AT_LOSS += [
    Case(1024, 128, SPLIT, tied=True),
    Case(1023, 128, SPLIT),  # the last rank has a row less
    Case(1024, 128, (*SPLIT, ("grad_accum", True))),
    Case(1024, 128, (*SPLIT, ("grad_accum", True)), tied=True),
]
AT_EMBEDDING = [Case(4096, 2, SPLIT + FLOAT32, tied) for tied in (False, True)]
AT_HEAD = [Case(4096, 2, SPLIT)]
IN_GROUPS = [*AT_LOSS, *AT_EMBEDDING, *AT_HEAD]

STAGED = (("strategy", "pipeline"), ("micro_batches", 4))
IN_STAGES = [
    Case(1024, 128, STAGED + flags)
    for flags in ((), FLOAT32, CHECKPOINTED, CHECKPOINTED + FLOAT32)
]
IN_STAGES += [Case(1024, 128, (*STAGED, ("master", "bf16")))]
IN_STAGES += [Case(64, 2, STAGED + FLOAT32)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return a function: what each of so many processes measures in a case."""

    @functools.cache
    def train_in(processes):
        split = IN_GROUPS if processes in (2, 4) else []
        staged = IN_STAGES if processes in (2, 3) else []
        folder = tmp_path_factory.mktemp("measured")
        ranks = in_processes(train_all, processes, split, staged, folder=folder)
        return {
            case: each for case, *each in zip([*split, *staged], *ranks, strict=True)
        }

    return lambda case, processes: train_in(processes)[case]


def parameters(case):
    """Return how many parameters a case's model has, and how many are of its norms."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    return sum(sizes.values()), sum(sizes[name] for name in sizes if "norm" in name)


def is_rank_0_of_groups(rank):
    """Of groups of two; the sheet's is the part of these, which may be larger."""
    return rank % 2 == 0


@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", IN_GROUPS)
def test_the_states_of_a_tp_group_are_its_parts(case, processes, measured):
    """And all ranks together have each layer once, and the norms in each group."""
    (sheet,) = sheets_of(case, processes)
    weights = bytes_of(sheet.lines, STATES, "weights, float32")
    found = measured(case, processes)
    for rank, seen in enumerate(found):
        own = seen["params"], seen["grads"], seen["states"]
        if is_rank_0_of_groups(rank) or case.vocab_size % 2 == 0:
            assert own == (weights, weights, 2 * weights)
            assert seen["held"] == bytes_of(sheet.lines, STATES)
        assert own[0] <= weights
    whole, norms = parameters(case)
    assert sum(seen["params"] for seen in found) == 4 * (whole + norms)
    assert f"P = {whole:,} parameters" in memory.letters(
        sheet.shape, sheet.activations, case.choices(processes), 0
    )


@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", AT_LOSS)
def test_a_tp_group_while_the_loss_is_differentiated(case, processes, measured):
    """To the byte, with the two scalars of the loss."""
    (sheet,) = sheets_of(case, processes)
    assert next(iter(totals(sheet.lines))) == LOSS
    # One of the three is there after the forward pass: the log-softmax.
    kept = bytes_of(sheet.lines, LOSS) - 2 * 4 * case.tokens * case.vocab_size
    for rank, seen in enumerate(measured(case, processes)):
        if is_rank_0_of_groups(rank) or case.vocab_size % 2 == 0:
            assert seen["kept"] == kept + 8
            assert seen["peak"] == sheet.most + 8


@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", AT_EMBEDDING)
def test_a_tp_group_while_the_embedding_is_differentiated(case, processes, measured):
    """To the byte, with the two scalars of the loss; there are few tokens."""
    (sheet,) = sheets_of(case, processes)
    assert next(iter(totals(sheet.lines))) == (TIED if case.tied else TABLE)
    for seen in measured(case, processes):
        assert seen["peak"] == sheet.most + 8


@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", AT_HEAD)
def test_a_tp_group_while_the_heads_gradient_is_reduced(case, processes, measured):
    """To the byte, with the two scalars of the loss.

    Except that torch 2.15 frees the head's gradient when it has copied it. And less is
    measured with a single tp group, which has no other to reduce it with.
    """
    (sheet,) = sheets_of(case, processes)
    assert next(iter(totals(sheet.lines))) == HEAD
    freed = bytes_of(sheet.lines, HEAD, "gradients of the head")
    if processes == 2:
        freed += bytes_of(sheet.lines, HEAD, "reduce-scatter of the head")
    for seen in measured(case, processes):
        if torch.__version__ < "2.15" and processes > 2:
            assert seen["peak"] == sheet.most + 8
        assert sheet.most + 8 - freed <= seen["peak"] <= sheet.most + 8


@pytest.mark.parametrize("processes", [2, only_in_release(4)])
def test_the_stage_leaves_the_same_parts_on_each_rank(processes, tmp_path):
    """Of the GPT of common/: all its sizes can be divided."""
    stage = first_with("tensor_parallel")
    ranks = in_processes(
        fsdp_ranks.take_steps,
        processes,
        stage,
        "--tensor-parallel",
        2,
        folder=tmp_path,
    )
    dims = {"tokens": 0, "positions": 0, "qkv": 0, "up": 0, "head": 0}
    dims |= {"out": 1, "down": 1}
    own = [
        memory.split_shape(weight.shape, dims.get(name.split(".")[-2]), 2)
        for name, weight in ranks[0]["weights"].items()
    ]
    expected = 4 * memory.numel(own, processes // 2)
    for seen in ranks:
        found = seen["params"], seen["grads"], seen["states"]
        assert found == (expected, expected, 2 * expected)


# ---- a pipeline ----------------------------------------------------------------------
@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", IN_STAGES)
def test_the_states_of_a_stage(case, processes, measured):
    """With the buffers that it receives into. All ranks have each weight once."""
    size = memory.BYTES[case.choices(processes).master]
    found = measured(case, processes)
    for sheet, seen in zip(sheets_of(case, processes), found, strict=True):
        own = size * memory.numel(sheet.shape.tensors)
        assert (seen["params"], seen["grads"], seen["states"]) == (own, own, 2 * own)
        assert seen["held"] == bytes_of(sheet.lines, STATES)
        assert seen["step"] == totals(sheet.lines)[STEP]
    assert sum(seen["params"] for seen in found) == size * parameters(case)[0]


@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", IN_STAGES)
def test_what_a_stage_keeps_of_the_micro_batches_in_flight(case, processes, measured):
    """To the byte, before a backward pass; on the last rank with the losses of four."""
    *others, last = zip(
        sheets_of(case, processes), measured(case, processes), strict=True
    )
    logits = case.tokens * case.vocab_size
    for sheet, seen in others:
        moment = [one for one in sheet.lines if one.when == BLOCK]
        in_flight = [one for one in moment if not one.name.endswith("recomputed")]
        assert seen["kept"] == sum(one.bytes for one in in_flight)
    sheet, seen = last
    assert seen["kept"] == bytes_of(sheet.lines, LOSS) - 2 * 4 * logits + 4 * 4 + 4


@pytest.mark.release
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", IN_STAGES)
def test_the_fullest_moment_of_a_stage(case, processes, measured):
    """To the byte while the loss is differentiated, with the losses of four.

    While a block is, there are intermediate results in addition, which are less than
    the activations of a block.
    """
    for sheet, seen in zip(
        sheets_of(case, processes), measured(case, processes), strict=True
    ):
        moments = totals(sheet.lines)
        if case.tokens == 2:  # the least of a pass, and AdamW's step is the fullest
            assert next(iter(moments)) == STEP
        elif LOSS in moments:
            assert next(iter(moments)) == LOSS
            assert seen["peak"] == sheet.most + 4 * 4 + 4
        else:
            assert next(iter(moments)) == BLOCK
            more = seen["peak"] - sheet.most
            assert -0.05 * sheet.most <= more <= sheet.activations.recomputed


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_parts_of_the_stages_pipeline(ranks):
    """The blocks of each; the first embeds, and the last has the norm and the head."""
    model = GPT(256, context_length=8, depth=5)
    numbers, held = memory.split_blocks(5, ranks), []
    for rank in range(ranks):
        part = pipeline.Part(model, rank, ranks)
        assert [*part.blocks] == [str(n) for n in numbers[rank]]
        names = {name for name, _ in part.named_children()} - {"blocks"}
        first = {"tokens", "positions"} if rank == 0 else set()
        assert names == first | ({"norm", "head"} if rank == ranks - 1 else set())
        held += part.parameters()
    assert len(held) == len(list(model.parameters()))


def test_a_pipeline_with_as_many_micro_batches_as_ranks_sends_none_early():
    """A rank's first backward pass comes after its last forward pass."""
    case = Case(64, 2, STAGED + FLOAT32)
    first, _, third, _ = sheets_of(case, 4)
    (rule,) = [one.rule for one in first.lines if one.name.startswith("outputs")]
    assert rule == "(4 + 0) A"
    (rule,) = [one.rule for one in third.lines if one.name.startswith("outputs")]
    assert rule == "(2 + 1) A"


# ---- the sheet -----------------------------------------------------------------------
ROWS = {
    "": {
        *("--activation-checkpointing", "--grad-accum"),
        *("--tensor-parallel 2", "--strategy pipeline"),
        *("--strategy ddp", "--strategy single"),
    },
    "--tensor-parallel 2": {
        *("--activation-checkpointing", "--grad-accum", "--tensor-parallel 1"),
        *(f"--tensor-parallel 1 --strategy {one}" for one in ("ddp", "single")),
        "--tensor-parallel 1 --strategy pipeline",
    },
    "--strategy pipeline --micro-batches 7": {
        "--activation-checkpointing",
        *(f"--strategy {one}" for one in ("fsdp2", "ddp", "single")),
    },
}


@pytest.mark.parametrize("flags", [only_in_release(f, unless=not f) for f in ROWS])
def test_each_total_of_another_choice(flags, tmp_path, monkeypatch, capsys):
    """It is that of a sheet with this choice."""
    Case(512, 2).config.save_pretrained(tmp_path)
    common = ("--config", tmp_path, "--gpus", 4, "--tokens", 100, *flags.split())
    run = functools.partial(run_main, *common, monkeypatch=monkeypatch, capsys=capsys)
    others = parse(run())["the fullest moment with another choice"]
    assert others.keys() == ROWS[flags]
    for more, size in others.items():
        found = parse(run(*more.split()))
        together = [
            named["together with the states"]
            for named in found.values()
            if "together with the states" in named
        ]
        assert together[0] == max(together) == size
        ranks = found.get("the fullest moment of each rank", {"rank 0": size})
        assert max(ranks.values()) == size


# ---- wrong input ---------------------------------------------------------------------
WRONG = {
    "GPUs are left": (
        "--gpus 8 --tensor-parallel 3",
        "--tensor-parallel must divide --gpus (8)",
    ),
    "tensor parallelism with DDP": (
        "--tensor-parallel 2 --strategy ddp",
        "--tensor-parallel: not with --strategy ddp",
    ),
    "tensor parallelism with a pipeline": (
        "--tensor-parallel 2 --strategy pipeline",
        "--tensor-parallel: not with --strategy pipeline",
    ),
    "half a head": (
        "--gpus 3 --tensor-parallel 3",
        "--tensor-parallel must divide num_attention_heads (32)",
    ),
    "half a key head": (
        "--gpus 16 --tensor-parallel 16",
        "--tensor-parallel must divide num_key_value_heads (8)",
    ),
    "one GPU": ("--strategy pipeline --gpus 1", "--strategy pipeline needs --gpus 2"),
    "few micro-batches": (
        "--strategy pipeline --gpus 8 --micro-batches 7",
        "--micro-batches 7: 1F1B needs as many as there are GPUs (8), or more",
    ),
    "more GPUs than blocks": (
        "--strategy pipeline --gpus 33",
        "--strategy pipeline: 33 GPUs need a block each, and the model has 32",
    ),
    "fused queries, keys and values": (
        "--config {gpt2} --tensor-parallel 2",
        "--tensor-parallel cannot split c_attn",
    ),
    "a tied embedding in a pipeline": (
        "--config {gpt2} --strategy pipeline --gpus 2",
        "--strategy pipeline: the embedding is the head, too",
    ),
}


@pytest.mark.parametrize("flags, said", WRONG.values(), ids=list(WRONG))
def test_wrong_input_gets_one_line(flags, said, tmp_path, monkeypatch, capsys):
    make_config("gpt2", 512).save_pretrained(tmp_path)
    words = flags.format(gpt2=tmp_path).split()
    assert_one_line(words, said, monkeypatch, capsys)
