"""docs/your_own_script: in each pair, the second script trains what the first does."""

import ast
import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "your_own_script"
BEFORE, AFTER = FOLDER / "before.py", FOLDER / "after.py"
DDP, FSDP = FOLDER / "ddp.py", FOLDER / "fsdp.py"
RESUME = FOLDER / "fsdp_resume.py"
PAIRS = {"DDP": (BEFORE, AFTER), "FSDP": (DDP, FSDP), "RESUME": (FSDP, RESUME)}
TRAIN_SIZE, VAL_SIZE, EPOCHS, BATCH_SIZE = 3007, 1001, 5, 64
STEPS = TRAIN_SIZE // BATCH_SIZE
BUDGET = {BEFORE: 70, AFTER: 110, DDP: 140, FSDP: 160, RESUME: 200}
BUDGET |= dict.fromkeys(PAIRS, 60)

# Runs a script in float64 and records what each rank saw, drew, reduced, and saved.
# With KILLED_IN_SAVE=3, SIGKILL ends the last rank while it writes checkpoint 3.
SPY = """
import os, runpy, sys, torch
from torch import distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

torch.set_default_dtype(torch.float64)
record = {"batches": [], "noise": [], "reduced": [], "ranks": 1, "saves": 0}
randn_like, all_reduce, save = torch.randn_like, dist.all_reduce, torch.save
clip = torch.nn.utils.clip_grad_norm_

def spy_randn_like(points):
    noise = randn_like(points)
    record["batches"].append(points.cpu())
    record["noise"].append(noise.cpu())
    return noise

def spy_all_reduce(tensor, *op):
    all_reduce(tensor, *op)
    if not op:
        record["reduced"].append(tensor.tolist())
    record["ranks"] = dist.get_world_size()

def spy_save(*arguments):
    record["saves"] += 1
    save(*arguments)

def spy_clip(parameters, max_norm):
    parameters = list(parameters)
    gradients = [each.grad for each in parameters]
    gradients = [getattr(each, "_local_tensor", each) for each in gradients]
    record["elements"] = sum(each.numel() for each in gradients)
    return clip(parameters, max_norm)

def spy_write_data(self, plan, planner):
    record["checkpoints"] = record.get("checkpoints", 0) + 1
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    if last_rank and os.environ.get("KILLED_IN_SAVE") == str(record["checkpoints"]):
        os.kill(os.getpid(), 9)
    return write_data(self, plan, planner)

write_data, FileSystemWriter.write_data = FileSystemWriter.write_data, spy_write_data
torch.randn_like, dist.all_reduce, torch.save = spy_randn_like, spy_all_reduce, spy_save
torch.nn.utils.clip_grad_norm_ = spy_clip
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
save(record, f"record{os.environ['RANK']}.pt")
"""


def in_order(batch):
    """Return a batch's rows in an order of their own, whichever ranks had them."""
    return batch[batch[:, 0].argsort()]


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def losses(screen):
    return [float(number) for number in re.findall(r"loss ([\d.]+)", screen)]


def execute(arguments, folder, processes, code=0, **variables):
    """Run a command in `folder` to its end and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if torch.cuda.device_count() < processes:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=300)
        finally:
            child.terminate()  # torchrun then ends its ranks; SIGKILL would orphan them
    assert child.returncode == code, stdout + stderr
    return stdout


def torchrun(processes, *words):
    """Return the arguments of python with which torchrun starts a script, by forks."""
    options = ["--standalone", f"--nproc-per-node={processes}"]
    program = [FOLDER.parents[1] / "tests" / "by_fork.py", "torchrun"]
    return [*program, *options, *map(str, words)]


def launch(processes, folder, script=AFTER, *flags):
    """Run a script under torchrun, without noise; return what all its ranks did."""
    (folder / "spy.py").write_text(SPY)
    arguments = torchrun(processes, "spy.py", script, "--noise=0", *flags)
    screen = execute(arguments, folder, processes)
    files = sorted(folder.glob("record*.pt"))
    weights = torch.load(folder / "model.pt", map_location="cpu")
    return SimpleNamespace(
        screen=screen, weights=weights, ranks=[*map(torch.load, files)]
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return launch(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Return a function that runs a script in this process and returns its output."""

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [str(script), *flags])
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        state = torch.get_rng_state()
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            runpy.run_path(str(script), run_name="__main__")
        torch.set_rng_state(state)
        return screen.getvalue()

    return run


