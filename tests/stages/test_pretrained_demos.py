"""12_fsdp/demos/pretrained_memory.py counts what it should.

What the demos measure is asserted in the cells of the notebook that run them.
"""

import gc
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from tests.training import TRANSFORMERS

pytestmark = pytest.mark.ci

commands.preloaded += TRANSFORMERS

FOLDER = ROOT / first_with("shards")


# ---- the demos -----------------------------------------------------------------------
def count_a_mapped_file(path):
    """Be a process in which pretrained_memory.py counts what it should."""
    sys.path.insert(0, str(FOLDER / "demos"))
    from pretrained_memory import Allocated

    size = 128 * 64 * 4
    with Allocated() as memory, safe_open(path, "pt") as file:
        mapped = file.get_slice("weight")[:128]
        mapped.sum()  # an operation on it
        assert memory.now() < 100
        copy = mapped.float()
        assert copy.nbytes == size
        assert size <= memory.now() < size + 100
        del copy
        assert memory.now() < 100
    assert size <= memory.peak < size + 100


def test_a_mapped_file_is_not_counted_and_a_copy_is(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(256, 64, dtype=torch.bfloat16)}, path)
    commands.call_in_forks(count_a_mapped_file, [(path,)])


def read_by_rank_0(rank, folder):
    """Be a rank that gets its shards from rank 0; what it has must be in "model"."""
    sys.path.insert(0, str(FOLDER / "demos"))
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    compare_with_the_model(folder)
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()


def compare_with_the_model(folder):
    import pretrained_memory

    mesh = dist.init_device_mesh("cpu", (2,))
    model = pretrained_memory.rank_0_reads(folder / "base", mesh)
    right = AutoModelForCausalLM.from_pretrained(folder / "model").float()
    found = dict(model.named_parameters())
    assert found.keys() == dict(right.named_parameters()).keys()
    for name, weight in right.named_parameters():
        assert found[name].to_local().shape[0] == weight.shape[0] // 2
        assert found[name].full_tensor().equal(weight)
    for name, buffer in right.named_buffers():
        assert model.get_buffer(name).equal(buffer)


def test_rank_0_reads_files_whose_names_differ(tmp_path):
    """A base model's file has names without "model.", and a tied weight once."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    model.model.save_pretrained(tmp_path / "base")
    with safe_open(tmp_path / "base/model.safetensors", "pt") as file:
        assert "embed_tokens.weight" in file.keys()  # noqa: SIM118
    commands.call_in_forks(read_by_rank_0, [(0, tmp_path), (1, tmp_path)])


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("pretrained_memory.py {}", "there is no *.safetensors in {}"),
        ("small_updates.py {}", "there is no *.safetensors in {}"),
    ],
)
def test_bad_input_is_one_line(arguments, reason, tmp_path):
    script, *words = arguments.format(tmp_path).split()
    command = ["torchrun", "--standalone", "--nproc-per-node=1"]
    command += [FOLDER / "demos" / script, *words]
    done = commands.run(command, code=2, forks=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{script}: error: ")
    assert reason.format(tmp_path) in last
    assert "Traceback" not in done.stderr
