"""recipes/README.md: each recipe prints what its docstring shows, from one file.

A recipe asserts its own proof. MISTAKES has a line of each, and what to replace it by:
then the run must end with an error.
"""

import ast
import re

import pytest
import torch

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.weights import max_abs_diff
from tests.training import counts
from tests.training import imported_by
from tests.training import replace_once
from tests.training import train_in_forks

pytestmark = pytest.mark.ci

FOLDER = ROOT / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))
OURS = {"benchmarks", "common", "harness", "nbtools", "tests", "tools"}
NEED = {"parts_not_used_fsdp.py": "2.13"}  # the version of torch
TYPED = "(Pdb) "  # in a docstring, before what is typed

# {recipe: (a text that it has once, what replaces it, what is then on standard error)}
MISTAKES = {
    "bucket_by_length.py": ("batch[self.rank :: self.world_size]", "batch"),
    "class_weights.py": ("dist.all_reduce(divisor)", "pass"),
    "contrastive_loss.py": (
        "dist.all_reduce(gradient)",
        "gradient = gradient * dist.get_world_size()",
    ),
    "debug_one_rank.py": (
        "    dist.breakpoint(rank=faulty)\n        if",
        "    breakpoint() if rank == faulty else None\n        if",
        "Timed out waiting",
    ),
    "early_stopping.py": ("dist.all_reduce(sums)", "sums = sums.clone()"),
    "ema.py": (
        "ema.update_parameters(model)",
        "dist.get_rank() or ema.update_parameters(model)",
    ),
    "expert_parallel.py": ("parameter.grad /= dist.get_world_size()", "pass"),
    "float8_fsdp.py": ('name.startswith("blocks.")', 'name.startswith("layers.")'),
    "iterable_dataset.py": ("self.rank * workers + worker,", "worker,"),
    "long_sequences.py": ("(old - new).exp()", "1"),
    "metrics_torchmetrics.py": (
        "values, sizes = evaluate(shard, device)",
        "values, sizes = evaluate(shard, device, sync_on_compute=False)",
    ),
    "muon_fsdp.py": ("[rank::world_size]", "[rank:]"),
    "nan_loss.py": ("if norm.isfinite():", "if loss.isfinite():"),
    "parts_not_used_fsdp.py": (
        "    model.set_reduce_scatter_unused_params(True)\n",
        "",
    ),
    "profile_step.py": ("bucket_cap_mb=bucket_cap_mb", "bucket_cap_mb=25"),
    "rank0_prepares_data.py": (
        "dist.barrier(patient_group)",
        "pass",
        "FileNotFoundError",
    ),
    "resume_stream.py": ('torch.set_rng_state(states["torch"])', "pass"),
    "slow_network.py": ("mean /= dist.get_world_size(group)", "pass"),
    "sync_batchnorm.py": ("dist.all_reduce(gradient)", "pass"),
    "torch_compile.py": ("model.compile(backend=backend)  #", "pass  #"),
    "two_networks.py": ("discriminator.requires_grad_(not freeze)", "pass"),
    "weighted_sampler.py": (
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed + self.rank)",
    ),
}


def docstring(recipe):
    """Return a recipe's question, its command, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / recipe).read_text()))
    question, _, shown = text.split("\n\n", 2)
    command, *printed = shown.splitlines()
    return question, command.removeprefix("$ "), printed


def run(recipe, folder, device, processes=2, script=None, code=0):
    """Run a recipe's command, or another script in the recipe's place; return a Done.

    What the docstring shows after pdb's prompts is on standard input.
    """
    _, command, printed = docstring(recipe)
    if torch.__version__ < (needed := NEED.get(recipe, "2.11")):
        pytest.skip(f"this recipe needs torch {needed}")
    if recipe == "float8_fsdp.py":
        pytest.importorskip("torchao", reason="torchao is not installed")
    if counts(device)[-1] < processes:
        pytest.skip(f"{processes} processes need as many GPUs")
    command = command.replace("node=2", f"node={processes}")
    if script:
        command = command.replace(f"recipes/{recipe}", str(script))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    typed = [line.removeprefix(TYPED) for line in printed if line.startswith(TYPED)]
    if not typed:
        return commands.run(command, folder, code, forks=True, **hidden)
    (folder / "typed").write_text("".join(f"{line}\n" for line in typed))
    words = ["bash", "-c", f"{command} <{folder / 'typed'}"]
    return commands.run(words, folder / "screen", code, **hidden)


def test_the_index_has_every_recipe_with_its_question():
    row = re.compile(r"^\| (.+) \| \[(\w+\.py)\]\(\2\) \| .+ \|$", re.MULTILINE)
    rows = row.findall((FOLDER / "README.md").read_text())
    assert sorted(recipe for _, recipe in rows) == RECIPES == sorted(MISTAKES)
    for question, recipe in rows:
        assert question == docstring(recipe)[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_prints_what_it_shows(recipe, tmp_path, device):
    """`[...]` stands for anything, and what is typed is not shown again."""
    assert not imported_by((FOLDER / recipe).read_text()) & OURS
    *_, printed = docstring(recipe)
    shown = "\n".join(TYPED if TYPED in line else line for line in printed)
    parts = shown.replace(f"{TYPED}\n", TYPED).split("[...]")
    done = run(recipe, tmp_path, device)
    assert re.fullmatch(".*".join(map(re.escape, parts)), done.stdout.rstrip("\n")), (
        done
    )


@pytest.mark.release
@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"debug_one_rank.py"}))
def test_the_proof_holds_on_three_processes(recipe, tmp_path, device):
    run(recipe, tmp_path, device, processes=3)


@pytest.mark.release
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_with_a_mistake_fails(recipe, tmp_path, device):
    script = tmp_path / recipe
    text, replacement, *error = MISTAKES[recipe]
    replace_once(FOLDER / recipe, (text, replacement), target=script)
    done = run(recipe, tmp_path, device, script=script, code=1)
    assert (error or ["AssertionError"])[0] in done.stderr, done.stderr


# ---- nccl_on_one_gpu.sh --------------------------------------------------------------
SHARED = ["bash", FOLDER / "nccl_on_one_gpu.sh"]


@pytest.mark.release
def test_ranks_on_one_gpu_train_the_weights_of_one_process(trained, tmp_path):
    """Here with gloo; `make gpu PART=nccl-tests` does it with nccl."""
    stage = first_with("torchrun")
    flags = ["--dtype", "float64", "--epochs", "1", "--out-dir", tmp_path]
    words = [*SHARED, 3, ROOT / stage / "train.py", *flags]
    port = commands.free_port()
    done = commands.run(words, PORT=port, CUDA_VISIBLE_DEVICES="")
    assert "3 processes on gloo" in done.stdout
    one = trained(stage, 1, *flags[:4], how=train_in_forks)
    assert max_abs_diff(one.weights, tmp_path / "last.pt") <= 1e-10
