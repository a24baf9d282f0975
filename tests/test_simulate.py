"""The page of what can be split: its picture, its counts, and what it says of them."""

import math
import re
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.gpt import GPT
from tests import fsdp_ranks
from tools import harness
from tools import simulate
from tools import splits
from tools.simulate import KINDS
from tools.simulate import Call
from tools.simulate import Shape
from tools.stages import ROOT

pytestmark = pytest.mark.ci

PAGE = (ROOT / "docs/what_can_be_split.md").read_text()
PLOT = ROOT / "docs/as_the_world_grows.png"
SMALL = Shape(width=128, depth=2, context=16, vocabulary=64)
PROCESSES, PER_MACHINE = 4, 2
COMMAND = "python -m tools.simulate"


def weights(shape):
    """Return the bytes of a GPT's weights in float32."""
    model = GPT(shape.vocabulary, shape.context, shape.width, shape.depth, heads=2)
    return sum(weight.nbytes for weight in model.parameters())


# ---- what the processes do -----------------------------------------------------------
def count_all(_rank, _processes):
    """Return what `one_step` returns for each kind, with plain tuples."""
    found = {}
    for kind in KINDS:
        kept, calls, mesh = simulate.one_step(kind, SMALL, PER_MACHINE)
        found[kind] = kept, [tuple(call) for call in calls], mesh
    return found


def count_without_hook(_rank, _processes):
    """Return the collectives of DDP, which averages the gradients by itself."""
    ddp = nn.parallel.DistributedDataParallel
    with mock.patch.object(ddp, "register_comm_hook"):
        _, calls, _ = simulate.one_step("DDP", SMALL, PER_MACHINE)
    return [tuple(call) for call in calls]


def count_alone(path):
    """Save the same, without other processes."""
    options = {"store": FakeStore(), "rank": 0, "world_size": PROCESSES}
    dist.init_process_group("fake", **options)
    torch.save(count_all(0, PROCESSES), path)


def make_rows(path, sizes):
    """Save the Rows of groups of many sizes."""
    rows = [
        tuple(simulate.simulate(kind, ranks, SMALL, PER_MACHINE))
        for ranks in sizes
        for kind in KINDS
    ]
    torch.save(rows, path)


