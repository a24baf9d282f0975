"""your_own_script/: in each pair, the second script trains what the first does."""

import ast
import difflib
import functools
import gc
import itertools
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from harness import commands
from harness.stages import ROOT
from harness.weights import max_abs_diff
from tests import spy
from tests.conftest import only_in_release
from tests.training import imported_by
from tests.training import losses

pytestmark = pytest.mark.ci

FOLDER = ROOT / "your_own_script"
PAGES = "".join(
    (FOLDER / name).read_text() for name in ("README.md", "ddp_to_fsdp2.md")
)
BEFORE, AFTER = FOLDER / "before.py", FOLDER / "after.py"
DDP, FSDP = FOLDER / "ddp.py", FOLDER / "fsdp.py"
RESUME = FOLDER / "fsdp_resume.py"
PAIRS = {"DDP": (BEFORE, AFTER), "FSDP": (DDP, FSDP), "RESUME": (FSDP, RESUME)}
# What these scripts train is tested in tests/around/test_hugging_face.py.
HF = FOLDER / "hugging_face"
HF_PAGE = (HF / "README.md").read_text()
PAIRS["HF"] = (HF / "before.py", HF / "fsdp.py")
TRAIN_SIZE, VAL_SIZE, EPOCHS, BATCH_SIZE = 3007, 1001, 5, 64
FSDP_VAL_SIZE = 961
STEPS = TRAIN_SIZE // BATCH_SIZE
COMMANDS = re.findall(r"^\$ ((?:python|torchrun) .*)$", PAGES, re.MULTILINE)
COMMANDS = [each for each in COMMANDS if "check_yours.py" not in each]


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
    "command",
    [only_in_release(each, unless=each in COMMANDS[:2]) for each in COMMANDS],
)
def test_a_command_of_the_page_trains(command, tmp_path):
    """As it is typed, by the launcher; in the other tests, the processes are forks."""
    shutil.copytree(FOLDER, tmp_path / "copy")
    no_gpu = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    done = commands.run(command, tmp_path, cwd=tmp_path / "copy", **no_gpu)
    first, *_, last = losses(done.stdout)
    assert last < 0.5 * first
    assert float(re.findall(r"accuracy ([\d.]+)%", done.stdout)[-1]) > 90


def test_two_processes_train_the_same_weights_as_one(on_one, on_two):
    assert [rank["ranks"] for rank in on_one.ranks] == [1]
    assert [rank["ranks"] for rank in on_two.ranks] == [2, 2]
    assert max_abs_diff(on_one.weights, on_two.weights) <= 1e-10
    assert on_one.screen == on_two.screen
    assert len(losses(on_two.screen)) == EPOCHS


def test_after_trains_the_same_weights_as_before(on_one, tmp_path):
    """Given the order of after.py's samples, before.py prints and saves the same."""
    prepare = functools.partial(spy.shuffle_as_after, STEPS * BATCH_SIZE)
    done = run(["python", BEFORE, "--noise=0"], tmp_path, prepare=prepare)
    assert done.stdout == on_one.screen
    weights = tmp_path / "work/model.pt"  # with the same names, too: no "module."
    assert max_abs_diff(weights, on_one.weights) <= 1e-10


