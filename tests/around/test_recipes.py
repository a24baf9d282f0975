"""The recipes: each prints what its docstring shows, and proves what it says.

A recipe's docstring is the question on one line, the answer, and the command with the
lines that it prints. A recipe asserts its own proof. BREAKS has a line of each recipe,
and what to replace it by: then the proof must fail.
"""

import ast
import contextlib
import os
import pty
import re
from typing import NamedTuple

import pytest
import torch

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.training import counts
from tests.training import imported_by
from tests.training import replace_once
from tests.training import train_in_forks

pytestmark = pytest.mark.ci

FOLDER = ROOT / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))
DEBUGGER = "debug_one_rank.py"
COMPILED = "torch_compile_fsdp.py"  # compiles C++
RING = "ring_attention.py"
ULYSSES = "ulysses.py"
PROMPT = "(Pdb) "
TWO_PROCESSES = "--standalone --nproc-per-node=2"
EXPERTS = "expert_parallel.py"
FLOAT8 = "float8_fsdp.py"  # needs torchao
GENERATOR = "weights_to_a_generator.py"  # two trainers beside it: three processes
MUON = "muon_fsdp.py"
# Half a minute of compiling; and what follows a prototype, which a push cannot break.
WEEKLY = {COMPILED, EXPERTS, FLOAT8, MUON, RING}
NEED = {"parts_not_used_fsdp.py": "2.13"}  # the version of torch
# Another number of processes changes nothing of what these show, and they take long.
SAME_ON_THREE = ("debug_one_rank.py", "torch_compile_fsdp.py")
# {recipe: [(what differs between runs and goes to standard error, how often)]}
MEASURED = {
    "profile_step.py": [(r"hidden: \d+% of the time\n", 2)],
    RING: [(r"differences up to \d\.\de[+-]\d+\n", 1)],
    "torch_compile_fsdp.py": [(r"inductor: differences up to \d\.\de[+-]\d+\n", 2)],
}
OURS = {"benchmarks", "common", "harness", "nbtools", "tests", "tools"}


class Break(NamedTuple):
    """A text that a recipe has once, what replaces it, and what the run then says."""

    text: str
    replacement: str
    error: str = "AssertionError"


