"""12_fsdp: a process holds its shards, and nothing else between the steps.

What is gathered and reduced, evaluated, saved and loaded. The later stages shard the
model by the same lines. That it trains the same weights, resumes and stops at a signal
is shown in the tests that do so for every stage.
"""

import functools

import pytest
import torch

from common.gpt import GPT
from harness.commands import call_in_forks
from harness.stages import first_with
from harness.stages import reference
from tests import fsdp_ranks
from tests.conftest import only_in_release
from tests.resume_harness import NEVER
from tests.resume_harness import Run
from tests.resume_harness import read_state
from tests.training import WINDOW
from tests.training import run_stage
from tests.training import skip_without_gpus
from tests.training import small_workload
from tests.training import train_in_forks

STAGE = first_with("shards")
PLAIN = reference(STAGE)
SMALL = ("--width", "20", "--heads", "2")


# ---- steps, seen from inside ---------------------------------------------------------
def see(function, processes, *arguments, folder):
    """Call a function of fsdp_ranks.py in processes; return what each has seen."""
    calls = [
        (function, rank, processes, folder, *arguments) for rank in range(processes)
    ]
    call_in_forks(fsdp_ranks.in_group, calls)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return a function: let processes take two steps; return what each has seen."""

    @functools.cache
    def get(processes, stage, *flags):
        folder, take = tmp_path_factory.mktemp("steps"), fsdp_ranks.take_steps
        return see(take, processes, stage, *flags, folder=folder)

    return get


def shard_sizes(weights, processes):
    """Return for each rank the numbers in its shards: rows, dealt out as by chunk."""
    sizes = [0] * processes
    for weight in weights.values():
        for rank, rows in enumerate(weight.chunk(processes)):
            sizes[rank] += rows.numel()
    return sizes


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_process_holds_its_shards_of_weights_gradients_and_states(processes, steps):
    """And after a step nothing else: what was gathered has been freed.

    With three processes the shards are uneven, since 256 rows and 20 are not divisible.
    """
    seen = steps(processes, STAGE, "--dtype", "float64")
    weights = seen[0]["weights"]
    expected = shard_sizes(weights, processes)
    total = sum(weight.numel() for weight in weights.values())
    assert sum(expected) == total
    assert max(expected) <= 1.05 * total / processes
    for rank, numbers in zip(seen, expected, strict=True):
        shards = 8 * numbers
        assert (rank["params"], rank["grads"]) == (shards, shards)
        assert rank["states"] == 2 * shards  # AdamW has two averages of each weight
        padding = 4 * 8 * (max(expected) - numbers)
        assert rank["memory"] <= 4 * shards + padding + 2000  # and a few scalars


@pytest.mark.parametrize(
    "processes, dtype, tolerance",
    [(2, "float64", 1e-12), (3, "float64", 1e-12), (2, "float32", 1e-6)],
)
def test_the_norm_and_the_weights_are_those_of_one_process(
    processes, dtype, tolerance, steps
):
    """Every rank has the norm of the whole gradient, and gradients are averages.

    A sum in place of an average would hardly change AdamW's steps. In float64 torch
    averages in another way than in float32, so both are tested.
    """
    (one,) = steps(1, STAGE, "--dtype", dtype)
    several = steps(processes, STAGE, "--dtype", dtype)
    assert len(one["norms"]) == 2
    for rank in several:
        assert rank["norms"] == several[0]["norms"]
        assert rank["norms"] == pytest.approx(one["norms"], rel=tolerance)
    assert max(one["norms"]) > 1  # so it was clipped, to 1
    for name, weight in one["weights"].items():
        other = several[0]["weights"][name]
        assert (weight - other).abs().max() <= tolerance * 100, name


def kinds(rank, name):
    """Return the number, the dtypes and the sum of bytes of a rank's collectives.

    Not of those that exchange metrics: each rank gives the four sums of its Meter.
    """
    seen = [one for one in rank["collectives"] if one[0] == name and one[2] > 32]
    return len(seen), {one[1] for one in seen}, sum(whole for *_, whole in seen)


def bytes_of(weights):
    """Return the bytes of all weights, and of those that are in blocks."""
    blocks = [each for name, each in weights.items() if name.startswith("blocks.")]
    return [sum(each.nbytes for each in part) for part in (weights.values(), blocks)]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_collectives_of_a_step(micro_batches, steps):
    """Of four blocks, and of the weights in no block.

    A forward pass gathers all five. A backward pass gathers the blocks again. Gradients
    are reduced once per step, after the last micro-batch.
    """
    seen = steps(2, STAGE, "--grad-accum-steps", str(micro_batches))
    whole, blocks = bytes_of(seen[0]["weights"])
    for rank in seen:
        gathered, _, gathered_bytes = kinds(rank, "all_gather")
        assert gathered == micro_batches * 9
        assert gathered_bytes == micro_batches * (whole + blocks)
        assert kinds(rank, "reduce_scatter")[::2] == (5, whole)


def test_mixed_precision_gathers_16_bits_and_averages_in_32(steps):
    seen = steps(2, STAGE, "--amp", "bf16")
    whole, blocks = bytes_of(seen[0]["weights"])
    for rank in seen:
        assert kinds(rank, "all_gather") == (9, {torch.bfloat16}, (whole + blocks) // 2)
        assert kinds(rank, "reduce_scatter") == (5, {torch.float32}, whole)
        assert rank["params"] == whole // 2  # half of them, in 32 bits
        assert rank["norms"] == seen[0]["norms"]
    full = steps(2, STAGE, "--dtype", "float32")[0]["norms"]
    assert seen[0]["norms"] != full
    assert seen[0]["norms"] == pytest.approx(full, rel=0.02)


# ---- evaluation ----------------------------------------------------------------------
# With 300 samples for training there are 33 to evaluate: 17 and 16, which are five
# batches of 4 and four, or 9 and 8, which are two batches of 8 and one. With 15 there
# is one.
@pytest.mark.parametrize(
    "samples, batch_size, processes",
    [(300, 8, 2), (15, 2, 2), only_in_release(300, 32, 4)],
)
def test_ranks_without_a_batch_evaluate_with_the_others(
    samples, batch_size, processes, device, tmp_path
):
    """Its metrics are those of the plain model with the saved weights."""
    skip_without_gpus(processes, device)
    work = small_workload(STAGE, samples)
    windows, local = work.val // WINDOW, batch_size // processes
    most, fewest = -(-windows // processes), windows // processes
    assert -(-most // local) == -(-fewest // local) + 1
    flags = [*work.flags, "--batch-size", str(batch_size), "--epochs", "1"]
    flags += ["--dtype", "float64", "--device", device, "--timeout", "30"]
    done = train_in_forks(STAGE, processes, flags, tmp_path)
    (row,) = done.rows
    assert row["val"]["count"] == work.val
    again = [*flags, "--evaluate", done.weights]
    one = run_stage(PLAIN, 1, again, tmp_path / "plain")
    assert done.epochs[0].endswith(one.stdout.strip())
    several = run_stage(STAGE, processes, again, tmp_path / "sharded")
    assert done.epochs[0].endswith(several.stdout.strip())


# ---- whole weights and whole checkpoints ---------------------------------------------
@pytest.fixture(scope="module")
def saved(device, several, tmp_path_factory):
    """A run of one epoch with a checkpoint at its end."""
    folder = tmp_path_factory.mktemp("saved")
    flags = [*SMALL, "--epochs", "1"]
    run = Run(STAGE, folder, device, *flags, *NEVER, processes=several)
    run.run()
    return run


def test_a_checkpoint_is_whole_and_knows_the_weights_by_their_names(saved):
    """So it can be read without a process group, and on any number of processes."""
    state = read_state(saved.paths()[0])
    model = GPT(256, WINDOW, 20, 2, 2)
    model.load_state_dict(state["model"])
    last = torch.load(saved.out_dir / "last.pt")
    assert all(map(torch.equal, model.state_dict().values(), last.values()))
    names = dict(model.named_parameters())
    averages = state["optimizer"]["state"]
    assert averages.keys() == names.keys()
    for name, weight in names.items():
        assert averages[name]["step"] == 10
        for kind in ("exp_avg", "exp_avg_sq"):
            average = averages[name][kind]
            assert type(average) is torch.Tensor and average.shape == weight.shape
            assert average.abs().max() > 0
    groups = state["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["params"]} == names.keys()
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_only_rank_0_has_the_whole_state_and_reads_it(tmp_path):
    """The others give it their shards, and get them from it."""
    seen = see(fsdp_ranks.save_and_load, 2, STAGE, tmp_path, folder=tmp_path)
    total = sum(each.nbytes for rank in seen for each in rank["weights"])
    assert seen[0]["gathered"] >= 3 * total  # and two averages of each
    assert [rank["gathered"] for rank in seen[1:]] == [0]
    assert seen[0]["loads"] == 1 and seen[0]["opened"] >= 1
    for rank in seen[1:]:
        assert rank["loads"] == rank["opened"] == 0
    for rank in seen:
        assert rank["steps"] == 1
        assert not all(map(torch.equal, rank["weights"], rank["before"]))
        assert all(map(torch.equal, rank["weights"], rank["after"]))
