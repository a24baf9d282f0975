"""your_own_script/: after.py trains what before.py does, and FSDP2 what DDP does.

What its README.md and ddp_to_fsdp2.md say: the same weights on any number of processes,
a killed run that resumes, the differences that are shown, and the special cases.
"""

import difflib
import functools
import gc
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from harness import commands
from harness.stages import ROOT
from harness.weights import max_abs_diff
from tests import spy
from tests.conftest import only_in_release
from tests.training import imported_by
from tests.training import losses

pytestmark = pytest.mark.ci

FOLDER = ROOT / "your_own_script"
README, TO_FSDP = (FOLDER / name for name in ("README.md", "ddp_to_fsdp2.md"))
BEFORE, AFTER = FOLDER / "before.py", FOLDER / "after.py"
DDP, FSDP = FOLDER / "ddp.py", FOLDER / "fsdp_resumable.py"
PAIRS = {README: (BEFORE, AFTER), TO_FSDP: (DDP, FSDP)}
TRAIN_SIZE, VAL_SIZE, EPOCHS, BATCH_SIZE = 3007, 1001, 5, 64
STEPS = TRAIN_SIZE // BATCH_SIZE
TEXT = README.read_text() + TO_FSDP.read_text()
COMMANDS = re.findall(r"^\$ ((?:python|torchrun) .*)$", TEXT, re.MULTILINE)
COMMANDS = [each for each in COMMANDS if "check_yours" not in each]


def torchrun(processes, script, *flags):
    """Return the words of torchrun's command."""
    return ["torchrun", "--standalone", f"--nproc-per-node={processes}", script, *flags]


def run(command, folder, **options):
    """Run a script in forks, in the folder `folder`/work; return a commands.Done.

    On GPUs if there is one for each of two processes, otherwise on the CPU.
    """
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    if torch.cuda.device_count() < 2:
        options["CUDA_VISIBLE_DEVICES"] = ""
    return commands.run(command, folder, forks=True, cwd=work, **options)


@dataclass
class Training:
    """What a script printed, the file of its weights, and each rank's spy.record."""

    screen: str
    weights: Path
    ranks: list


def train(processes, folder, script=AFTER, *flags):
    """Train in float64 without noise, which every rank draws; return the Training."""
    prepare = functools.partial(spy.record, folder)
    command = torchrun(processes, script, "--noise=0", *flags)
    done = run(command, folder, prepare=prepare)
    records = [torch.load(folder / f"rank-{rank}.pt") for rank in range(processes)]
    return Training(done.stdout, folder / "work/model.pt", records)


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("on_one"))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return train(2, tmp_path_factory.mktemp("on_two"))


@pytest.mark.parametrize(
    "command", [only_in_release(c, unless=c.endswith(" ddp.py")) for c in COMMANDS]
)
def test_a_command_of_the_page_trains(command, tmp_path):
    """As it is typed, by the launcher; in the other tests, the processes are forks."""
    shutil.copytree(FOLDER, tmp_path / "copy")
    no_gpu = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    done = commands.run(command, tmp_path, cwd=tmp_path / "copy", **no_gpu)
    first, *_, last = losses(done.stdout)
    assert last < 0.5 * first
    assert float(re.findall(r"accuracy ([\d.]+)%", done.stdout)[-1]) > 90


@pytest.mark.parametrize("processes", [2, only_in_release(3)])
def test_several_processes_train_the_same_weights_as_one(processes, on_one, tmp_path):
    flags = ("--batch-size=63",) if processes == 3 else ()
    one = train(1, tmp_path / "one", AFTER, *flags) if flags else on_one
    several = train(processes, tmp_path, AFTER, *flags)
    assert [rank["ranks"] for rank in several.ranks] == [processes] * processes
    assert max_abs_diff(one.weights, several.weights) <= 1e-10
    assert one.screen == several.screen
    assert len(losses(several.screen)) == EPOCHS


def test_after_trains_the_same_weights_as_before(on_one, tmp_path):
    """Given the order of after.py's samples, before.py prints and saves the same.

    So each epoch has an order of its own, and the ranks share each global batch.
    """
    prepare = functools.partial(spy.shuffle_as_after, STEPS * BATCH_SIZE)
    done = run(["python", BEFORE, "--noise=0"], tmp_path, prepare=prepare)
    assert done.stdout == on_one.screen
    weights = tmp_path / "work/model.pt"  # with the same names, too: no "module."
    assert max_abs_diff(weights, on_one.weights) <= 1e-10


