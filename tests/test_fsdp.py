"""Each process holds its shards of the weights: what is exchanged, saved and loaded.

That it trains the same weights, resumes and stops at a signal is shown in the tests
that do so for every stage.
"""

import functools

import pytest
import torch
from torch import nn

from common import checkpointer
from common import meters
from common.data import TextInMemory
from common.full_state import FullModel
from common.full_state import FullOptimizer
from common.model import GPT
from common.model import decay_groups
from tests import fsdp_ranks
from tests.conftest import only_in_sweep
from tests.resume_harness import NEVER
from tests.resume_harness import Run
from tests.resume_harness import resumed_from
from tests.training import DOUBLE
from tests.training import assert_one_error_line
from tests.training import counts
from tests.training import plain
from tests.training import run_stage
from tests.training import sharded
from tests.training import small_workload
from tests.training import train_in_forks
from tools.harness import call_in_forks
from tools.stages import first_with
from tools.stages import reference
from tools.stages import with_feature
from tools.weights import max_abs_diff

SHARDED = with_feature("shards")
STAGE = first_with("shards")
PLAIN = reference(STAGE)
SMALL = ("--width", "20", "--heads", "2")


# ---- steps, seen from inside ---------------------------------------------------------
@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return a function: let processes take two steps; return what each has seen."""

    @functools.cache
    def get(processes, stage, *flags):
        folder, ranks = tmp_path_factory.mktemp("steps"), range(processes)
        before = (processes, folder, stage)
        calls = [(fsdp_ranks.take_steps, rank, *before, *flags) for rank in ranks]
        call_in_forks(fsdp_ranks.in_group, calls)
        return [torch.load(folder / f"{rank}.pt") for rank in ranks]

    return get


def shard_sizes(weights, processes):
    """Return for each rank the numbers in its shards: rows, dealt out as by chunk."""
    sizes = [0] * processes
    for weight in weights.values():
        for rank, rows in enumerate(weight.chunk(processes)):
            sizes[rank] += rows.numel()
    return sizes


@pytest.mark.parametrize(
    "stage, processes",
    [only_in_sweep(s, n, unless=n < 4) for s in SHARDED for n in range(1, 5)],
)
def test_a_process_holds_its_shards_of_weights_gradients_and_states(
    stage, processes, steps
):
    """And after a step nothing else: what was gathered has been freed.

    With three processes the shards are uneven, since 256 rows and 20 are not divisible.
    """
    seen = steps(processes, stage, "--dtype", "float64")
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


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(
    "processes, dtype, tolerance",
    [
        (2, "float64", 1e-12),
        (3, "float64", 1e-12),
        (2, "float32", 1e-6),
        only_in_sweep(4, "float64", 1e-12),
        only_in_sweep(3, "float32", 1e-6),
    ],
)
def test_the_norm_and_the_weights_are_those_of_one_process(
    stage, processes, dtype, tolerance, steps
):
    """Every rank has the norm of the whole gradient, and gradients are averages.

    A sum in place of an average would hardly change AdamW's steps. In float64 torch
    averages in another way than in float32, so both are tested.
    """
    (one,) = steps(1, stage, "--dtype", dtype)
    several = steps(processes, stage, "--dtype", dtype)
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


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("flags", [(), ("--keep-unsharded",)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_collectives_of_a_step(stage, micro_batches, flags, steps):
    """Of four blocks, and of the weights in no block.

    A forward pass gathers all five. A backward pass gathers the blocks again, if they
    were not kept. Gradients are reduced once per step, after the last micro-batch.
    """
    seen = steps(2, stage, "--grad-accum-steps", str(micro_batches), *flags)
    whole, blocks = bytes_of(seen[0]["weights"])
    for rank in seen:
        gathered, _, gathered_bytes = kinds(rank, "all_gather")
        assert gathered == micro_batches * (5 if flags else 9)
        again = 0 if flags else blocks
        assert gathered_bytes == micro_batches * (whole + again)
        assert kinds(rank, "reduce_scatter")[::2] == (5, whole)


@pytest.mark.parametrize("stage", SHARDED)
def test_weights_are_kept_unsharded_only_within_a_step(stage, steps):
    """So the flag changes no weight, and not what is held between two steps."""
    kept = steps(2, stage, "--grad-accum-steps", "1", "--keep-unsharded")
    usual = steps(2, stage, "--grad-accum-steps", "1")
    for one, other in zip(usual, kept, strict=True):
        for name in ("params", "grads", "states"):
            assert one[name] == other[name]
        assert other["memory"] <= one["memory"] + 2000
        assert one["norms"] == other["norms"]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name])


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(
    "amp, dtype", [("bf16", torch.bfloat16), only_in_sweep("fp16", torch.float16)]
)
def test_mixed_precision_gathers_16_bits_and_averages_in_32(stage, amp, dtype, steps):
    seen = steps(2, stage, "--amp", amp)
    whole, blocks = bytes_of(seen[0]["weights"])
    for rank in seen:
        assert kinds(rank, "all_gather") == (9, {dtype}, (whole + blocks) // 2)
        assert kinds(rank, "reduce_scatter") == (5, {torch.float32}, whole)
        assert rank["params"] == whole // 2  # half of them, in 32 bits
        assert rank["norms"] == seen[0]["norms"]
    full = steps(2, stage, "--dtype", "float32")[0]["norms"]
    assert seen[0]["norms"] != full
    assert seen[0]["norms"] == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("flags", [(), only_in_sweep(("--keep-unsharded",))])
@pytest.mark.parametrize("stage", with_feature("sharded_checkpoints"))
def test_activations_are_computed_again(stage, flags, steps):
    """No bit of the weights differs, less is kept, and the same is exchanged."""
    flags = ("--dtype", "float64", *flags)
    usual = steps(2, stage, *flags)
    recomputed = steps(2, stage, *flags, "--activation-checkpointing")
    for one, other in zip(usual, recomputed, strict=True):
        assert one["norms"] == other["norms"]
        assert one["weights"].keys() == other["weights"].keys()
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name])
        assert other["saved"] < one["saved"] / 3
        assert one["collectives"] == other["collectives"]


# ---- evaluation ----------------------------------------------------------------------
def test_an_empty_batch_adds_nothing_to_a_meter():
    meter, nothing = meters.Meter("cpu"), torch.empty(0, 5, dtype=torch.int64)
    logits = torch.empty(0, 11, 5)
    loss = nn.functional.cross_entropy(logits, nothing)
    assert loss.isnan()
    meter.update(loss, logits, nothing)
    assert meter.sums.tolist() == [0, 0, 0, 0]


def test_a_text_gives_an_empty_batch():
    tokens, target = TextInMemory(torch.arange(9, dtype=torch.uint8), 4).__getitems__(
        []
    )
    assert tokens.shape == target.shape == (0, 4)
    assert tokens.dtype == target.dtype == torch.int64


# With 300 samples for training there are 33 to evaluate: 17 and 16, which are five
# batches of 4 and four, or 9 and 8, which are two batches of 8 and one. With 15 there
# is one.
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(
    "samples, batch_size, processes",
    [(300, 8, 2), (15, 2, 2), only_in_sweep(300, 32, 4)],
)
def test_ranks_without_a_batch_evaluate_with_the_others(
    stage, samples, batch_size, processes, device, tmp_path
):
    """Its metrics and logits are those of the plain model with the saved weights."""
    if processes not in counts(device):
        pytest.skip(f"{processes} processes need as many GPUs")
    work = small_workload(stage, samples)
    most, fewest = -(-work.logits[0] // processes), work.logits[0] // processes
    local = batch_size // processes
    assert -(-most // local) == -(-fewest // local) + 1
    flags = [*work.flags, "--batch-size", str(batch_size), "--epochs", "1"]
    flags += ["--dtype", "float64", "--device", device, "--timeout", "30"]
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    own = [*flags, "--save-logits", first, "--sample", "0"]
    done = train_in_forks(stage, processes, own, tmp_path)
    (row,) = done.rows
    assert row["val"]["count"] == work.val
    again = [*flags, "--evaluate", done.weights, "--save-logits", second]
    one = run_stage(PLAIN, 1, again, tmp_path / "plain")
    assert done.epochs[0].endswith(one.stdout.strip())
    logits = torch.load(first)
    assert logits.shape == work.logits
    assert torch.allclose(logits, torch.load(second), atol=1e-10)
    several = run_stage(stage, processes, again, tmp_path / "sharded")
    assert done.epochs[0].endswith(several.stdout.strip())
    assert torch.allclose(logits, torch.load(second), atol=1e-10)


# ---- whole weights and whole checkpoints ---------------------------------------------
@pytest.fixture(scope="module")
def saved(device, several, tmp_path_factory):
    """A run of one epoch with a checkpoint at its end."""
    folder = tmp_path_factory.mktemp("saved")
    flags = [
        *small_workload(STAGE, 300).flags,
        *SMALL,
        "--epochs",
        "1",
        "--sample",
        "0",
    ]
    run = Run(STAGE, folder, device, *flags, *NEVER, processes=several)
    run.run()
    return run


def test_a_checkpoint_is_whole_and_knows_the_weights_by_their_names(saved):
    """So it can be read without a process group, and on any number of processes."""
    state = checkpointer.read(saved.paths()[0])
    model = GPT(256, 8, 20, 2, 2)
    model.load_state_dict(state["model"])
    last = torch.load(saved.out_dir / "last.pt")
    assert all(map(torch.equal, model.state_dict().values(), last.values()))
    names = dict(model.named_parameters())
    averages = state["optimizer"]["state"]
    assert averages.keys() == names.keys()
    for name, weight in names.items():
        assert averages[name]["step"] == 5
        for kind in ("exp_avg", "exp_avg_sq"):
            average = averages[name][kind]
            assert type(average) is torch.Tensor and average.shape == weight.shape
            assert average.abs().max() > 0
    groups = state["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["params"]} == names.keys()
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_a_run_resumes_on_one_number_of_processes_after_another(
    trained, device, tmp_path
):
    """Two processes, then three, then one, which differ by rounding only."""
    if 3 not in counts(device):
        pytest.skip("3 processes need as many GPUs")
    flags = (*DOUBLE, *small_workload(STAGE).flags)
    before = []
    for processes, step in ((2, 13), (3, 30), (1, None)):
        run = Run(STAGE, tmp_path, device, *flags, *NEVER, processes=processes)
        done = run.stop(step, "SIGTERM") if step else run.run()
        assert resumed_from(done.stdout) == before
        before = [run.latest()]
    assert before == [50]
    whole = trained(PLAIN, 1, *flags, how=train_in_forks)
    assert max_abs_diff(run.out_dir / "last.pt", whole.weights) <= 1e-10
    run.assert_no_step_is_lost_or_doubled(50)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("taken", [0, 2])
def test_a_state_is_that_of_the_plain_optimizer(taken):
    """Also before the first step, as when a loss scale has made the run skip all."""

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(16).reshape(2, 8)).square().sum().backward()
        optimizer.step()

    def make(shard):
        torch.manual_seed(0)
        model = GPT(256, 8, 20, 1, 2).double()
        if shard:
            sharded(model)
        return model, torch.optim.AdamW(decay_groups(model, 0.1), 0.01, fused=True)

    whole, first, second = make(False), make(True), make(True)
    for _ in range(taken):
        step(*whole)
        step(*first)
    if taken == 0:  # a skipped step leaves gradients, and no state
        first[0](torch.arange(16).reshape(2, 8)).sum().backward()
    second[0].head.weight.data.zero_()
    FullModel(second[0]).load_state_dict(FullModel(first[0]).state_dict())
    FullOptimizer(*second).load_state_dict(FullOptimizer(*first).state_dict())
    step(*whole)
    step(*second)
    for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.allclose(one, plain(other), atol=1e-14)


# ---- the scripts ---------------------------------------------------------------------
@pytest.mark.parametrize("stage", SHARDED)
def test_on_one_process_no_bit_differs_from_a_plain_model(stage, trained):
    """In float32; on more processes the order of additions does."""
    flags = ("--epochs", "2", *small_workload(stage).flags)
    done = trained(stage, 1, *flags, how=train_in_forks)
    one = trained(PLAIN, 1, *flags, how=train_in_forks)
    assert max_abs_diff(done.weights, one.weights) == 0
    assert done.epochs == one.epochs


def test_a_checkpoint_of_the_plain_stage_is_refused(device, tmp_path):
    """Its optimizer knows the weights by their numbers, not by their names."""
    flags = [*small_workload(STAGE, 300).flags, *SMALL, "--epochs", "1"]
    Run(PLAIN, tmp_path, device, *flags, *NEVER, processes=1).run()
    done = Run(STAGE, tmp_path, device, *flags, *NEVER, processes=1).run(code=2)
    assert_one_error_line(done, "--checkpoint-dir: ")