def test_ranks_share_each_global_batch(on_one, on_two):
    def ordered(batch):  # whichever rank had which row
        return batch[batch[:, 0].argsort()]

    (whole,), shards = on_one.ranks, on_two.ranks
    assert len(whole["batches"]) == EPOCHS * STEPS
    steps = zip(whole["batches"], *(rank["batches"] for rank in shards), strict=True)
    for expected, *parts in steps:
        assert [len(part) for part in parts] == [BATCH_SIZE // 2] * 2
        assert torch.equal(ordered(torch.cat(parts)), ordered(expected))
    firsts = torch.stack(whole["batches"][::STEPS])
    assert len(firsts.unique(dim=0)) == EPOCHS  # every epoch has an order of its own


def test_every_rank_draws_noise_of_its_own(on_two):
    first, second = (torch.stack(rank["noise"]) for rank in on_two.ranks)
    assert not (first == second).any()


def test_evaluation_counts_every_sample_once(on_one, on_two):
    """The sums are those of the whole set, and the printed metrics come from them."""
    assert on_two.ranks[0]["sums"] == on_two.ranks[1]["sums"]
    for each in (on_one, on_two):
        sums = each.ranks[0]["sums"]
        assert [seen for _, _, seen in sums] == [VAL_SIZE] * EPOCHS
        assert each.screen.splitlines() == [
            f"epoch {epoch}: loss {loss / seen:.4f}, accuracy {correct / seen:.2%}"
            for epoch, (loss, correct, seen) in enumerate(sums, 1)
        ]
    of_one, of_two = (torch.tensor(each.ranks[0]["sums"]) for each in (on_one, on_two))
    torch.testing.assert_close(of_one, of_two, rtol=1e-10, atol=0)


def test_only_rank_0_writes(on_one, on_two):
    assert [rank["saves"] for rank in on_one.ranks + on_two.ranks] == [1, 1, 0]


def test_plain_python_names_torchrun(tmp_path):
    done = run(["python", AFTER], tmp_path, code=2)
    assert "torchrun --standalone --nproc-per-node" in done.stderr
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    "script", [AFTER, DDP, FSDP, RESUME], ids=lambda path: path.name
)
def test_a_batch_that_cannot_be_divided(script, tmp_path):
    done = run(torchrun(2, script, "--batch-size=63"), tmp_path, code=2)
    assert "--batch-size must be divisible" in done.stderr


# ---- from DDP to FSDP2 ---------------------------------------------------------------
@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory):
    return train(2, tmp_path_factory.mktemp("by_ddp"), DDP)


@pytest.fixture(scope="module", params=[only_in_release(1), 2])
def by_fsdp(tmp_path_factory, request):
    return train(request.param, tmp_path_factory.mktemp("by_fsdp"), FSDP)


def test_fsdp_trains_the_same_weights_as_ddp(by_ddp, by_fsdp):
    """In float64. What is printed has the norm of the gradient, too."""
    assert max_abs_diff(by_fsdp.weights, by_ddp.weights) <= 1e-10
    assert by_fsdp.screen == by_ddp.screen
    assert len(losses(by_ddp.screen)) == 4
    assert "norm of the last gradient" in by_ddp.screen


def test_fsdp_shards_the_gradients(by_ddp, by_fsdp):
    whole = sum(weight.numel() for weight in torch.load(by_ddp.weights).values())
    assert [rank["elements"] for rank in by_ddp.ranks] == [whole, whole]
    shards = [rank["elements"] for rank in by_fsdp.ranks]
    assert sum(shards) == whole
    assert max(shards) - min(shards) < 0.1 * whole


def test_with_fsdp_rank_0_alone_writes_and_every_sample_counts_once(by_ddp, by_fsdp):
    for each in (by_ddp, by_fsdp):
        assert [rank["saves"] for rank in each.ranks] == [1, 0][: len(each.ranks)]
        sums = each.ranks[0]["sums"]
        assert [seen for _, _, seen in sums] == [FSDP_VAL_SIZE] * 4
    # Two ranks evaluate 481 and 480 samples: in batches of 96, that is 6 and 5.
    assert '--batch-size", type=int, default=96' in FSDP.read_text()


@pytest.mark.release
@pytest.mark.parametrize("script", [DDP, FSDP], ids=lambda path: path.name)
def test_a_local_batch_in_fewer_micro_batches(script, tmp_path):
    """A rank's 33 samples in 8 micro-batches are 7, and the last of them is the last.

    Otherwise no rank sends its gradient, and with DDP nothing fails.
    """
    runs = []
    for micro_batches in ("1", "8"):
        flags = ("--batch-size=66", "--epochs=1", f"--micro-batches={micro_batches}")
        runs.append(train(2, tmp_path / micro_batches, script, *flags))
    whole, split = runs
    assert whole.screen == split.screen
    assert max_abs_diff(whole.weights, split.weights) <= 1e-10