BREAKS = {
    "activation_checkpointing.py": Break(
        "x, use_reentrant=False):",
        "x, use_reentrant=True):",
        "Expected to mark a variable ready only once",
    ),
    "bucket_by_length.py": Break("batch[self.rank :: self.world_size]", "batch"),
    "checkpoint_checksums.py": Break("found[name] != checksums[name]", "False"),
    "class_weights.py": Break("dist.all_reduce(divisor)", "pass"),
    "contrastive_loss.py": Break(
        "dist.all_reduce(gradient)", "gradient = gradient * dist.get_world_size()"
    ),
    DEBUGGER: Break(
        "    dist.breakpoint(rank=faulty)\n        if",
        "    breakpoint() if rank == faulty else None\n        if",
        "Timed out waiting",
    ),
    "early_stopping.py": Break("dist.all_reduce(sums)", "sums = sums.clone()"),
    "ema.py": Break(
        "ema.update_parameters(model)",
        "ema.update_parameters(model) if dist.get_rank() == 0 else None",
    ),
    EXPERTS: Break("parameter.grad /= dist.get_world_size()", "pass"),
    FLOAT8: Break('name.startswith("blocks.")', 'name.startswith("layers.")'),
    "iterable_dataset.py": Break("self.rank * workers + worker,", "worker,"),
    "metrics_torchmetrics.py": Break(
        "values, sizes = evaluate(shard, device)",
        "values, sizes = evaluate(shard, device, sync_on_compute=False)",
    ),
    MUON: Break(
        "copy.deepcopy(get_state_dict(model, optimizers))",
        "get_state_dict(model, optimizers)",
    ),
    "nan_loss.py": Break("if norm.isfinite():", "if loss.isfinite():"),
    "parts_not_used_fsdp.py": Break(
        "    model.set_reduce_scatter_unused_params(True)\n", ""
    ),
    "profile_step.py": Break("bucket_cap_mb=bucket_cap_mb", "bucket_cap_mb=25"),
    "rank0_prepares_data.py": Break(
        "dist.barrier(patient_group)", "pass", "FileNotFoundError"
    ),
    "resume_stream.py": Break('torch.set_rng_state(states["torch"])', "pass"),
    RING: Break("(old - new).exp()", "1"),
    "slow_network.py": Break("mean /= dist.get_world_size(group)", "pass"),
    "stateful_loader.py": Break("self.taken += 1", "self.taken += 0"),
    "sync_batchnorm.py": Break("dist.all_reduce(gradient)", "pass"),
    "torch_compile.py": Break("model.compile(backend=backend)", "pass"),
    "torch_compile_fsdp.py": Break(
        "block.compile(backend=backend, fullgraph=True)\n        fully_shard(block)",
        "fully_shard(block)",
    ),
    "two_networks.py": Break("discriminator.requires_grad_(not freeze)", "pass"),
    ULYSSES: Break(" * dist.get_world_size()  # which", "  # which"),
    "unequal_gpus.py": Break(" * dist.get_world_size() / ", " / "),
    GENERATOR: Break(
        "(tensor, first, group=link)\n    return",
        "(tensor.clone(), first, group=link)\n    return",
    ),
    "weighted_sampler.py": Break(
        "manual_seed(self.seed + self.epoch)", "manual_seed(self.seed + self.rank)"
    ),
}
# [(recipe, another Break)]
MORE_BREAKS = [
    (EXPERTS, Break("dist.all_reduce(square)", "pass")),
    # each rank's tokens in turn, as if the sequence were dealt out
    (ULYSSES, Break("parts.movedim(0, join)", "parts.movedim(0, join + 1)")),
    # the causal mask, made from positions that each rank counts from 0
    (RING, Break("positions[dist.get_rank()], positions[source]", "positions[[0, 0]]")),
    # the gradient of a block stays with the rank that was the last to add to it
    (RING, Break("return grad_q, arrive(), None", "return grad_q, grad_kv, None")),
]
ALL_BREAKS = [*BREAKS.items(), *MORE_BREAKS]
# What ring_attention.py does by hand, with torch's own prototype.
CONTEXT_PARALLEL = """
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
q, k, v = torch.randn(3, 2, 4, 48, 16).unbind()
with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
"""