def test_before_trains(tmp_path):
    screen = execute([str(BEFORE)], tmp_path, 1)
    assert len(losses(screen)) == EPOCHS
    assert losses(screen)[-1] < 0.5 * losses(screen)[0]
    assert float(re.findall(r"accuracy ([\d.]+)%", screen)[-1]) > 90


def test_two_processes_train_the_same_weights_as_one(one, two):
    assert [rank["ranks"] for rank in one.ranks] == [1]
    assert [rank["ranks"] for rank in two.ranks] == [2, 2]
    assert largest_difference(one.weights, two.weights) <= 1e-10
    assert one.screen == two.screen
    assert losses(two.screen)[-1] < 0.5 * losses(two.screen)[0]


def test_after_trains_the_same_weights_as_before(one, here, monkeypatch, tmp_path):
    """Given the order of after.py's samples, before.py prints and saves the same."""
    epochs = iter(range(1, EPOCHS + 1))

    def order(sampler):
        generator = torch.Generator().manual_seed(next(epochs))
        indices = torch.randperm(len(sampler), generator=generator).tolist()
        return iter(indices[: STEPS * BATCH_SIZE])

    monkeypatch.setattr(torch.utils.data.RandomSampler, "__iter__", order)
    torch.set_default_dtype(torch.float64)
    try:
        screen = here(BEFORE, "--noise=0")
    finally:
        torch.set_default_dtype(torch.float32)
    weights = torch.load(tmp_path / "model.pt")  # also the same names: no "module."
    assert screen == one.screen
    assert largest_difference(weights, one.weights) <= 1e-10


def test_ranks_share_each_global_batch(one, two):
    (whole,), shards = one.ranks, two.ranks
    assert len(whole["batches"]) == EPOCHS * STEPS
    steps = zip(whole["batches"], *(rank["batches"] for rank in shards), strict=True)
    for expected, *parts in steps:
        assert [len(part) for part in parts] == [BATCH_SIZE // 2] * 2
        assert torch.equal(in_order(torch.cat(parts)), in_order(expected))
    firsts = torch.stack(whole["batches"][::STEPS])
    assert len(firsts.unique(dim=0)) == EPOCHS  # every epoch has an order of its own


def test_every_rank_draws_noise_of_its_own(two):
    first, second = (torch.stack(rank["noise"]) for rank in two.ranks)
    assert not (first == second).any()


def test_evaluation_counts_every_sample_once(one, two):
    """The sums are those of the whole set, and the printed metrics come from them."""
    assert two.ranks[0]["reduced"] == two.ranks[1]["reduced"]
    for run in (one, two):
        sums = run.ranks[0]["reduced"]
        assert [seen for _, _, seen in sums] == [VAL_SIZE] * EPOCHS
        assert run.screen.splitlines() == [
            f"epoch {epoch}: loss {loss / seen:.4f}, accuracy {correct / seen:.2%}"
            for epoch, (loss, correct, seen) in enumerate(sums, 1)
        ]
    singles, sharded = (torch.tensor(run.ranks[0]["reduced"]) for run in (one, two))
    torch.testing.assert_close(singles, sharded, rtol=1e-10, atol=0)


def test_only_rank_0_writes(one, two):
    assert [rank["saves"] for rank in one.ranks + two.ranks] == [1, 1, 0]


def test_plain_python_names_torchrun(here, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="^2$"):
        here(AFTER)
    assert "torchrun --standalone --nproc-per-node" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [AFTER, DDP, FSDP, RESUME], ids=lambda s: s.name)
def test_a_batch_that_cannot_be_divided(script, here, monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="^2$"):
        here(script, "--batch-size=63")
    assert "--batch-size must be divisible" in capsys.readouterr().err


# ---- from DDP to FSDP2 ---------------------------------------------------------------
@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory):
    return launch(2, tmp_path_factory.mktemp("by_ddp"), DDP)


@pytest.fixture(scope="module", params=[1, 2])
def by_fsdp(tmp_path_factory, request):
    return launch(request.param, tmp_path_factory.mktemp("by_fsdp"), FSDP)


