"""Stage 07: each process evaluates its own shard, and the sums are those of the set."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from torch import distributed as dist
from torch import nn
from torch.utils.data import Dataset

from nbtools.sections import sections
from tests.conftest import swept_unless
from tests.harness import assert_one_error_line
from tests.harness import call_in_forks
from tests.harness import fork
from tests.harness import fork_ranks
from tests.harness import give_sets
from tests.harness import little_work
from tests.harness import load_stage_for_vectors
from tests.harness import shards_the_weights
from tests.harness import train_in_forks
from tools.stages import ROOT
from tools.stages import stages
from tools.stages import trains_on_text

SHARDED = stages()[6:]
ON_IMAGES = [stage for stage in SHARDED if not trains_on_text(stage)]
FIRST = SHARDED[0]
SIZES = (1, 2, 3, 4, 7, 60, 61, 101, 297)


class Numbers(Dataset):
    """n "images" of 3 random values, and their classes, one of six."""

    classes = 6

    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.images = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(6, (n,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __getitems__(self, indices):
        return self.images[indices], self.labels[indices]


def arguments(**others):
    """Return what the functions of a stage's script read of the flags."""
    values = {"device": torch.device("cpu"), "dtype": torch.float64, "amp": "off"}
    values |= {"workers": 0, "seed": 0, "grad_accum_steps": 1, "save_logits": None}
    return types.SimpleNamespace(**{**values, **others})


def val_loaders(stage, n, processes, batch_size):
    """Return the validation loader of each process, by the stage's own code."""
    module, loaders = load_stage_for_vectors(stage), []
    give_sets(module, Numbers(processes * batch_size), Numbers(n))
    module.DistributedSampler = lambda *_, **__: None
    for rank in range(processes):
        module.dist = types.SimpleNamespace(
            get_rank=lambda rank=rank: rank,
            get_world_size=lambda: processes,
            barrier=lambda: None,
        )
        args = arguments(batch_size=processes * batch_size)
        loaders.append(module.make_loaders(args)[1])
    return loaders


@pytest.mark.parametrize(
    "stage, examples",
    [swept_unless(n == 40, s, n) for s in SHARDED for n in (40, 300)],
)
def test_every_image_is_evaluated_once(stage, examples):
    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        n=strategies.integers(1, 200),
        processes=strategies.integers(1, 16),
        batch_size=strategies.integers(1, 70),
    )
    def check(n, processes, batch_size):
        loaders = val_loaders(stage, n, processes, batch_size)
        nothing = torch.empty(0, 3, dtype=torch.float64)
        shards = [torch.cat([nothing, *(im for im, _ in one)]) for one in loaders]
        sizes = [len(shard) for shard in shards]
        assert sum(sizes) == n
        assert max(sizes) - min(sizes) <= 1
        assert all(len(images) <= batch_size for one in loaders for images, _ in one)
        if shards_the_weights(stage):  # a rank without a batch would be waited for
            assert len({len(one) for one in loaders}) == 1
        whole = torch.full((n, 3), torch.nan, dtype=torch.float64)
        for rank, shard in enumerate(shards):
            whole[rank::processes] = shard
        assert torch.equal(whole, Numbers(n).images)

    check()


@pytest.mark.parametrize(
    "stage, examples",
    [swept_unless(n == 20, s, n) for s in SHARDED for n in (20, 150)],
)
def test_the_sums_of_the_shards_are_those_of_the_set(stage, examples):
    """The stage's own evaluation, with an all_reduce that adds to a common total."""

    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        n=strategies.integers(1, 120),
        processes=strategies.integers(1, 9),
        batch_size=strategies.integers(1, 40),
    )
    def check(n, processes, batch_size):
        total, model = torch.zeros(4, dtype=torch.float64), nn.Linear(3, 6).double()
        module = load_stage_for_vectors(stage)
        module.is_main_process = lambda: False

        def add_up(sums):
            total.add_(sums)
            sums.fill_(1)  # a shard may hold no image, the set always does

        module.dist = types.SimpleNamespace(all_reduce=add_up)
        for loader in val_loaders(stage, n, processes, batch_size):
            module.evaluate(arguments(), model, loader)
        images, labels = Numbers(n).images, Numbers(n).labels
        output = model(images)
        ranks = (output > output.gather(1, labels[:, None])).sum(1)
        assert total[1:].tolist() == [(ranks < 1).sum(), (ranks < 5).sum(), n]
        loss = nn.functional.cross_entropy(output, labels, reduction="sum").item()
        assert total[0].item() == pytest.approx(loss, rel=1e-5)

    check()


