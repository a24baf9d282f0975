"""The recipes: each prints what its docstring shows, and proves what it says.

A recipe's docstring is the question on one line, the answer, and the command with the
lines that it prints. A recipe asserts its own proof. BROKEN has a line of each recipe,
and what to replace it by: then the proof must fail.
"""

import ast
import re
import shlex
import sys

import pytest

from tests import harness
from tools.stages import ROOT

FOLDER = ROOT / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))
INDEX = FOLDER / "README.md"
OURS = {"benchmarks", "common", "nbtools", "tests", "tools"}
# {recipe: (a text that is there once, its replacement, what the failing run then says)}
BROKEN = {
    "activation_checkpointing.py": (
        '{"use_reentrant": False}):',
        '{"use_reentrant": True}):',
        "Expected to mark a variable ready only once",
    ),
    "comm_hook_bf16.py": (
        "model.register_comm_hook(None, hook)",
        "pass",
        "AssertionError",
    ),
    "contrastive_loss.py": (
        "dist.all_reduce(gradient)",
        "gradient = gradient * dist.get_world_size()",
        "AssertionError",
    ),
    "early_stopping.py": (
        "dist.all_reduce(sums)",
        "sums = sums.clone()",
        "AssertionError",
    ),
    "ema.py": (
        "ema.update_parameters(model)",
        "ema.update_parameters(model) if rank == 0 else None",
        "AssertionError",
    ),
    "huge_eval_outputs.py": (
        "zip_longest(*parts)",
        "zip_longest(*reversed(parts))",
        "AssertionError",
    ),
    "iterable_dataset.py": (
        "self.rank * workers + worker,",
        "worker,",
        "AssertionError",
    ),
    "logging_rank0.py": (
        "dist.all_reduce(sums)",
        "sums = sums.clone()",
        "AssertionError",
    ),
    "profile_step.py": (
        "bucket_cap_mb=bucket_cap_mb",
        "bucket_cap_mb=25",
        "AssertionError",
    ),
    "torch_compile.py": (
        "optimize_ddp = order in orders",
        "optimize_ddp = True",
        "AssertionError",
    ),
    "two_networks.py": (
        "with no_sync():",
        "with contextlib.nullcontext():",
        "AssertionError",
    ),
    "weighted_sampler.py": (
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed + self.rank)",
        "AssertionError",
    ),
}


def docstring(recipe):
    """Return a recipe's question, answer, command, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / recipe).read_text()))
    question, answer, shown = text.split("\n\n", 2)
    command, *printed = shown.splitlines()
    assert command.startswith("$ ")
    return question, answer, command.removeprefix("$ "), printed


def run(recipe, folder, device, processes=2, script=None):
    """Run a recipe's command to its end, or another script in the recipe's place."""
    _, _, command, _ = docstring(recipe)
    expected = f"torchrun --standalone --nproc-per-node=2 recipes/{recipe}"
    assert command == expected
    _, standalone, nproc, _ = shlex.split(command)
    nproc = nproc.replace("2", str(processes))
    arguments = ["-m", "torch.distributed.run", standalone, nproc]
    arguments.append(str(script or FOLDER / recipe))
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    return harness.run([sys.executable, *arguments], folder, seconds=120, **hidden)


def test_there_are_recipes():
    assert RECIPES
    assert sorted(BROKEN) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_prints_what_it_shows(recipe, tmp_path, device, two):
    *_, printed = docstring(recipe)
    assert printed
    done = run(recipe, tmp_path, device, two)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == printed


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_proof_holds_on_three_processes(recipe, tmp_path, device):
    if harness.counts(device)[-1] < 3:
        pytest.skip("not enough GPUs")
    done = run(recipe, tmp_path, device, 3)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_broken_recipe_fails(recipe, tmp_path, device, two):
    old, new, message = BROKEN[recipe]
    text = (FOLDER / recipe).read_text()
    assert text.count(old) == 1, old
    script = tmp_path / recipe
    script.write_text(text.replace(old, new))
    done = run(recipe, tmp_path, device, two, script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stderr, done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_and_needs_nothing_of_ours(recipe):
    source = (FOLDER / recipe).read_text()
    assert 60 <= len(source.splitlines()) <= 100
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not {name.split(".")[0] for name in imported} & OURS


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_gpus_too(recipe):
    """One GPU per process and nccl where there are GPUs, otherwise gloo."""
    source = (FOLDER / recipe).read_text()
    assert 'int(os.environ["LOCAL_RANK"])' in source
    assert "torch.cuda.set_device(device)" in source
    assert 'dist.init_process_group("nccl", device_id=device' in source
    assert 'dist.init_process_group("gloo"' in source
    assert "dist.destroy_process_group()" in source


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_docstring_has_a_question_and_an_answer(recipe):
    question, answer, _, _ = docstring(recipe)
    assert "\n" not in question
    assert len(re.findall(r"[.?!](\s|$)", answer)) >= 2


def test_the_index_has_every_recipe_with_its_question():
    row = re.compile(r"^\| (.+) \| \[(\w+\.py)\]\(\2\) \| .+ \|$", re.MULTILINE)
    rows = row.findall(INDEX.read_text())
    assert sorted(recipe for _, recipe in rows) == RECIPES
    for question, recipe in rows:
        assert question == docstring(recipe)[0]