def test_what_each_rank_does_for_itself(on_two):
    """It draws noise of its own, counts each sample once, and rank 0 alone saves."""
    first, second = on_two.ranks
    assert not (torch.stack(first["noise"]) == torch.stack(second["noise"])).any()
    assert first["sums"] == second["sums"]
    assert [seen for _, _, seen in first["sums"]] == [VAL_SIZE] * EPOCHS
    assert [rank["saves"] for rank in on_two.ranks] == [1, 0]


@pytest.mark.parametrize(
    "command, said",
    [
        (["python", AFTER], "torchrun --standalone --nproc-per-node"),
        (torchrun(2, AFTER, "--batch-size=63"), "--batch-size must be divisible"),
        (torchrun(2, FSDP, "--batch-size=63"), "--batch-size must be divisible"),
        (torchrun(2, FSDP, f"--checkpoint-dir={README}"), f"{README} is a file"),
    ],
)
def test_bad_input(command, said, tmp_path):
    done = run(command, tmp_path, code=2)
    for rank in done.ranks or [done]:
        assert said in rank.stderr and "Traceback" not in rank.stderr
    assert not list((tmp_path / "work").iterdir())


# ---- from DDP to FSDP2 ---------------------------------------------------------------
@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory):
    return train(2, tmp_path_factory.mktemp("by_ddp"), DDP)


@pytest.mark.parametrize("processes", [only_in_release(1), 2])
def test_fsdp_trains_the_same_weights_as_ddp(processes, by_ddp, tmp_path):
    """In float64, and prints the same; each rank has a shard of the gradients.

    Two ranks evaluate 481 and 480 samples: in batches of 96, that is 6 and 5.
    """
    by_fsdp = train(processes, tmp_path, FSDP)
    assert max_abs_diff(by_fsdp.weights, by_ddp.weights) <= 1e-10
    assert by_fsdp.screen == by_ddp.screen
    assert "norm of the last gradient" in by_ddp.screen
    whole = sum(weight.numel() for weight in torch.load(by_ddp.weights).values())
    shards = [rank["elements"] for rank in by_fsdp.ranks]
    assert sum(shards) == whole and max(shards) - min(shards) < 0.1 * whole
    assert [rank["elements"] for rank in by_ddp.ranks] == [whole, whole]
    assert [seen for _, _, seen in by_fsdp.ranks[0]["sums"]] == [961] * 4


@pytest.mark.release
def test_fsdp_in_bf16(tmp_path):
    """In float32, with gathered weights and the layers' arithmetic in 16 bits."""
    done = run(torchrun(2, FSDP, "--bf16"), tmp_path)
    first, *_, last = losses(done.stdout)
    assert last < 0.5 * first
    weights = torch.load(tmp_path / "work/model.pt")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.release
def test_a_run_that_is_killed_while_it_saves_is_resumed(by_ddp, tmp_path):
    """On another number of processes; in the end it has the weights of DDP."""
    prepare = functools.partial(spy.kill_in_save, 3)
    command = torchrun(2, FSDP, "--noise=0")
    killed = run(command, tmp_path, prepare=prepare, code=None)
    assert killed.ranks[1].returncode == -signal.SIGKILL
    folder = tmp_path / "work/checkpoints"
    left = {".epoch-0003.tmp", "epoch-0001", "epoch-0002"}
    assert {path.name for path in folder.iterdir()} == left
    resumed = train(1, tmp_path, FSDP)
    first, *rest = resumed.screen.splitlines()
    assert first == f"resumed from {Path('checkpoints', 'epoch-0002')}"
    assert [*killed.stdout.splitlines()[:2], *rest] == by_ddp.screen.splitlines()
    assert max_abs_diff(resumed.weights, by_ddp.weights) <= 1e-10


# ---- the diffs and imports -----------------------------------------------------------
@pytest.mark.parametrize(
    "script", [BEFORE, AFTER, DDP, FSDP], ids=lambda path: path.name
)
def test_a_script_imports_nothing_but_torch(script):
    assert imported_by(script.read_text()) <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("page", PAIRS, ids=lambda path: path.name)