def test_fsdp_in_bf16(tmp_path):
    """In float32, with gathered weights and the layers' arithmetic in 16 bits."""
    done = run(torchrun(2, FSDP, "--bf16"), tmp_path)
    first, *_, last = losses(done.stdout)
    assert last < 0.5 * first
    weights = torch.load(tmp_path / "work/model.pt")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_run_that_is_killed_while_it_saves_is_resumed(by_ddp, tmp_path):
    """On another number of processes; in the end it has the weights of DDP."""
    prepare = functools.partial(spy.kill_in_save, 3)
    command = torchrun(2, RESUME, "--noise=0")
    killed = run(command, tmp_path, prepare=prepare, code=None)
    assert killed.ranks[1].returncode == -signal.SIGKILL
    folder = tmp_path / "work/checkpoints"
    left = {".epoch-0003.tmp", "epoch-0001", "epoch-0002"}
    assert {path.name for path in folder.iterdir()} == left
    resumed = train(1, tmp_path, RESUME)
    first, *rest = resumed.screen.splitlines()
    assert first == f"resumed from {Path('checkpoints', 'epoch-0002')}"
    assert [*killed.stdout.splitlines()[:2], *rest] == by_ddp.screen.splitlines()
    assert max_abs_diff(resumed.weights, by_ddp.weights) <= 1e-10
    written = {f"epoch-000{n}" for n in (1, 2, 3, 4)}
    assert {path.name for path in folder.iterdir()} == written


def test_checkpoints_are_ordered_by_number_and_one_line_names_a_damaged_one(tmp_path):
    """Files of other names are left alone."""
    command = torchrun(2, RESUME, "--epochs=1")
    run(command, tmp_path)
    folder = tmp_path / "work/checkpoints"
    first = folder / "epoch-0001"
    shutil.copytree(first, folder / "epoch-9999")
    latest = first.rename(folder / "epoch-10000")
    (folder / "epoch-notes.txt").write_text("of mine")
    done = run(command, tmp_path)
    assert done.stdout == "resumed from checkpoints/epoch-10000\n"
    (latest / "__0_0.distcp").write_bytes(b"")
    done = run(command, tmp_path, code=1)
    says = "checkpoints/epoch-10000 cannot be read; remove it to resume from the one"
    for rank in done.ranks:
        (line,) = [each for each in rank.stderr.splitlines() if "cannot" in each]
        assert line == f"{says} before"
    shutil.rmtree(latest)
    done = run(command, tmp_path)
    assert done.stdout == "resumed from checkpoints/epoch-9999\n"


def test_a_file_in_the_place_of_the_checkpoints_is_found_at_once(tmp_path):
    (tmp_path / "file").touch()
    done = run(
        torchrun(2, RESUME, f"--checkpoint-dir={tmp_path}/file"), tmp_path, code=2
    )
    for rank in done.ranks:
        assert rank.stderr.endswith(f"--checkpoint-dir: {tmp_path}/file is a file\n")


# ---- the diffs -----------------------------------------------------------------------
# Those that no run on a CPU proves: without them, nothing fails there.
LINES = {
    "DDP": [
        "torch.cuda.set_device(device)",
        'dist.init_process_group("nccl", device_id=device)',
        "gc.collect()",
        "dist.destroy_process_group()",
    ],
    "FSDP": [
        "MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)",
        "model.set_requires_gradient_sync(last)",
        "@torch.no_grad()",
    ],
    "HF": [
        "MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)",
        'with torch.device("meta")',
        "(loss_sum * dist.get_world_size() / tokens).backward()",
    ],
    "RESUME": ["dist.broadcast_object_list(found)"],
}


def diff(pair, context):
    """Return the lines of a pair's diff with so many lines of context.

    Each hunk begins with a line "@@", without the numbers of its lines.
    """
    before, after = (path.read_text().splitlines() for path in PAIRS[pair])
    lines = list(difflib.unified_diff(before, after, n=context, lineterm=""))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


