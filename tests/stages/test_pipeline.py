"""The pipeline of 14_tensor_parallel/pipeline_parallel.ipynb trains as one process."""

import itertools
import re
import shutil
import sys
from fractions import Fraction

import pytest
import torch

from common import text
from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import replace_once

(PROGRAM,) = ROOT.glob("*/demos/pipeline.py")
DEMOS, FOLDER = PROGRAM.parent, PROGRAM.parents[1]

sys.path.insert(0, str(DEMOS))

import pipeline
import pipeline_bubble

pytestmark = pytest.mark.ci


def run(program, processes, *flags, **options):
    """Run a demo in forks; return its Done."""
    command = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return commands.run([*command, DEMOS / program, *flags], forks=True, **options)


def differences(done):
    """Return how far weights and losses are from one process's, as printed."""
    pattern = r"^largest difference .* weights (\S+), losses (\S+)$"
    return [float(n) for n in re.search(pattern, done.stdout, re.MULTILINE).groups()]


# ---- the same training ---------------------------------------------------------------
CASES = [
    ("gpipe", 2, 4),
    ("1f1b", 4, 6),
    only_in_release("1f1b", 2, 4),
    only_in_release("gpipe", 4, 6),
    only_in_release("1f1b", 3, 3),
    only_in_release("gpipe", 3, 2),
]
with_each_case = pytest.mark.parametrize("schedule, processes, micro_batches", CASES)


@pytest.fixture(scope="module")
def trained():
    """Return a function that trains in float64, once for the same arguments."""
    done = {}

    def get(schedule, processes, micro_batches):
        key = (schedule, processes, micro_batches)
        if key not in done:
            flags = ["--schedule", schedule, "--micro-batches", micro_batches]
            flags += ["--steps", 4, "--dtype", "float64"]
            done[key] = run("pipeline.py", processes, *flags)
        return done[key]

    return get


@pytest.fixture(scope="module")
def alone():
    """The model that one process trains in four steps, and the loss of each."""
    args = pipeline.parse_args(["--steps", "4", "--dtype", "float64"])
    windows, _ = text.load(None, context_length=32)
    return pipeline.train_alone(args, windows, torch.device("cpu"))


@with_each_case
def test_it_trains_as_one_process_does(
    schedule, processes, micro_batches, trained, alone
):
    done = trained(schedule, processes, micro_batches)
    assert max(differences(done)) <= pipeline.TOLERANCE
    expected = [f"step {n}: loss {loss:.4f}" for n, loss in enumerate(alone[1], 1)]
    assert re.findall("^step .*", done.stdout, re.MULTILINE) == expected
    assert alone[1][-1] < alone[1][0] - 0.3  # otherwise nothing was trained
    args = pipeline.parse_args(["--dtype", "float64"])
    _, val_windows = text.load(None, context_length=32)
    inputs, targets = pipeline.get_batch(args, val_windows, 0, torch.device("cpu"))
    val_loss = pipeline.loss_fn(alone[0](inputs), targets).item()
    assert f"\nvalidation loss {val_loss:.4f}\n" in done.stdout


def test_a_training_that_differs_fails(tmp_path):
    """Without the all-reduce, each process clips by a norm of its own."""
    copy = tmp_path / "stage/demos/pipeline.py"
    copy.parent.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=ignored)
    replace_once(PROGRAM, ("    dist.all_reduce(square)", "    #"), target=copy)
    done = run(copy, 2, "--steps", 2, "--dtype", "float64", code=1)
    assert differences(done)[0] > 1e-4


def test_the_activations_of_a_micro_batch_are_kept_as_often(trained):
    """Of each micro-batch in flight; the processes have as many blocks each."""
    done = trained("1f1b", 4, 6)
    kept = [float(n) for n in re.findall(r"in flight, (\S+) MB", done.stdout)]
    tokens = 24 // 6 * 32
    # Of a block, at least what enters and leaves both norms, queries, keys and values,
    # what attention returns, and what the wide layer and its activation return.
    smallest = tokens * 64 * 8 * (2 + 2 + 3 + 1 + 2 * 4) / 1e6
    assert len(kept) == 4
    for left, size in zip((4, 3, 2, 1), kept, strict=True):
        assert left * smallest < size < 1.5 * left * smallest