def on_each_process(count, folder):
    """Return what `count` returns on each process of a group that uses gloo."""
    calls = [(count, rank, PROCESSES, folder) for rank in range(PROCESSES)]
    harness.call_in_forks(fsdp_ranks.in_group, calls)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return {(ranks, kind): Row}."""
    path = tmp_path_factory.mktemp("rows") / "rows.pt"
    harness.call_in_forks(make_rows, [(path, (2, 4, 16, 256))])
    found = [simulate.Row(*row) for row in torch.load(path)]
    return {(row.ranks, row.kind): row for row in found}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return the counts of each kind."""
    path = tmp_path_factory.mktemp("simulated") / "found.pt"
    harness.call_in_forks(count_alone, [(path,)])
    return torch.load(path)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Return the counts of each kind on each of the processes, which use gloo."""
    return on_each_process(count_all, tmp_path_factory.mktemp("real"))


# ---- the simulation ------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_rank_calls_what_a_real_one_calls(kind, simulated, real):
    """The collectives in their order, their sizes and groups, and what is kept."""
    kept, calls, mesh = simulated[kind]
    assert len(calls) >= 2
    assert (kept, calls) == real[0][kind][:2]
    assert torch.equal(mesh, real[0][kind][2])
    for other in real[1:]:  # so that rank 0 can stand for all of them
        assert other[kind][1] == calls


def test_the_hook_calls_what_ddp_calls_without_it(real, tmp_path):
    alone = on_each_process(count_without_hook, tmp_path)
    assert alone == [rank["DDP"][1] for rank in real]


def test_a_rank_keeps_what_the_page_says(real):
    whole = weights(SMALL)
    states = {kind: [rank[kind][0] for rank in real] for kind in KINDS}
    assert states["DDP"] == [4 * whole] * PROCESSES
    # every rank has weights and gradients; the averages are dealt out
    shares = [kept - 2 * whole for kept in states["DDP, ZeRO-1"]]
    assert sum(shares) == 2 * whole and min(shares) > 0
    assert sum(states["FSDP"]) == 4 * whole
    assert sum(states["HSDP"]) == 2 * 4 * whole
    # of the norms and of what follows a sum, each rank of a row has a copy
    assert 4 * whole < sum(states["TP x FSDP"]) < 1.05 * 4 * whole


def formulas(ranks):
    """Return the bytes that a rank sends along each dimension of a mesh, by the page.

    They are exact up to rows that cannot be dealt out equally, which are padded, and
    norms, of which each rank of a row has a copy.
    """
    whole, inside = weights(SMALL), (PER_MACHINE - 1) / PER_MACHINE
    around, across = (ranks - 1) / ranks, (ranks - PER_MACHINE) / ranks
    activation = 4 * SMALL.width * SMALL.context
    # Weights are gathered twice, except for the root's, which stay between the passes,
    # and gradients are scattered.
    sharded = 3 * whole - weights(SMALL._replace(depth=0))
    # In addition to the blocks': tokens and positions, and the head's input gradient.
    sums = 2 * (4 * SMALL.depth + 3) * activation
    logits = 4 * SMALL.vocabulary * SMALL.context
    tensor = (sharded / PER_MACHINE * across, (sums + logits) * inside)
    return {
        "DDP": (2 * whole * around,),
        "DDP, ZeRO-1": (3 * whole * around,),
        "FSDP": (sharded * around,),
        "HSDP": (2 * whole / PER_MACHINE * across, sharded * inside),
        "TP x FSDP": tensor,
        "TP across machines": tensor,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [4, 16])
def test_the_bytes_follow_the_formulas_of_the_page(ranks, kind, rows):
    row = rows[ranks, kind]
    assert row.sends == pytest.approx(sum(formulas(ranks)[kind]), rel=0.02)
    groups = ranks if "TP" not in kind else ranks // PER_MACHINE
    assert (row.ranks, row.sequences) == (ranks, groups)


def test_what_leaves_a_machine(rows):
    """The bytes of one rank, if a ring goes from machine to machine; or of all."""
    for kind, (first, *second) in formulas(16).items():
        expected = {
            "HSDP": PER_MACHINE * first,
            "TP x FSDP": PER_MACHINE * first,
            "TP across machines": first + PER_MACHINE * sum(second),
        }
        leaves = expected.get(kind, first)
        assert rows[16, kind].leaves == pytest.approx(leaves, rel=0.02), kind
        assert rows[2, kind].leaves == 0  # there is one machine


@pytest.mark.parametrize("size", [1, 2, 4])
def test_borders_are_counted_one_by_one(size):
    ranks = torch.arange(8)
    for mesh in (ranks[:, None], ranks.view(-1, 2), ranks.view(2, -1).t()):
        for dim in (0, 1):
            crossing = 0
            for rank in range(8):
                place = (mesh == rank).nonzero()[0].tolist()
                ring = sorted(mesh.select(1 - dim, place[1 - dim]).tolist())
                after = ring[(ring.index(rank) + 1) % len(ring)]
                crossing += rank // size != after // size
            assert simulate.borders(mesh, dim, size) == crossing * size / 8
    assert simulate.borders(ranks, 0, size) == 1


def test_rows_that_are_no_multiple_of_the_ranks_are_padded(rows):
    """As the page says of FSDP; HSDP has only two shards."""
    assert rows[256, "FSDP"].sends > 1.2 * rows[16, "FSDP"].sends
    assert rows[256, "HSDP"].sends < 1.1 * rows[16, "HSDP"].sends


def test_a_group_that_is_no_dimension_of_the_mesh_is_not_counted_silently():
    seen = simulate.Calls.__new__(simulate.Calls)
    simulate.Collectives.__init__(seen)
    seen.dims, seen.calls = {"known": 1}, []
    operation = torch.ops._c10d_functional.all_reduce.default
    seen.note(operation, (torch.zeros(3), "sum", "known"), torch.zeros(3))
    assert seen.calls == [Call("all_reduce", 12, 1)]
    with pytest.raises(KeyError):
        seen.note(operation, (torch.zeros(3), "sum", "other"), torch.zeros(3))


# ---- the command ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "flags, says",
    [
        ("--ranks 12", "--ranks 12"),
        ("--width 100", "--width 100"),
        ("--ranks 0", "--ranks"),
        ("--plot no/such/folder/plot.png", "--plot"),
    ],
)
def test_bad_input_is_reported_in_one_line(flags, says):
    done = harness.run(f"{COMMAND} {flags}", code=2, forks=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("simulate.py: error: ") and says in line
    assert done.stdout == ""


def test_the_command_prints_its_rows_and_draws_them(tmp_path):
    flags = "--ranks 2 8 --per-machine 2 --width 128 --depth 1 --context 8"
    done = harness.run(f"{COMMAND} {flags} --plot {tmp_path}/plot.png")
    assert len(done.stdout.splitlines()) == 1 + 2 * len(KINDS)
    assert "Warning" not in done.stderr
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.text["Description"] == done.stdout.strip("\n")


# ---- the page ------------------------------------------------------------------------
def shown():
    """Return the lines that the page shows of the command."""
    (block,) = re.findall(rf"^```\n\$ {COMMAND}\n(.*?)^```$", PAGE, re.M | re.S)
    return block.splitlines()


def test_the_page_and_its_plot_show_the_same_numbers():
    with Image.open(PLOT) as plot:
        stored = plot.text["Description"].splitlines()
    rows = shown()
    assert len(rows) == 1 + 2 * len(KINDS)
    assert [line for line in stored if line in rows] == rows


def test_the_numbers_in_the_text_are_those_of_the_table():
    """Each number with a unit, and each large one, below the table."""
    text = PAGE.split(f"$ {COMMAND}\n")[1].split("```", 2)[1]
    rows = 3 * 512  # of qkv, with the width of another command
    padded = 1024 * math.ceil(rows / 1024)
    table = " ".join([*shown(), f"126.0 MB 31.5 MB {rows:,} {padded:,}"])
    numbers = re.findall(r"\d[\d,.]* MB|\d+,\d{3}", text)
    assert len(numbers) >= 10
    for number in numbers:
        assert re.search(rf"(?<![\d,.]){re.escape(number)}", table), number


@pytest.mark.release
def test_the_command_prints_what_the_page_shows():
    assert harness.run(COMMAND).stdout.splitlines() == shown()


@pytest.mark.release
def test_the_padded_bytes_are_those_on_the_page():
    done = harness.run(f"{COMMAND} --ranks 1024 --width 512")
    (row,) = [line for line in done.stdout.splitlines() if "  FSDP" in line]
    assert row.split()[4:6] == ["126.0", "MB"]
    assert "126.0 MB" in PAGE
    assert round(weights(Shape(width=512)) / 1e6, 1) == 31.5


def test_the_picture_is_drawn_by_its_program():
    with Image.open(splits.PICTURE) as stored:
        stale = stored.text["Description"] != splits.description()
    assert not stale, "stale: type `python -m tools.splits`"