def small_model():
    """Return a model with batch norm, always with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 6)]
    return nn.Sequential(*layers).double()


def evaluate_in_rank(stage, rank, processes, folder):
    """Be one process: evaluate sets of all sizes. Batch norm's statistics differ."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous-{processes}"
    dist.init_process_group("gloo", store, rank=rank, world_size=processes)
    module, metrics = load_stage_for_vectors(stage), {}
    for n in SIZES:
        model = small_model()
        model[1].running_mean += rank  # in training each rank sees its own images
        model[1].running_var *= 1 + rank
        give_sets(module, Numbers(60), Numbers(n))
        file = folder / f"{processes}-{n}.pt"
        args = arguments(batch_size=60, save_logits=file)
        _, loader = module.make_loaders(args)
        metrics[n] = module.evaluate(args, model, loader)
    torch.save(metrics, folder / f"{processes}-rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Return a function: let 1 to 5 processes evaluate; return their folder."""
    folders = {}

    def get(stage, *numbers):
        folder = folders.setdefault(stage, tmp_path_factory.mktemp("evaluated"))
        for processes in numbers:
            if (folder / f"{processes}-rank0.pt").exists():
                continue
            calls = [(stage, rank, processes, folder) for rank in range(processes)]
            call_in_forks(evaluate_in_rank, calls)
        return folder

    return get


def is_default(stage, processes):
    return (stage, processes) in ((FIRST, 1), (FIRST, 2), (FIRST, 5), (SHARDED[-1], 3))


@pytest.mark.parametrize(
    "stage, processes",
    [swept_unless(is_default(s, n), s, n) for s in SHARDED for n in range(1, 6)],
)
def test_any_number_of_processes_gives_the_same_metrics_and_logits(
    evaluated, stage, processes
):
    """Rank 0's batch norm statistics are the ones that count, and the ones saved."""
    folder = evaluated(stage, 1, processes)
    one = torch.load(folder / "1-rank0.pt")
    assert list(one) == list(SIZES)
    for rank in range(processes):
        several = torch.load(folder / f"{processes}-rank{rank}.pt")
        for n in SIZES:
            assert several[n]["count"] == n
            assert several[n]["acc1"] == one[n]["acc1"]
            assert several[n]["acc5"] == one[n]["acc5"]
            assert several[n]["loss"] == pytest.approx(one[n]["loss"], rel=1e-12)
    for n in SIZES:
        logits = torch.load(folder / f"{processes}-{n}.pt")
        assert logits.shape == (n, 6) and logits.dtype == torch.float64
        expected = small_model().eval()(Numbers(n).images)
        assert torch.allclose(logits, expected, atol=1e-12)


def test_later_stages_evaluate_by_the_same_lines():
    """So what is shown of stage 07 in whole runs holds for them, too.

    With text, a few of them name other data; what the processes exchange is the same.
    """
    texts = {stage: sections(stage)["5. evaluation"] for stage in SHARDED}
    for kind in (False, True):
        alike = [text for s, text in texts.items() if trains_on_text(s) == kind]
        assert all(text == alike[0] for text in alike)
    others = {
        tuple(line for line in text if "dist." in line or "meter" in line)
        for text in texts.values()
    }
    assert len(others) == 1 and len(others.pop()) >= 6


@pytest.mark.parametrize("stage", [swept_unless(s == FIRST, s) for s in SHARDED])
def test_saved_logits_are_those_of_the_saved_weights(stage, tmp_path, several, device):
    """A set of 21 images, or of 12 windows, in bf16, by two processes and by one."""
    work = little_work(stage, 108)
    fake = [*work.flags, "--batch-size", "12"]
    fake += ["--epochs", "2", "--amp", "bf16", "--device", device]
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    done = train_in_forks(stage, several, [*fake, "--save-logits", first], tmp_path)
    evaluate = ["--evaluate", done.weights, "--save-logits", second]
    (end,) = fork_ranks(stage, 1, [*fake, *evaluate], tmp_path / "again")
    assert end().stdout.startswith("val loss ")
    logits, again = torch.load(first), torch.load(second)
    assert logits.shape == work.logits and logits.dtype == torch.float32
    assert torch.allclose(logits, again, atol=1e-2)


# 15 images for training are 3 for evaluation; 8 are 1, and a shard is empty.
@pytest.mark.parametrize(
    "stage, images",
    [
        swept_unless((s, n) == (FIRST, "15"), s, n)
        for s in ON_IMAGES
        for n in ("15", "8")
    ],
)
def test_a_resnet18_gets_the_metrics_of_its_saved_weights(
    stage, images, trained, several, device, tmp_path
):
    """Batch norm's statistics are buffers: rank 0's are evaluated, and saved."""
    small = ["--arch", "resnet18", "--data", "fake", "--image-size", "8"]
    small += ["--images", images, "--batch-size", "4", "--dtype", "float64"]
    small += ["--lr", "0.001"]
    done = trained(stage, several, *small, "--epochs", "1", how=train_in_forks)
    flags = [*small, "--evaluate", done.weights, "--device", device]
    (end,) = fork_ranks(stage, 1, flags, tmp_path)
    again = end()
    assert again.stdout.startswith("val loss ")
    assert done.epochs[0].endswith(again.stdout.strip())


@pytest.mark.parametrize(
    "stage, where",
    [swept_unless(s == FIRST, s, where) for s in SHARDED for where in ("", "none/x")],
)
def test_save_logits_needs_a_file_that_can_be_written(stage, where, tmp_path):
    flags = ["--save-logits", tmp_path / where]
    done = fork(ROOT / stage / "train.py", flags, tmp_path)()
    assert_one_error_line(done, "--save-logits: ")
