"""The recipes: each prints what its docstring shows, and proves what it says.

A recipe's docstring is the question on one line, the answer, and the command with the
lines that it prints. A recipe asserts its own proof. BROKEN has a line of each recipe,
and what to replace it by: then the proof must fail.
"""

import ast
import contextlib
import functools
import importlib.util
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import types

import pytest

from tests import harness
from tests.conftest import swept_unless
from tools.stages import ROOT

FOLDER = ROOT / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))
INDEX = FOLDER / "README.md"
PROMPT = "(Pdb) "
OUTPUTS = "stdout", "stderr"
# {recipe: [(what differs between runs and goes to standard error, how often)]}
MEASURED = {
    "comm_hook_bf16.py": [(r"differences: \d\.\de-\d+ \d\.\de-\d+\n", 1)],
    "prefetcher.py": [(r"a step's wait for its batch: (?:[\d.]+ ms|no GPU)\n", 4)],
    "profile_step.py": [(r"hidden: \d+% of the time\n", 2)],
}
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
    "debug_one_rank.py": (
        "    dist.breakpoint(rank=faulty)\n        if",
        "    breakpoint() if rank == faulty else None\n        if",
        "Timed out waiting",
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
    "metrics_torchmetrics.py": (
        "values, sizes = evaluate(shard, device)",
        "values, sizes = evaluate(shard, device, sync_on_compute=False)",
        "AssertionError",
    ),
    "prefetcher.py": (
        "yield wait_for(*before)\n\n",
        "pass\n\n",
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


def launch(recipe, folder, device, processes=2, script=None):
    """Run a recipe's command to its end, or another script in the recipe's place.

    What the docstring shows after pdb's prompts is typed, in a terminal.
    """
    _, _, command, printed = docstring(recipe)
    expected = f"torchrun --standalone --nproc-per-node=2 recipes/{recipe}"
    assert command == expected
    _, standalone, nproc, _ = shlex.split(command)
    nproc = nproc.replace("2", str(processes))
    typed = [line.removeprefix(PROMPT) for line in printed if line.startswith(PROMPT)]
    if typed:  # forks would not have the terminal
        torchrun = ["-m", "torch.distributed.run"]
        start = functools.partial(in_terminal, typed=typed)
    else:  # to import torch once
        torchrun = [ROOT / "tests" / "by_fork.py", "torchrun"]
        start = harness.run
    arguments = [
        sys.executable,
        *torchrun,
        standalone,
        nproc,
        script or FOLDER / recipe,
    ]
    return start(arguments, folder, seconds=120, **variables(folder, device))


def variables(folder, device):
    """Return a recipe's environment variables; W&B keeps to `folder`."""
    wandb = {"WANDB_CACHE_DIR": str(folder), "WANDB_ERROR_REPORTING": "false"}
    return wandb if device == "cuda" else {**wandb, "CUDA_VISIBLE_DEVICES": ""}


def num_prompts(screen, folder):
    """Count pdb's prompts on a screen: two processes may mix theirs, "(P(Pdb) db) "."""
    return screen.replace(str(folder), "").count("P")


def in_terminal(arguments, folder, seconds, typed=(), prompts=None, **variables):
    """Run a command in a terminal, typing a line at each prompt; return its result.

    prompts: kill it when it has shown so many prompts.
    """
    ours, theirs = pty.openpty()
    with (folder / "stderr").open("w") as err:
        child = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=harness.environment(TERM="dumb", **variables),
            stdin=theirs,
            stdout=theirs,
            stderr=err,
            start_new_session=True,
        )
    os.close(theirs)
    screen, lines = "", list(typed)
    try:
        while prompts is None or num_prompts(screen, folder) < prompts:
            assert select.select([ours], [], [], seconds)[0], screen
            with contextlib.suppress(OSError):  # when all that had the terminal ended
                screen += os.read(ours, 65536).decode()
                if lines and screen.endswith(PROMPT):
                    os.write(ours, f"{lines.pop(0)}\n".encode())
                continue
            child.wait(seconds)
            break
    finally:
        harness.kill(harness.family(child.pid))
        child.wait()
        os.close(ours)
    (folder / "stdout").write_text(screen.replace("\r\n", "\n"))
    return harness.result(child.returncode, folder)


def run(recipe, folder, device, processes=2, script=None):
    """Run a recipe, or another script, in forks; with pdb, by its command."""
    if any(line.startswith(PROMPT) for line in docstring(recipe)[-1]):
        return launch(recipe, folder, device, processes, script)
    shared = {**harness.LAUNCHER_ENV, **variables(folder, device)}
    shared.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    shared.update(MASTER_PORT=harness.free_port())
    forks = []
    for rank in map(str, range(processes)):
        shared.update(RANK=rank, LOCAL_RANK=rank)
        arguments = script or FOLDER / recipe, [], folder / rank
        forks.append(harness.fork(*arguments, seconds=120, **shared))
    done = [finish() for finish in forks]
    failed = next((one for one in done if one.returncode), done[0])
    stdout, stderr = ("".join(getattr(one, name) for one in done) for name in OUTPUTS)
    values = dict(returncode=failed.returncode, stdout=stdout, stderr=stderr)
    return types.SimpleNamespace(**values)


def assert_shows(done, printed):
    """Assert that a run succeeded and printed these lines, with any text for [...]."""
    assert done.returncode == 0, done.stdout + done.stderr
    if not importlib.util.find_spec("wandb"):
        printed = [line for line in printed if "W&B" not in line]
    pattern = ".*".join(map(re.escape, "\n".join(printed).split("[...]")))
    assert re.fullmatch(pattern, done.stdout.rstrip("\n")), done.stdout


def test_there_are_recipes():
    assert RECIPES
    assert sorted(BROKEN) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_prints_what_it_shows(recipe, tmp_path, device, two):
    *_, printed = docstring(recipe)
    assert printed
    done = run(recipe, tmp_path, device, two)
    assert_shows(done, printed)
    for pattern, times in MEASURED.get(recipe, []):
        assert len(re.findall(pattern, done.stderr)) == times, done.stderr


@pytest.mark.parametrize(
    "recipe", [swept_unless(recipe == "ema.py", recipe) for recipe in RECIPES]
)
def test_the_command_does_it(recipe, tmp_path, device, two):
    """By torchrun; in the other tests, no launcher starts the processes."""
    assert_shows(launch(recipe, tmp_path, device, two), docstring(recipe)[-1])


@pytest.mark.sweep
def test_a_plain_breakpoint_stops_all_ranks(tmp_path, device, two):
    """Nobody has typed anything, and two prompts are in one terminal."""
    script = tmp_path / "debug_one_rank.py"
    plain = ("    dist.breakpoint(rank=faulty)", "    breakpoint()")
    harness.replace_once(FOLDER / script.name, plain, target=script)
    arguments = ["-m", "torch.distributed.run", "--standalone"]
    arguments = [sys.executable, *arguments, f"--nproc-per-node={two}", str(script)]
    options = dict(seconds=120, prompts=2, **variables(tmp_path, device))
    done = in_terminal(arguments, tmp_path, **options)
    assert num_prompts(done.stdout, tmp_path) == 2


@pytest.mark.sweep
def test_two_calls_before_one_backward_failed_before_the_fix(tmp_path, device, two):
    """Torch now leaves the buffers' versions as they are while DDP copies them."""
    recipe = "two_networks.py"
    calls = (
        """            with no_sync():
                (softplus(-discriminator(real[rank])).mean() / n).backward()
            (softplus(discriminator(fake)).mean() / n).backward()  # sends the sum
""",
        """            loss = softplus(-discriminator(real[rank])).mean()
            ((loss + softplus(discriminator(fake)).mean()) / n).backward()
""",
    )
    unfixed = (
        "    torch.set_default_device(device)\n",
        "    torch.autograd._unsafe_preserve_version_counter = contextlib.nullcontext\n"
        "    torch.set_default_device(device)\n",
    )
    script = tmp_path / recipe
    for changes, word in (([calls], ""), ([calls, unfixed], "an inplace operation")):
        harness.replace_once(FOLDER / recipe, *changes, target=script)
        done = run(recipe, tmp_path, device, two, script)
        assert (done.returncode == 0) == (not word), done.stderr
        assert word in done.stderr


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
    *change, message = BROKEN[recipe]
    script = tmp_path / recipe
    harness.replace_once(FOLDER / recipe, change, target=script)
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
    assert len(re.findall(r"[.?!](\s|$)", answer)) == 3


def test_the_index_has_every_recipe_with_its_question():
    row = re.compile(r"^\| (.+) \| \[(\w+\.py)\]\(\2\) \| .+ \|$", re.MULTILINE)
    rows = row.findall(INDEX.read_text())
    assert sorted(recipe for _, recipe in rows) == RECIPES
    for question, recipe in rows:
        assert question == docstring(recipe)[0]
