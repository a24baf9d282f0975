"""What the tests of the memory sheet share: small models, and counted tensors."""

import sys
import weakref

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config
from transformers import LlamaConfig

from tests import fsdp_ranks
from tests.training import TRANSFORMERS
from tests.training import load_program
from tools import harness
from tools import memory
from tools.counting import Count
from tools.stages import ROOT

harness.preloaded += TRANSFORMERS

# 3 processes cannot share 64 rows equally, and 2 cannot share 131: shards are padded.
WIDTH, INNER, DEPTH, HEADS, KEY_HEADS = 64, 131, 2, 4, 2


def make_config(kind, vocab_size, inner=INNER, depth=DEPTH):
    """Return the configuration of a small model; inner: the width of its MLP."""
    tokens = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_inner": inner, "n_layer": depth, "n_head": HEADS}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(n_positions=128, **sizes, **dropout, **tokens)
    return LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        tie_word_embeddings=kind == "llama-tied",
        **tokens,
    )


def bytes_of(found, when, *names):
    """Return the bytes of the lines of a moment; names: of those alone."""
    some = [
        one for one in found if one.when == when and (not names or one.name in names)
    ]
    assert some and len(some) >= len(names)
    return sum(one.bytes for one in some)


class Alive(Count):
    """Counts the bytes of all storages that operations make, as long as they live.

    peak: the most at once since it was last set. FSDP2 frees weights by resizing their
    storages, so all are looked at after each operation.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.paused = weakref.WeakSet(), 0, False

    def note(self, _operation, args, result):
        if self.paused:
            return
        given = {one.untyped_storage() for one in tree_leaves(args) if is_plain(one)}
        made = {one.untyped_storage() for one in tree_leaves(result) if is_plain(one)}
        self.storages.update(made - given)
        self.peak = max(self.peak, self.bytes())

    def bytes(self):
        """Return how many bytes are alive now."""
        return sum(storage.nbytes() for storage in self.storages)


def is_plain(value):
    """Return whether it is a tensor of this process, with memory of its own."""
    # The last is around another tensor, and waits for its collective.
    wrappers = DTensor, AsyncCollectiveTensor
    return torch.is_tensor(value) and not isinstance(value, wrappers)


class OnCopies:
    """A collective of FSDP2 that gives copies to the backend, which are not counted.

    A thread of gloo may hold what it was given for a moment longer than FSDP2 does.
    """

    def __init__(self, collective, alive):
        self.collective, self.alive = collective, alive

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, **options):
        options["async_op"] = False
        self.alive.paused = True
        result = torch.empty_like(output_tensor)
        self.collective(result, input_tensor.clone(), **options)
        output_tensor.copy_(result)
        self.alive.paused = False


def prepare(model, choices, mesh, alive):
    """Return the model to train: sharded in place, or wrapped, or as it is."""
    if choices.activation_checkpointing:
        model.gradient_checkpointing_enable()
    if choices.strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if choices.strategy == "fsdp2":
        shard_model()(model, mesh, choices.policy == "bf16")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                gather = OnCopies(dist.all_gather_into_tensor, alive)
                module.set_custom_all_gather(gather)
                reduce = OnCopies(dist.reduce_scatter_tensor, alive)
                module.set_custom_reduce_scatter(reduce)
    return model


def shard_model():
    """Return the function by which the script for models of transformers shards one."""
    return load_program(ROOT / "your_own_script/hugging_face/fsdp.py").shard_model


def in_processes(function, processes, *arguments, folder):
    """Call a function in a group of processes; return what each returns."""
    calls = [
        (function, rank, processes, folder, *arguments) for rank in range(processes)
    ]
    harness.call_in_forks(fsdp_ranks.in_group, calls)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


def parse(text):
    """Return {title: {name of a line: bytes}}; the column of GiB must agree."""
    found, title = {}, None
    for line in text.splitlines():
        if not line.startswith("  "):
            title = line
            found[title] = {}
        elif title:  # the header of the table is under an empty line
            name, size, gib = line[2:42], line[62:78], line[78:]
            found[title][name.strip()] = int(size.replace(",", ""))
            assert float(gib) == round(int(size.replace(",", "")) / 2**30, 3)
    return found


def run_main(*flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory.py", *map(str, flags)])
    memory.main()
    return capsys.readouterr().out


def assert_one_line(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory.py", *map(str, flags)])
    with pytest.raises(SystemExit, match="^2$"):
        memory.main()
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("memory.py: error: ") and said in line