@pytest.mark.parametrize(
    "script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name
)
def test_a_script_imports_nothing_but_torch(script):
    known = {*sys.stdlib_module_names, "torch"}
    known |= {"recorder", "differences", "diagnoses"}  # of check_yours.py
    if script.name == "check_yours.py":  # for a file of safetensors only
        known.add("safetensors")
    if script.name == "memory.py":
        known.remove("torch")
    assert imported_by(script.read_text()) <= known


@pytest.mark.parametrize("pair", PAIRS)
def test_the_page_shows_the_diff(pair):
    shown = "\n".join(diff(pair, context=1))
    assert f"```diff\n{shown}\n```" in PAGES + HF_PAGE


@pytest.mark.parametrize("pair", PAIRS)
def test_every_hunk_says_why(pair):
    for hunk in "\n".join(diff(pair, context=0)).split("@@\n")[1:]:
        added = re.findall(r"^\+(.+)$", hunk, re.MULTILINE)
        if hunk.startswith('-"""'):  # the title
            continue
        plain = ("import ", "from ")
        if not all(line.startswith(plain) for line in added):
            assert any("# " in line for line in added), hunk


@pytest.mark.parametrize(
    "pair, line", [(pair, line) for pair, lines in LINES.items() for line in lines]
)
def test_the_lines_of_the_checklist_are_new(pair, line):
    """In the diff, or in the file that the second script of HF imports."""
    added = [each for each in diff(pair, context=0) if each.startswith("+")]
    if pair == "HF":
        added += (HF / "sharded.py").read_text().splitlines()
    assert any(line in each.partition("#")[0] for each in added)


def test_lora_and_sharded_repeat_nothing():
    """A block of fsdp.py's, sharded.py's or lora.py's stands in one of them."""
    files = [HF / f"{name}.py" for name in ("fsdp", "sharded", "lora")]
    for one, other in itertools.combinations(files, 2):
        lines = [path.read_text().splitlines() for path in (one, other)]
        lines = [[line for line in each if line.strip()] for each in lines]
        matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
        same = matcher.find_longest_match()
        block = lines[0][same.a : same.a + same.size]
        assert same.size < 8, "\n".join(block)