def test_the_page_shows_the_difference(page):
    """All of it but imports, and functions that are new; each hunk says why."""
    before, after = (path.read_text().splitlines() for path in PAIRS[page])
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    lines = ["@@" if line.startswith("@@") else line for line in lines]
    hunks = "\n".join(lines).split("@@\n")[1:]
    (shown,) = re.findall(r"```diff\n@@\n(.*?)\n```", page.read_text(), re.DOTALL)
    shown = [each.rstrip("\n") for each in shown.split("@@\n")]
    for hunk in (each.rstrip("\n") for each in hunks):
        if hunk not in shown:
            assert re.search(r"^[+-](import|from) |^\+def ", hunk, re.MULTILINE), hunk
        elif added := re.findall(r"^\+(.+)$", hunk, re.MULTILINE):
            assert any("# " in line for line in added), hunk
    assert set(shown) <= {each.rstrip("\n") for each in hunks}


# ---- special cases of the page -------------------------------------------------------
# Each returns what has to be equal on 1 and 2 processes, and is not with `wrong`.
def lines_with(text):
    """Return the Python code of README.md that has a text."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [each for each in code if text in each]
    return found


def make_points(count):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def wrap():
    """Return a model in float64, the same on all ranks, and its wrapper."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, nn.parallel.DistributedDataParallel(model)


def flat(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def one_batch(rank, world_size, wrong):
    """All data as one batch, which the ranks cannot share equally, with LBFGS."""
    x, y = make_points(97)
    count, (x, y) = len(x), (x[rank::world_size], y[rank::world_size])
    model, ddp_model = wrap()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (ddp_model(x) - y).square().sum() / (len(x) if wrong else count)
        penalty = sum(weight.square().sum() for weight in ddp_model.parameters())
        loss = loss + 0.1 * penalty / (1 if wrong else world_size)
        (loss if wrong else world_size * loss).backward()
        total = loss.detach()
        dist.all_reduce(total)
        return total

    optimizer.step(closure)
    return flat(model)


def normalized(rank, world_size, wrong):
    """By the lines of the page, or by each rank's own mean and deviation.

    On one process, the lines do what values.std() does.
    """
    values = make_points(24)[1]
    names = {"values": values[rank::world_size], "dist": dist, "torch": torch}
    own = "values = (values - values.mean()) / values.std()"
    exec(own if wrong else lines_with("squares = "), names)
    assert world_size > 1 or torch.allclose(
        names["values"], (values - values.mean()) / values.std()
    )
    total = names["values"].pow(3).sum()
    dist.all_reduce(total)
    return total


def adaptive_weight(rank, world_size, wrong):
    """A factor of two gradients' norms, as VQ-GAN's, by the lines of the page."""
    model, ddp_model = wrap()
    x, y = (each[rank::world_size] for each in make_points(24))
    out = ddp_model(x)
    losses = (out - y).square().mean(), out.abs().mean()
    names = {"torch": torch, "dist": dist, "losses": losses}
    names |= {"last_weight": model[2].weight, "world_size": world_size}
    code = lines_with("factor = ")
    exec(code.replace("dist.all_reduce(gradient)", "pass") if wrong else code, names)
    (losses[0] + names["factor"] * losses[1]).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def codebook(rank, world_size, wrong):
    """Averages of the vectors of each code, in a buffer, by the lines of the page."""
    vectors = make_points(24)[0][rank::world_size]
    codes = (vectors[:, 0] > 0).long()
    counts = torch.bincount(codes, minlength=2).double()
    sums = torch.zeros(2, 3, dtype=torch.float64).index_add_(0, codes, vectors)
    code = "" if wrong else lines_with("dist.all_reduce(counts)")
    exec(code, {"dist": dist, "counts": counts, "sums": sums})
    return sums / counts[:, None]


CASES = (one_batch, normalized, adaptive_weight, codebook)


def be_a_rank(rank, world_size, folder):
    """Run all cases, right and wrong; rank 0 writes {(name, wrong): tensor}."""
    store = dist.FileStore(str(folder / f"store-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = {
        (case.__name__, wrong): case(rank, world_size, wrong)
        for case in CASES
        for wrong in (False, True)
    }
    if rank == 0:
        torch.save(found, folder / f"{world_size}.pt")
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_cases(tmp_path_factory):
    """Return what the cases return on one process and on two."""
    folder = tmp_path_factory.mktemp("cases")
    calls = [(rank, size, folder) for size in (1, 2) for rank in range(size)]
    commands.call_in_forks(be_a_rank, calls)
    return [torch.load(folder / f"{size}.pt") for size in (1, 2)]


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_a_special_case(name, of_cases):
    """By the page, two processes do what one does; by the mistake, something else."""
    one, two = of_cases
    assert (one[name, False] - two[name, False]).abs().max() <= 1e-10
    assert (one[name, True] - two[name, True]).abs().max() > 1e-4
