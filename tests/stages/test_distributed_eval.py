"""07_distributed_eval: the metrics are those of the whole set, on any number of ranks.

Every sample counts once; batch norm is evaluated with rank 0's statistics.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from harness.commands import call_in_forks
from harness.stages import features
from harness.stages import first_with
from harness.stages import with_feature
from tests.conftest import only_in_release
from tests.training import load_stage_for_vectors
from tests.training import loaders_of
from tests.training import mesh_of
from tests.training import replace_data
from tests.training import stage_args

EVALUATING = with_feature("exact_eval")
FIRST = EVALUATING[0]
SIZES = (1, 2, 3, 4, 7, 60, 61, 101, 297)
DEFAULT = ((FIRST, 1), (FIRST, 2), (FIRST, 5), (first_with("shards"), 3))


class Vectors(TensorDataset):
    """n vectors of 3 random numbers, and their classes, one of six."""

    num_classes = 6

    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        numbers = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        super().__init__(numbers, torch.randint(6, (n,), generator=generator))

    def __getitems__(self, indices):
        return self[indices]  # a batch, which may be empty


# ---- shards --------------------------------------------------------------------------
def val_loader(module, n, batch_size):
    """Return the validation loader of this process, for a set of n vectors."""
    replace_data(module, Vectors(batch_size), Vectors(n))
    args = stage_args(module, "--batch-size", batch_size)
    return loaders_of(module, args)[1]


@pytest.mark.parametrize("stage", EVALUATING)
def test_every_sample_is_evaluated_once(stage):
    """By the loaders of up to 16 processes: this one is each of them in turn.

    What the fake processes exchange is lost; `make_loaders` only waits for the others.
    """
    module = load_stage_for_vectors(stage)

    @settings(max_examples=40, deadline=None, database=None)
    @given(
        n=strategies.integers(1, 200),
        processes=strategies.integers(1, 16),
        batch_size=strategies.integers(1, 70),
    )
    def check(n, processes, batch_size):
        shards, lengths = [], set()
        for rank in range(processes):
            options = {"rank": rank, "world_size": processes, "store": FakeStore()}
            dist.init_process_group("fake", **options)
            loader = val_loader(module, n, processes * batch_size)
            dist.destroy_process_group()
            batches = [batch for batch, _ in loader]
            assert all(len(batch) <= batch_size for batch in batches)
            nothing = torch.empty(0, 3, dtype=torch.float64)
            shards.append(torch.cat([nothing, *batches]))
            lengths.add(len(loader))
        sizes = [len(shard) for shard in shards]
        assert sum(sizes) == n and max(sizes) - min(sizes) <= 1
        if "shards" in features(stage):  # a rank without a batch would be waited for
            assert len(lengths) == 1
        whole = torch.full((n, 3), torch.nan, dtype=torch.float64)
        for rank, shard in enumerate(shards):
            whole[rank::processes] = shard
        assert torch.equal(whole, Vectors(n).tensors[0])

    check()


# ---- metrics -------------------------------------------------------------------------
def small_model():
    """Return a model with batch norm, always with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 16), nn.BatchNorm1d(16, eps=1e-300), nn.Linear(16, 6)]
    return nn.Sequential(*layers).double()


def evaluate_in_rank(stage, rank, processes, folder):
    """Be one process: evaluate sets of all sizes.

    Batch norm's statistics differ, where there may be batch norm: models of images.
    """
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, rank=rank, world_size=processes)
    module, metrics = load_stage_for_vectors(stage), {}
    for n in SIZES:
        model = small_model()
        if "images" in features(stage):
            model[1].running_mean += rank  # in training each rank sees its own samples
            model[1].running_var *= 1 + rank
        replace_data(module, Vectors(60), Vectors(n))
        # 1 to 5 processes divide this batch
        args = stage_args(module, "--dtype", "float64", "--batch-size", 60)
        _, loader = loaders_of(module, args)
        if "text" in features(stage):  # [B, T, ...], here with T = 1
            loader = [tuple(each.unsqueeze(1) for each in batch) for batch in loader]
            model[1] = nn.Identity()
        metrics[n] = module.evaluate(args, model, loader, *mesh_of(module, args))
    torch.save(metrics, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "stage, processes",
    [
        only_in_release(stage, n, unless=(stage, n) in DEFAULT)
        for stage in EVALUATING
        for n in range(1, 6)
    ],
)
def test_any_number_of_processes_gets_the_metrics_of_the_set(
    stage, processes, tmp_path
):
    """Rank 0's batch norm statistics are the ones that count.

    With fewer samples than processes, some shards are empty.
    """
    calls = [(stage, rank, processes, tmp_path) for rank in range(processes)]
    call_in_forks(evaluate_in_rank, calls)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(processes)]
    for n in SIZES:
        inputs, targets = Vectors(n).tensors
        logits = small_model().eval()(inputs)
        better = (logits > logits.gather(1, targets[:, None])).sum(1)
        loss = nn.functional.cross_entropy(logits, targets).item()
        for metrics in ranks:
            assert metrics[n]["count"] == n
            assert metrics[n]["acc1"] == 100 * (better < 1).sum().item() / n
            assert metrics[n]["acc5"] == 100 * (better < 5).sum().item() / n
            assert metrics[n]["loss"] == pytest.approx(loss, rel=1e-12)