def docstring(recipe):
    """Return a recipe's question, answer, command, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / recipe).read_text()))
    question, answer, shown = text.split("\n\n", 2)
    command, *printed = shown.splitlines()
    launcher = TWO_PROCESSES.replace("2", "3" if recipe == GENERATOR else "2")
    assert command == f"$ torchrun {launcher} recipes/{recipe}"
    return question, answer, command.removeprefix("$ "), printed


def run(
    recipe, folder, device, processes=2, script=None, code=0, forks=True, **variables
):
    """Run a recipe's command, or another script in the recipe's place; return a Done.

    What the docstring shows after pdb's prompts is typed, in a terminal.
    variables: of the environment.
    """
    _, _, command, printed = docstring(recipe)
    if torch.__version__ < (needed := NEED.get(recipe, "2.11")):
        pytest.skip(f"this recipe needs torch {needed}")
    if recipe == FLOAT8:
        pytest.importorskip("torchao", reason="torchao is not installed")
    command = command.replace("node=2", f"node={processes}")
    if script:
        command = command.replace(f"recipes/{recipe}", str(script))
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    typed = [line.removeprefix(PROMPT) for line in printed if line.startswith(PROMPT)]
    if typed:
        done = run_in_terminal(command, folder, typed, **variables)
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done
    return commands.run(command, folder, code, forks=forks, **variables)


def run_in_terminal(command, folder, typed, **variables):
    """Run a command in a terminal, and type a line at each of pdb's prompts.

    Returns a Done; its stdout is what the terminal showed, with what was typed.
    """
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    shown = bytearray()

    def read():
        with contextlib.suppress(BlockingIOError):  # nothing new
            while new := os.read(ours, 65536):
                shown.extend(new)
        return shown.decode(errors="replace").replace("\r\n", "\n")

    variables = {**variables, "terminal": theirs, "TERM": "dumb"}
    with commands.start(command, folder, **variables) as job:

        def wait_for_prompts(number):
            def seen():
                return read().count(PROMPT) >= number or not job.running()

            commands.wait_until(seen, commands.LIMIT, read)

        for number, line in enumerate(typed, start=1):
            wait_for_prompts(number)
            os.write(ours, f"{line}\n".encode())
        # What nobody reads fills the terminal, and then the command waits.
        commands.wait_until(lambda: read() and not job.running(), commands.LIMIT, read)
        done = job.wait()
    done.stdout = read()
    os.close(ours)
    os.close(theirs)
    return done


def assert_shows(done, printed):
    """Assert that a run printed these lines, with any text for [...]."""
    pattern = ".*".join(map(re.escape, "\n".join(printed).split("[...]")))
    assert re.fullmatch(pattern, done.stdout.rstrip("\n")), done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_begins_with_the_lines_to_copy(recipe):
    """Only its docstring and its imports stand before them; the proof comes after."""
    source = (FOLDER / recipe).read_text()
    before, copied = source.split("# ---- the lines to copy", 1)
    imports = ast.parse(before).body[1:]
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in imports)
    copied, proof = copied.split("# ---- the proof ", 1)
    assert ast.parse("#" + copied).body and "assert " in proof


def test_each_recipe_can_be_broken():
    assert RECIPES
    assert sorted(BREAKS) == RECIPES


@pytest.mark.parametrize(
    "recipe", [only_in_release(r, unless=r not in WEEKLY) for r in RECIPES]
)
def test_a_recipe_prints_what_it_shows(recipe, tmp_path, device, two):
    *_, printed = docstring(recipe)
    assert printed
    done = run(recipe, tmp_path, device, two)
    assert_shows(done, printed)
    for pattern, times in MEASURED.get(recipe, []):
        assert len(re.findall(pattern, done.stderr)) == times, done.stderr


@pytest.mark.release
def test_the_command_does_it_by_its_launcher(tmp_path, device, two):
    """In the other tests, the processes are forks; only the debugger has torchrun."""
    done = run("ema.py", tmp_path, device, two, forks=False)
    assert_shows(done, docstring("ema.py")[-1])


@pytest.mark.release
def test_a_plain_breakpoint_stops_all_ranks(tmp_path, device, two):
    """In forks, where nobody types: each pdb prompts and finds the end of its input."""
    script = tmp_path / DEBUGGER
    plain = ("    dist.breakpoint(rank=faulty)", "    breakpoint()")
    replace_once(FOLDER / DEBUGGER, plain, target=script)
    command = ["torchrun", "--standalone", f"--nproc-per-node={two}", script]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = commands.run(command, tmp_path, code=1, forks=True, **hidden)
    assert [rank.stdout.count(PROMPT) for rank in done.ranks] == [1] * two


@pytest.mark.release
@pytest.mark.parametrize("processes, blocks", [(1, 1), (4, 3)])
def test_ring_attention_holds_three_blocks_at_most(processes, blocks, tmp_path, device):
    """The proof holds on one process and on four, which never have all the keys."""
    if counts(device)[-1] < processes:
        pytest.skip("not enough GPUs")
    done = run(RING, tmp_path, device, processes)
    assert f"bytes, {blocks} of {processes} blocks\n" in done.stdout


@pytest.mark.release
def test_four_ranks_share_two_batches_of_sequences(tmp_path, device):
    """Six heads cannot be divided by four, so two ranks share a sequence."""
    if counts(device)[-1] < 4:
        pytest.skip("not enough GPUs")
    done = run(ULYSSES, tmp_path, device, 4)
    assert_shows(done, docstring(ULYSSES)[-1])  # with the bytes of two ranks


@pytest.mark.release
def test_context_parallel_of_torch_fails_on_a_cpu(tmp_path):
    """With the words that the recipe quotes; if torch has learned it, say so there."""
    script = tmp_path / "context_parallel.py"
    script.write_text(CONTEXT_PARALLEL)
    command = ["torchrun", "--standalone", "--nproc-per-node=2", script]
    done = commands.run(command, tmp_path, 1, forks=True, CUDA_VISIBLE_DEVICES="")
    message = re.search(r"NotImplementedError: (.+)", done.stderr)[1]
    assert f'On a CPU it fails: "{message}"' in " ".join(docstring(RING)[1].split())


@pytest.mark.release
@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {*SAME_ON_THREE}))
def test_the_proof_holds_on_three_processes(recipe, tmp_path, device):
    if counts(device)[-1] < 3:
        pytest.skip("not enough GPUs")
    run(recipe, tmp_path, device, processes=3)


@pytest.mark.release
@pytest.mark.parametrize(
    ("recipe", "change"), ALL_BREAKS, ids=[recipe for recipe, _ in ALL_BREAKS]
)
def test_a_broken_recipe_fails(recipe, change, tmp_path, device, two):
    script = tmp_path / recipe
    replace_once(FOLDER / recipe, (change.text, change.replacement), target=script)
    done = run(recipe, tmp_path, device, two, script, code=1)
    assert change.error in done.stderr, done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_imports_nothing_of_ours(recipe):
    assert not imported_by((FOLDER / recipe).read_text()) & OURS


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_gpus_too(recipe):
    """One GPU per process and nccl where there are GPUs, otherwise gloo."""
    source = (FOLDER / recipe).read_text()
    assert 'int(os.environ["LOCAL_RANK"])' in source
    assert "torch.cuda.set_device(device)" in source
    assert 'dist.init_process_group("nccl", device_id=device' in source
    assert 'dist.init_process_group("gloo"' in source
    assert "dist.destroy_process_group()" in source


def test_the_index_has_every_recipe_with_its_question():
    row = re.compile(r"^\| (.+) \| \[(\w+\.py)\]\(\2\) \| .+ \|$", re.MULTILINE)
    rows = row.findall((FOLDER / "README.md").read_text())
    assert sorted(recipe for _, recipe in rows) == RECIPES
    for question, recipe in rows:
        assert question == docstring(recipe)[0]


# ---- nccl_on_one_gpu.sh --------------------------------------------------------------
SHARED = ["bash", FOLDER / "nccl_on_one_gpu.sh"]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_ranks_on_one_gpu_train_the_weights_of_one_process(trained, tmp_path):
    """Here with gloo; `make gpu PART=nccl-tests` does it with nccl."""
    stage = first_with("torchrun")
    flags = ["--dtype", "float64", "--epochs", "1", "--out-dir", tmp_path]
    words = [*SHARED, 3, ROOT / stage / "train.py", *flags]
    done = commands.run(words, PORT=commands.free_port(), **NO_GPU)
    assert "3 processes on gloo" in done.stdout
    one = trained(stage, 1, *flags[:4], how=train_in_forks)
    assert max_abs_diff(one.weights, tmp_path / "last.pt") <= 1e-10


def test_ranks_on_one_gpu_are_machines_of_their_own(tmp_path):
    """If one fails, the others are ended, and its exit code is the script's."""
    script = tmp_path / "names.py"
    script.write_text(
        "import os, time\n"
        "names = 'RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NCCL_HOSTID'\n"
        "print(*(os.environ[name] for name in names), flush=True)\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise SystemExit(1)\n"
        "time.sleep(3600)\n"
    )
    words = [*SHARED, 2, script]
    with commands.start(words, tmp_path / "screen", PORT=commands.free_port()) as job:
        job.wait_for("0 0 1 machine0")
        done = job.wait()
        commands.assert_gone(job.processes, [], commands.LIMIT)
    assert done.returncode == 1
    assert {"0 0 1 machine0", "1 0 1 machine1"} <= {*done.stdout.splitlines()}


@pytest.mark.parametrize(
    "words", [[], ["2"], ["0", "x.py"], ["03_ddp_launch/train.py"]]
)
def test_ranks_on_one_gpu_need_a_number_and_a_script(words):
    done = commands.run([*SHARED, *words], code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("nccl_on_one_gpu.sh: error: ") and not done.stdout