def test_shuffle_is_off():
    removed = [line for line in diff("DDP", context=0) if line.startswith("-")]
    assert any("shuffle=True" in line for line in removed)
    nodes = ast.walk(ast.parse(AFTER.read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    assert not any(word.arg == "shuffle" for call in calls for word in call.keywords)


# ---- special cases of the page -------------------------------------------------------
# Each returns what has to be equal on 1 and 2 processes, and is not with `wrong`.
def make_points(count):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def make_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def wrap(make_model):
    """Return a model in float64, the same on all ranks, and its wrapper."""
    torch.manual_seed(0)
    model = make_model().double()
    return model, nn.parallel.DistributedDataParallel(model)


def flat(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def one_batch(rank, world_size, wrong, reduce=True):
    """All data as one batch, which the ranks cannot share equally, with LBFGS.

    reduce: whether the closure returns the loss of all ranks; if not, it searches.
    """
    x, y = make_points(97)
    count, (x, y) = len(x), (x[rank::world_size], y[rank::world_size])
    model, ddp_model = wrap(make_net)
    options = {"max_iter": 4}
    if not reduce:
        options = {"max_iter": 40, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        loss = (ddp_model(x) - y).square().sum() / (len(x) if wrong else count)
        penalty = sum(weight.square().sum() for weight in ddp_model.parameters())
        loss = loss + 0.1 * penalty / (1 if wrong else world_size)
        (loss if wrong else world_size * loss).backward()
        total = loss.detach()
        if reduce:
            dist.all_reduce(total)
        return total

    optimizer.step(closure)
    return flat(model)


def drawn_each_epoch(rank, world_size, wrong):
    """Negatives that are drawn for the whole data set before each epoch."""
    model, ddp_model = wrap(make_net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, _ = make_points(24)
    for epoch in range(3):
        draw = np.random.default_rng((0, epoch) if not wrong else (0, epoch, rank))
        y = torch.from_numpy(draw.normal(size=(24, 1)))
        sampler = DistributedSampler(range(24), world_size, rank)
        sampler.set_epoch(epoch)
        chosen = list(sampler)
        optimizer.zero_grad()
        (ddp_model(x[chosen]) - y[chosen]).square().mean().backward()
        optimizer.step()
    return flat(model)


class Guided(nn.Module):
    """A model whose condition can be dropped for a whole batch."""

    def __init__(self):
        super().__init__()
        self.net, self.label = nn.Linear(3, 1), nn.Embedding(2, 1)

    def forward(self, x, drop):
        of_label = self.label((x[:, 0] > 0).long())
        return self.net(x) + (0 * of_label if drop else of_label)


def dropped_condition(rank, world_size, wrong):
    """All ranks draw the same decision for the global batch, or each its own."""
    model, ddp_model = wrap(Guided)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    draw = torch.Generator().manual_seed(rank if wrong else 0)
    x, y = (each[rank::world_size] for each in make_points(24))
    for _ in range(8):
        drop = torch.rand((), generator=draw) < 0.5
        optimizer.zero_grad()
        (ddp_model(x, drop) - y).square().mean().backward()
        optimizer.step()
    return flat(model)


def psnr(rank, world_size, wrong):
    """The mean over samples, or over batches, which are others on two processes."""
    errors = make_points(24)[1][rank::world_size].square()
    batches = [batch.mean() for batch in errors.split(4)] if wrong else errors
    values = [-10 * torch.log10(each) for each in batches]
    sums = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def hit_rate(rank, world_size, wrong):
    """Batches of one positive sample and three negative ones: the first has to win."""
    scores = make_points(48)[1].flatten()
    scores[::4] += 0.5
    users = scores.view(-1, 4)[rank::world_size]
    if wrong:  # samples are sharded, and a user's are on two ranks
        users = scores[rank::world_size].view(-1, 4)
    sums = torch.tensor([(users.argmax(1) == 0).sum(), len(users)])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def normalized(rank, world_size, wrong):
    """By the lines of the page, or by each rank's own mean and deviation."""
    page = (FOLDER / "rare_cases.md").read_text()
    (lines,) = re.findall(r"```python\n(sums = .*?)```", page, re.DOTALL)
    names = {"values": make_points(24)[1][rank::world_size], "dist": dist}
    code = "values = (values - values.mean()) / values.std()" if wrong else lines
    exec(code, names | {"torch": torch}, names)
    total = names["values"].pow(3).sum()
    dist.all_reduce(total)
    return total


CASES = (one_batch, drawn_each_epoch, dropped_condition, psnr, hit_rate, normalized)


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


def search_by_its_own_loss(rank, folder):
    """Be a rank whose closure returns the rank's own loss, to a line search."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    one_batch(rank, 2, wrong=False, reduce=False)


def test_a_closure_that_returns_the_loss_of_a_rank(tmp_path):
    """Each rank searches on its own, so one ends while the other one waits."""
    with pytest.raises(AssertionError):
        commands.call_in_forks(search_by_its_own_loss, [(0, tmp_path), (1, tmp_path)])


def test_a_part_times_zero_is_moved_by_weight_decay():
    """Its gradient is 0, with which the optimizer takes a step; None has none."""
    moved = []
    for keep in (True, False):
        model = Guided()
        with torch.no_grad():
            model.label.weight.fill_(1)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        out = model(torch.ones(2, 3), drop=True)
        (out if keep else model.net(torch.ones(2, 3))).sum().backward()
        optimizer.step()
        moved.append(not (model.label.weight == 1).all())
    assert moved == [True, False]


def test_torch_names_the_backend_of_a_device():
    backends = [dist.get_default_backend_for_device(name) for name in ("cpu", "cuda")]
    assert backends == ["gloo", "nccl"]