@with_each_case
def test_how_many_micro_batches_are_in_flight(
    schedule, processes, micro_batches, trained
):
    done = trained(schedule, processes, micro_batches)
    found = re.findall(r"rank (\d): .*; (.*); at most (\d) in flight", done.stdout)
    assert len(found) == processes
    for rank, passes, most in found:
        left = processes - int(rank)
        expected = micro_batches if schedule == "gpipe" else min(left, micro_batches)
        assert int(most) == expected
        names = [f"{kind}{n}" for kind in "FB" for n in range(micro_batches)]
        assert sorted(passes.split()) == sorted(names)


def test_each_process_holds_its_blocks(trained):
    done = trained("1f1b", 4, 6)
    held = [float(n) for n in re.findall(r"rank \d: (\S+)% of", done.stdout)]
    assert sum(held) == pytest.approx(100, abs=0.2)
    assert max(held) < 30


def test_most_in_flight_counts_what_is_not_yet_backward():
    assert pipeline.most_in_flight(["F0", "F1", "B0", "F2", "F3", "B1", "B2"]) == 3
    assert pipeline.most_in_flight(["F0", "B0", "F1", "B1"]) == 1


# ---- checkpoints ---------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of four steps on two processes."""
    folder = tmp_path_factory.mktemp("pipeline") / "saved"
    run("pipeline.py", 2, "--steps", 4, "--dtype", "float64", "--save", folder)
    return folder


@pytest.mark.usefixtures("group")
def test_one_process_loads_what_two_have_saved(saved, alone):
    args = pipeline.parse_args(["--dtype", "float64"])
    model = pipeline.make_model(args)
    optimizer = pipeline.make_optimizer(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert pipeline.load(saved, model, optimizer) == 4
    expected = alone[0].state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)
        assert not weight.equal(before[name])
    steps = [int(state["step"]) for state in optimizer.state.values()]
    assert steps == [4] * len(expected)


@pytest.mark.parametrize(
    "schedule, processes", [("gpipe", 4), only_in_release("1f1b", 2)]
)
def test_a_resumed_training_is_that_of_one_process(schedule, processes, saved):
    flags = ["--schedule", schedule, "--load", saved, "--dtype", "float64"]
    done = run("pipeline.py", processes, *flags, "--steps", 6)
    assert re.findall(r"^step (\d)", done.stdout, re.MULTILINE) == ["5", "6"]
    assert max(differences(done)) <= pipeline.TOLERANCE


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "processes, flags, reason",
    [
        (2, "--batch-size 10", "--batch-size 10 must be divisible by --micro-batches"),
        (2, "--micro-batches 1", "1f1b needs as many as there are processes (2)"),
        (2, "--depth 1", "--depth 1: 2 processes need a block each, or more"),
        (1, "", "a pipeline needs 2 processes or more: use --nproc-per-node=2"),
        (2, "--load nowhere", "--load nowhere: there is no checkpoint"),
        (2, "--load {saved} --depth 5", "Missing key in checkpoint state_dict: model."),
        (2, "--load {saved} --steps 4", "--steps 4: the checkpoint is of step 4"),
        (2, "--schedule zero", "--schedule: invalid choice: 'zero'"),
        (2, "--micro-batches 0", "--micro-batches: '0' is not an integer, 1 or more"),
        (2, "--save /dev/null", "--save: /dev/null is not a directory"),
        (2, "--micro-batches 3", "3 is not a multiple of 2 processes"),
    ],
)
def test_bad_input_is_one_line(processes, flags, reason, saved):
    words = flags.format(saved=saved).split()
    program = "pipeline_bubble.py" if "multiple" in reason else "pipeline.py"
    done = run(program, processes, *words, code=2)
    for rank in done.ranks:
        (line,) = rank.stderr.splitlines()
        assert line.startswith(f"{program}: error: ") and reason in line
    assert not done.stdout


@pytest.mark.parametrize("program", ["pipeline.py", "pipeline_bubble.py"])
def test_without_a_launcher_the_command_is_named(program):
    done = commands.run(["python", DEMOS / program], forks=True, code=2)
    (line,) = done.stderr.splitlines()
    name = f"{FOLDER.name}/demos/{program}"
    assert line.startswith(f"{program}: error: RANK is not set; a launcher sets it")
    assert re.search(rf"start with torchrun --standalone \S+ {name}$", line)


# ---- the bubble ----------------------------------------------------------------------
def gpipe(processes, micro_batches):
    numbers = range(micro_batches)
    order = [*(f"F{n}" for n in numbers), *(f"B{n}" for n in numbers)]
    return [order] * processes