def test_fsdp_trains_the_same_weights_as_ddp(by_ddp, by_fsdp):
    """In float64. What is printed has the norm of the gradient, too."""
    assert largest_difference(by_fsdp.weights, by_ddp.weights) <= 1e-10
    assert by_fsdp.screen == by_ddp.screen
    assert len(losses(by_ddp.screen)) == 4
    assert losses(by_ddp.screen)[-1] < 0.5 * losses(by_ddp.screen)[0]


def test_fsdp_shards_the_gradients(by_ddp, by_fsdp):
    whole = sum(weight.numel() for weight in by_ddp.weights.values())
    assert [rank["elements"] for rank in by_ddp.ranks] == [whole, whole]
    shards = [rank["elements"] for rank in by_fsdp.ranks]
    assert sum(shards) == whole and max(shards) - min(shards) < 0.1 * whole


def test_with_fsdp_rank_0_alone_writes_and_every_sample_counts_once(by_ddp, by_fsdp):
    for run in (by_ddp, by_fsdp):
        assert [rank["saves"] for rank in run.ranks] == [1, 0][: len(run.ranks)]
        sums = run.ranks[0]["reduced"]
        assert [seen for _, _, seen in sums] == [VAL_SIZE] * 4
    # Two ranks evaluate 501 and 500 samples: in batches of 100, that is 6 and 5.
    assert '--batch-size", type=int, default=100' in FSDP.read_text()


@pytest.mark.sweep
@pytest.mark.parametrize("script", [DDP, FSDP], ids=lambda path: path.name)
def test_a_local_batch_in_fewer_micro_batches(script, tmp_path):
    """A rank's 33 samples in 8 micro-batches are 7, and the last of them is the last.

    Otherwise no rank sends its gradient, and with DDP nothing fails.
    """
    runs = []
    for micro_batches in ("1", "8"):
        folder = tmp_path / micro_batches
        folder.mkdir()
        flags = ("--batch-size=66", "--epochs=1", f"--micro-batches={micro_batches}")
        runs.append(launch(2, folder, script, *flags))
    one, other = runs
    assert one.screen == other.screen
    assert largest_difference(one.weights, other.weights) <= 1e-10


def test_fsdp_in_bf16(tmp_path):
    """In float32, with gathered weights and the layers' arithmetic in 16 bits."""
    screen = execute(torchrun(2, FSDP, "--bf16"), tmp_path, 2)
    assert losses(screen)[-1] < 0.5 * losses(screen)[0]
    weights = torch.load(tmp_path / "model.pt")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_run_that_is_killed_while_it_saves_is_resumed(by_ddp, tmp_path):
    """On another number of processes; in the end it has the weights of DDP."""
    (tmp_path / "spy.py").write_text(SPY)
    arguments = torchrun(2, "spy.py", RESUME, "--noise=0")
    killed = execute(arguments, tmp_path, 2, code=1, KILLED_IN_SAVE="3")
    folder = tmp_path / "checkpoints"
    left = {".epoch-0003.tmp", "epoch-0001", "epoch-0002"}
    assert {path.name for path in folder.iterdir()} == left
    resumed = launch(1, tmp_path, RESUME)
    first, *rest = resumed.screen.splitlines()
    assert first == f"resumed from {Path('checkpoints', 'epoch-0002')}"
    assert [*killed.splitlines()[:2], *rest] == by_ddp.screen.splitlines()
    assert largest_difference(resumed.weights, by_ddp.weights) <= 1e-10
    written = {f"epoch-000{n}" for n in (1, 2, 3, 4)}
    assert {path.name for path in folder.iterdir()} == written


# ---- the diffs -----------------------------------------------------------------------
def hunks(pair="DDP"):
    """Return the changed lines of the diff, one list of lines for each hunk."""
    before, after = (path.read_text().splitlines() for path in PAIRS[pair])
    found = []
    for line in list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]:
        if line.startswith("@@"):
            found.append([])
        else:
            found[-1].append(line)
    return found


