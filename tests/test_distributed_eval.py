"""Stage 07: each process judges its own part of the set; the sums are those of the whole set."""

import types

from tests.harness import fork
from tests.harness import fork_ranks
from tests.harness import forkserver
from tests.harness import train_in_forks
from tests.test_chain import load
from tools.stages import ROOT
from tools.stages import stages

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from torch import distributed as dist
from torch import nn
from torch.utils.data import Dataset

SHARDED = stages()[6:]
SIZES = (1, 2, 3, 4, 7, 60, 61, 101, 297)


class Numbers(Dataset):
    """n "images" of 3 random values, and their classes, one of six."""

    classes = 6

    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.images = torch.randn(n, 3, generator=generator)
        self.labels = torch.randint(6, (n,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def flags(**others):
    """Return what the functions of a stage's script read of the flags."""
    names = {"device": torch.device("cpu"), "dtype": torch.float32, "amp": None, "workers": 0}
    return types.SimpleNamespace(
        **{**names, "seed": 0, "grad_accum_steps": 1, "predictions": None, **others}
    )


def val_loaders(stage, n, processes, batch_size):
    """Return the validation loader of each process, by the stage's own code, without processes."""
    module, loaders = load(stage), []
    module.data = types.SimpleNamespace(
        load_data=lambda args: (Numbers(processes * batch_size), Numbers(n)),
        loader_options=lambda args: {},
    )
    module.DistributedSampler = lambda *_, **__: None
    for rank in range(processes):
        module.dist = types.SimpleNamespace(
            get_rank=lambda rank=rank: rank,
            get_world_size=lambda: processes,
            barrier=lambda: None,
        )
        loaders.append(module.make_loaders(flags(batch_size=processes * batch_size))[1])
    return loaders


@pytest.mark.parametrize("stage", SHARDED)
@settings(max_examples=150, deadline=None)
@given(
    n=strategies.integers(1, 200),
    processes=strategies.integers(1, 16),
    batch_size=strategies.integers(1, 70),
)
def test_every_image_is_dealt_out_once(stage, n, processes, batch_size):
    loaders = val_loaders(stage, n, processes, batch_size)
    images = [torch.cat([torch.empty(0, 3), *(images for images, _ in one)]) for one in loaders]
    counts = [len(part) for part in images]
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1
    assert all(len(images) <= batch_size for one in loaders for images, _ in one)
    whole = torch.full((n, 3), torch.nan)
    for rank, part in enumerate(images):
        whole[rank::processes] = part
    assert torch.equal(whole, Numbers(n).images)


@pytest.mark.parametrize("stage", SHARDED)
@settings(max_examples=60, deadline=None)
@given(
    n=strategies.integers(1, 120),
    processes=strategies.integers(1, 9),
    batch_size=strategies.integers(1, 40),
)
def test_the_sums_of_the_parts_are_those_of_the_whole(stage, n, processes, batch_size):
    """The stage's own evaluation, with an all_reduce that is an addition to what came before."""
    total, model = torch.zeros(4, dtype=torch.float64), nn.Linear(3, 6)
    module = load(stage)
    module.is_main_process = lambda: False

    def add_up(sums):
        total.add_(sums)
        sums.fill_(1)  # a part may hold no image, the whole set never

    module.dist = types.SimpleNamespace(all_reduce=add_up)
    for loader in val_loaders(stage, n, processes, batch_size):
        module.evaluate(flags(), model, loader)
    data = Numbers(n)
    output = model(data.images)
    ranks = (output > output.gather(1, data.labels[:, None])).sum(1)
    assert total[1:].tolist() == [(ranks < 1).sum(), (ranks < 5).sum(), n]
    loss = nn.functional.cross_entropy(output, data.labels, reduction="sum").item()
    assert total[0].item() == pytest.approx(loss, rel=1e-5)


def evaluate_in_rank(stage, rank, processes, folder):
    """Be one process: evaluate sets of all sizes with a model whose running averages differ."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous-{processes}"
    dist.init_process_group("gloo", rank=rank, world_size=processes, init_method=store)
    module, answers = load(stage), {}
    for n in SIZES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 6))
        model[1].running_mean += rank  # as after training: each process has seen its own images
        model[1].running_var *= 1 + rank
        model.double()
        module.data.load_data = lambda args, n=n: (Numbers(60), Numbers(n))
        module.data.loader_options = lambda args: {}
        file = folder / f"{processes}-{n}.pt"
        args = flags(batch_size=60, predictions=file, dtype=torch.float64)
        _, loader = module.make_loaders(args)
        averages = module.evaluate(args, model, loader)
        answers[n] = {name: averages[name] for name in ("loss", "acc1", "acc5", "images")}
    torch.save(answers, folder / f"{processes}-rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=SHARDED)
def answers(request, tmp_path_factory):
    """Return the folder into which 1 to 5 processes wrote their answers."""
    folder = tmp_path_factory.mktemp("answers")
    for processes in range(1, 6):
        ranks = [
            forkserver.Process(
                target=evaluate_in_rank, args=(request.param, rank, processes, folder)
            )
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            if rank.is_alive():
                rank.kill()
        assert [rank.exitcode for rank in ranks] == [0] * processes
    return folder


@pytest.mark.parametrize("processes", range(1, 6))
def test_any_number_of_processes_gives_the_same_figures(answers, processes):
    (one,) = (torch.load(answers / "1-rank0.pt"),)
    assert list(one) == list(SIZES)
    for rank in range(processes):
        several = torch.load(answers / f"{processes}-rank{rank}.pt")
        for n in SIZES:
            assert several[n]["images"] == n
            assert several[n]["acc1"] == one[n]["acc1"]
            assert several[n]["acc5"] == one[n]["acc5"]
            assert several[n]["loss"] == pytest.approx(one[n]["loss"], rel=1e-12)


@pytest.mark.parametrize("processes", range(1, 6))
@pytest.mark.parametrize("n", SIZES)
def test_the_logits_stand_in_the_order_of_the_set(answers, processes, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 6))
    logits = torch.load(answers / f"{processes}-{n}.pt")
    assert logits.shape == (n, 6) and logits.dtype == torch.float64
    expected = model.double().eval()(Numbers(n).images.double())
    assert torch.allclose(logits, expected, atol=1e-12)


@pytest.mark.parametrize("stage", SHARDED)
def test_predictions_of_a_run_are_those_of_its_weights(stage, tmp_path, several, device):
    """A set of 21 images, in bf16: two processes write what one writes from the saved weights."""
    fake = ["--data", "fake", "--image-size", "8", "--images", "108", "--batch-size", "12"]
    fake += ["--device", device, "--amp", "bf16", "--epochs", "2"]
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    done = train_in_forks(stage, several, [*fake, "--save-logits", str(first)], tmp_path)
    evaluate = ["--evaluate", str(done.weights), "--save-logits", str(second)]
    (end,) = fork_ranks(stage, 1, [*fake, *evaluate], tmp_path / "again")
    assert end().stdout.startswith("val loss ")
    logits, again = torch.load(first), torch.load(second)
    assert logits.shape == (21, 10) and logits.dtype == torch.float32
    assert torch.allclose(logits, again, atol=1e-2)


@pytest.mark.parametrize("images", ["8", "45"])  # judged: one image, or nine
@pytest.mark.parametrize("stage", SHARDED)
def test_resnet18_with_batch_norm_is_judged_alike(
    stage, images, trained, several, device, tmp_path
):
    """Batch norm's running averages are buffers: those of rank 0 are saved, and are judged."""
    small = ["--arch", "resnet18", "--data", "fake", "--image-size", "8", "--images", images]
    small += ["--batch-size", "4", "--dtype", "float64", "--lr", "0.001"]
    done = trained(stage, several, *small, "--epochs", "1", how=train_in_forks)
    evaluate = ["--evaluate", str(done.weights)]
    (end,) = fork_ranks(stage, 1, [*small, *evaluate, "--device", device], tmp_path)
    again = end()
    assert again.stdout.startswith("val loss ")
    assert done.epochs[0].endswith(again.stdout.strip())


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("where", ["", "none/there.pt"])
def test_predictions_need_a_file_that_can_be_written(stage, where, tmp_path):
    done = fork(ROOT / stage / "train.py", ["--save-logits", tmp_path / where], tmp_path)()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("train.py: error: --save-logits: ")