def one_forward_one_backward(processes, micro_batches):
    orders = []
    for rank in range(processes):
        ahead = processes - 1 - rank
        pairs = [(f"F{n + ahead}", f"B{n}") for n in range(micro_batches - ahead)]
        orders.append([f"F{n}" for n in range(ahead)])
        orders[-1] += itertools.chain.from_iterable(pairs)
        orders[-1] += [f"B{n}" for n in range(micro_batches - ahead, micro_batches)]
    return orders


@pytest.mark.parametrize("make_orders", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("processes", range(1, 6))
@pytest.mark.parametrize("more", range(4))
def test_the_bubble_is_that_of_the_formula(make_orders, processes, more):
    micro_batches = processes + more
    orders = make_orders(processes, micro_batches)
    rows = pipeline_bubble.timeline(orders)
    ends = micro_batches + processes - 1
    assert pipeline_bubble.bubble(rows) == Fraction(processes - 1, ends)
    assert max(row[-1][2] for row in rows) == (2 + 4) * ends
    for row, order in zip(rows, orders, strict=True):
        assert [each for each, _, _ in row] == order
        most = max(pipeline_bubble.held(row).values())
        assert most == pipeline.most_in_flight(order)


def test_a_pass_waits_for_its_neighbor():
    rows = pipeline_bubble.timeline([["F0", "B0"], ["F0", "B0"]])
    assert rows == [[("F0", 0, 2), ("B0", 8, 12)], [("F0", 2, 4), ("B0", 4, 8)]]
    assert pipeline_bubble.held(rows[0]) == {0: 1, 12: 0}
    assert pipeline_bubble.held(rows[1]) == {2: 1, 8: 0}


def test_the_second_parts_follow_the_first():
    """With two parts on each of two processes, a pass takes half as long."""
    rows = pipeline_bubble.timeline([["F0", "f0", "b0", "B0"]] * 2)
    assert rows == [
        [("F0", 0, 1), ("f0", 2, 3), ("b0", 6, 8), ("B0", 10, 12)],
        [("F0", 1, 2), ("f0", 3, 4), ("b0", 4, 6), ("B0", 8, 10)],
    ]
    assert max(pipeline_bubble.held(rows[0], parts=2).values()) == 1


def test_orders_in_which_all_wait_are_refused():
    with pytest.raises(ValueError, match="each process waits for another"):
        pipeline_bubble.timeline([["B0", "F0"], ["F0", "B0"]])


@pytest.mark.parametrize(
    "processes, micro_batches", [(2, 4), only_in_release(4, 8), only_in_release(3, 3)]
)
def test_the_orders_of_torchs_own_schedules(processes, micro_batches):
    """The interleaved one is known by its bubble, and by each pass being there once."""
    flags = ["--micro-batches", micro_batches]
    done = run("pipeline_bubble.py", processes, *flags)
    orders = pipeline_bubble.read(done.stdout)
    assert [*orders] == ["GPipe", "1F1B", "interleaved 1F1B"]
    assert orders["GPipe"] == gpipe(processes, micro_batches)
    assert orders["1F1B"] == one_forward_one_backward(processes, micro_batches)
    every = sorted(f"{kind}{n}" for kind in "FBfb" for n in range(micro_batches))
    assert [sorted(order) for order in orders["interleaved 1F1B"]] == [
        every
    ] * processes
    for name, parts in (("GPipe", 1), ("1F1B", 1), ("interleaved 1F1B", 2)):
        bubble = pipeline_bubble.bubble(pipeline_bubble.timeline(orders[name]))
        ends = parts * micro_batches + processes - 1
        assert bubble == Fraction(processes - 1, ends)
        assert re.search(
            rf"^{name}: bubble {bubble}, .* = {bubble}$", done.stdout, re.M
        )


# ---- the other demos -----------------------------------------------------------------
def test_pipelines_with_fsdp_train_as_one_process_does():
    """The program asserts that the weights are those of one process."""
    lines = run("pipeline_grid.py", 4).stdout.splitlines()
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank, (line, (pp, dp)) in enumerate(zip(lines, places, strict=True)):
        share = re.fullmatch(rf"rank {rank}: pp {pp}, dp {dp}, (\S+)% of .*", line)[1]
        assert float(share) == pytest.approx(25, abs=1)


def test_what_keeps_the_outputs():
    """The program asserts how many bytes of them are alive, after each call."""
    run("pipeline_mistakes.py", 2, "outputs")