def test_lengths():
    paths = [path for pair in PAIRS.values() for path in pair]
    lengths = {path: path.read_text().splitlines() for path in paths}
    lengths |= {pair: [line for hunk in hunks(pair) for line in hunk] for pair in PAIRS}
    counted = {name: len(lines) for name, lines in lengths.items()}
    print("\n" + str({getattr(k, "name", k): n for k, n in counted.items()}))
    assert all(counted[name] <= BUDGET[name] for name in BUDGET), counted
    assert max(len(line) for path in paths for line in lengths[path]) <= 88


@pytest.mark.parametrize(
    "path", [BEFORE, AFTER, DDP, FSDP, RESUME], ids=lambda path: path.name
)
def test_self_contained(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        names += (
            [name.name for name in node.names] if isinstance(node, ast.Import) else []
        )
    known = {"argparse", "contextlib", "gc", "os", "pathlib", "torch"}
    assert {name.split(".")[0] for name in names} <= known


@pytest.mark.parametrize("pair", PAIRS)
def test_the_page_shows_the_diff(pair):
    """With one line of context, and without line numbers."""
    before, after = (path.read_text().splitlines() for path in PAIRS[pair])
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    lines = ["@@" if line.startswith("@@") else line for line in lines]
    page = FOLDER.with_suffix(".md").read_text()
    assert "```diff\n{}\n```".format("\n".join(lines)) in page


@pytest.mark.parametrize("pair", PAIRS)
def test_every_hunk_says_why(pair):
    for hunk in hunks(pair):
        added = [line[1:] for line in hunk if line.startswith("+")]
        plain = ("import ", "from ", '"""')
        code = [line for line in added if not line.startswith(plain)]
        assert not any(code) or any("# " in line for line in code), "\n".join(hunk)


@pytest.mark.parametrize(
    "text",
    [
        'int(os.environ["LOCAL_RANK"])',
        "torch.cuda.set_device(device)",
        'dist.init_process_group("nccl", device_id=device)',
        'dist.init_process_group("gloo")',
        "local_batch_size = args.batch_size // world_size",
        "sampler = DistributedSampler(train_set, drop_last=True)",
        "sampler=sampler, drop_last=True",
        "sampler.set_epoch(epoch)",
        "torch.manual_seed(rank)",
        "DistributedDataParallel(model)",
        "Subset(val_set, range(rank, len(val_set), world_size))",
        "dist.all_reduce(sums)",
        "if rank == 0:",
        "gc.collect()",
        "dist.destroy_process_group()",
    ],
)
def test_the_checklist_is_in_the_diff(text):
    added = [line for hunk in hunks() for line in hunk if line.startswith("+")]
    assert any(text in line.partition("#")[0] for line in added)


@pytest.mark.parametrize(
    "text",
    [
        "torch.manual_seed(0)",
        "model = Classifier()",
        "dist.init_device_mesh(device.type, (world_size,))",
        "fully_shard(block, **options)",
        "fully_shard(model, **options)",
        "MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)",
        "model.set_requires_gradient_sync(last)",
        "norm.full_tensor()",
        "@torch.no_grad()",
        "dist.all_reduce(most, dist.ReduceOp.MAX)",
        "get_model_state_dict(model, options=whole)",
    ],
)
def test_the_checklist_of_fsdp_is_in_the_diff(text):
    added = [line for hunk in hunks("FSDP") for line in hunk if line.startswith("+")]
    assert any(text in line.partition("#")[0] for line in added)


@pytest.mark.parametrize(
    "text",
    [
        "get_state_dict(model, optimizer)",
        "dcp.save(",
        "unfinished.rename(path)",
        "dist.broadcast_object_list(found)",
        "dcp.load(",
        "set_state_dict(",
    ],
)
def test_what_a_checkpoint_needs_is_in_the_diff(text):
    added = [line for hunk in hunks("RESUME") for line in hunk if line.startswith("+")]
    assert any(text in line.partition("#")[0] for line in added)


def test_shuffle_is_off():
    removed = [line for hunk in hunks() for line in hunk if line.startswith("-")]
    assert any("shuffle=True" in line for line in removed)
    calls = [
        n for n in ast.walk(ast.parse(AFTER.read_text())) if isinstance(n, ast.Call)
    ]
    assert not any(word.arg == "shuffle" for call in calls for word in call.keywords)
