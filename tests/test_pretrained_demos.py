"""The demos and the exercises of 13_sharded_checkpoints/pretrained_*.ipynb.

What the demos measure is asserted in the cells that run them.
"""

import contextlib
import gc
import re
import sys

import nbformat
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig

from nbtools import harness
from tests.training import TRANSFORMERS
from tools.stages import ROOT
from tools.stages import first_with

pytestmark = pytest.mark.ci

harness.preloaded += TRANSFORMERS

FOLDER = ROOT / first_with("sharded_checkpoints")
NAMES = ("pretrained_model",)
CELLS = {
    name: nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells for name in NAMES
}
IMPORTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from nbtools import lesson
"""
NUMBERED = [("pretrained_model", n) for n in range(2)]


# ---- the exercises -------------------------------------------------------------------
def path_of_solutions(name):
    return f"demos/{name.removesuffix('_model')}_solutions.py"


def solutions(name):
    """Return the imports of a notebook's solutions, and each solution."""
    text = (FOLDER / path_of_solutions(name)).read_text()
    return re.split(r"^# -+ exercise \d+ -+\n", text, flags=re.MULTILINE)


def tagged(name, tag):
    return [cell.source for cell in CELLS[name] if cell.metadata.get("tags") == [tag]]


@pytest.mark.parametrize("name", NAMES)
def test_the_solutions_are_linked(name):
    prose = [cell.source for cell in CELLS[name] if cell.cell_type == "markdown"]
    assert f"]({path_of_solutions(name)})" in "\n".join(prose)
    count = len([each for each, _ in NUMBERED if each == name])
    assert len(tagged(name, "exercise")) == len(tagged(name, "check")) == count
    assert len(solutions(name)) == 1 + count


def say(program, path):
    """Be a process that runs a program, and writes what it prints to a file."""
    with path.open("w") as file, contextlib.redirect_stdout(file):
        exec(program, {})


def said(name, answer, check, folder):
    """Return the last line that a check prints after an answer.

    In a fork, because a check may make a process group.
    """
    imports, *_ = solutions(name)
    program = f"{IMPORTS}\n{imports}\n{answer}\n{check}"
    harness.call_in_forks(say, [(program, folder / "said")])
    return (folder / "said").read_text().splitlines()[-1]


@pytest.mark.release  # as are these two notebooks
@pytest.mark.parametrize("name, n", NUMBERED)
def test_an_exercise_is_solved_by_its_solution_only(name, n, tmp_path):
    check = tagged(name, "check")[n]
    unsolved = said(name, tagged(name, "exercise")[n], check, tmp_path)
    assert unsolved.startswith("Not solved yet: ")
    assert said(name, solutions(name)[1 + n], check, tmp_path) == "Solved."


@pytest.mark.release
@pytest.mark.parametrize(
    "n, answer, reason",
    [
        (0, "all_gathers = reduce_scatters = 35", "gathered in backward, too"),
        (0, "all_gathers = reduce_scatters = 70", "some groups stay whole"),
        (0, "all_gathers = reduce_scatters = 68", "one for each group"),
        (1, "share = 0.99", "a weight of 0.02 does not change"),
        (1, "share = 0.0", "the weights near zero do change"),
        (1, "share = 0.31", "between -2**-8 and 2**-8"),
        (1, "share = 15.5", "it is between 0 and 1"),
    ],
)
def test_a_wrong_answer_is_told_why(n, answer, reason, tmp_path):
    name = "pretrained_model"
    assert reason in said(name, answer, tagged(name, "check")[n], tmp_path)


def test_the_share_that_the_demo_prints_is_accepted(tmp_path):
    """14.5%, as the run after the exercise finds it."""
    check = tagged("pretrained_model", "check")[1]
    assert said("pretrained_model", "share = 0.145", check, tmp_path) == "Solved."


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
    harness.call_in_forks(count_a_mapped_file, [(path,)])


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
    harness.call_in_forks(read_by_rank_0, [(0, tmp_path), (1, tmp_path)])


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("pretrained_memory.py {}", "there is no *.safetensors in {}"),
        ("pretrained_choices.py moved {}", "there is no *.safetensors in {}"),
        ("pretrained_choices.py move {}", "invalid choice: 'move'"),
    ],
)
def test_bad_input_is_one_line(arguments, reason, tmp_path):
    script, *words = arguments.format(tmp_path).split()
    command = ["torchrun", "--standalone", "--nproc-per-node=1"]
    command += [FOLDER / "demos" / script, *words]
    done = harness.run(command, code=2, forks=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{script}: error: ")
    assert reason.format(tmp_path) in last
    assert "Traceback" not in done.stderr
