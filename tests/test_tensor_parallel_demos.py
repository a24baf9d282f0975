"""14_tensor_parallel/tensor_parallel_mistakes.ipynb: its plan, check and exercises.

What the mistakes print is asserted in the cells that run them.
"""

import gc
import math
import re
import sys

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import parallelize_module

from nbtools import harness
from tools.stages import ROOT
from tools.stages import first_with

pytestmark = pytest.mark.ci

FOLDER = ROOT / first_with("tensor_parallel")
NOTEBOOK = FOLDER / "tensor_parallel_mistakes.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells
MARKDOWN = "\n".join(each.source for each in CELLS if each.cell_type == "markdown")
PROGRAM = FOLDER / "demos/mistakes.py"


def import_demo(monkeypatch):
    """Have `import mistakes` find this stage's demo, and not another stage's."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    monkeypatch.delitem(sys.modules, "mistakes", raising=False)


# ---- what the mistakes share ---------------------------------------------------------
def be_a_rank(rank, folder, function, groups):
    """Be one of the ranks of some tp groups of two; call a function of the mesh."""
    sys.path[:0] = [str(FOLDER), str(PROGRAM.parent)]
    store = dist.FileStore(str(folder / "store"), 2 * groups)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * groups)
    mesh = dist.init_device_mesh("cpu", (groups, 2), mesh_dim_names=("dp", "tp"))
    function(mesh)
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()


def call_in_tp_groups(function, folder, groups=1):
    arguments = [(rank, folder, function, groups) for rank in range(2 * groups)]
    harness.call_in_forks(be_a_rank, arguments)


def compare_with_the_stage(mesh):
    import mistakes
    import train

    ours, stage = mistakes.make(), mistakes.make()
    mistakes.split(ours, mesh)
    train.split_layers(stage, mesh["tp"])
    expected = dict(stage.named_parameters())
    for name, weight in ours.named_parameters():
        assert weight.placements == expected[name].placements
    (outputs,) = {type(model(torch.ones(1, 4).long())) for model in (ours, stage)}
    assert outputs is torch.Tensor


def test_the_plan_is_the_stages(tmp_path):
    call_in_tp_groups(compare_with_the_stage, tmp_path)


def move_copies_apart(mesh):
    from mistakes import copies_that_differ
    from mistakes import make
    from mistakes import shard
    from mistakes import split

    model = shard(split(make(), mesh), mesh)
    assert copies_that_differ(model, mesh) == {}
    short = make()
    assert copies_that_differ(short, mesh) == {}
    rank = mesh["tp"].get_local_rank()
    with torch.no_grad():
        for each in (model, short):
            weight = each.norm.bias
            weight = weight.to_local() if isinstance(weight, DTensor) else weight
            weight[3] += 0.5 * rank
        model.head.weight.to_local().add_(rank)  # not a copy: it is split
    assert copies_that_differ(model, mesh) == {"norm.bias": 0.5}
    assert copies_that_differ(short, mesh) == {"norm.bias": 0.5}


def test_copies_that_differ_are_found(tmp_path):
    """Those of weights on the mesh, and of plain ones; what is split has no copies."""
    call_in_tp_groups(move_copies_apart, tmp_path)


def copied_function():
    """Return `copies_that_differ`, made from what the notebook shows of it alone."""
    (imports,) = re.findall(r"```python\n(import torch\n.*?)```", MARKDOWN, re.DOTALL)
    _, _, code = PROGRAM.read_text().partition("def copies_that_differ(")
    code = "def copies_that_differ(" + code.partition("\n\n\n")[0]
    found = {}
    exec(imports + code, found)
    return found["copies_that_differ"]


def use_the_copied_function(mesh):
    from mistakes import make
    from mistakes import split

    model, copied = split(make(), mesh), copied_function()
    assert copied(model, mesh) == {}
    with torch.no_grad():
        model.norm.bias.to_local().add_(mesh["tp"].get_local_rank())
    assert copied(model, mesh) == {"norm.bias": 1}


def test_the_function_runs_when_it_is_copied(tmp_path):
    """With the imports that the notebook names, and nothing else of the demo."""
    call_in_tp_groups(use_the_copied_function, tmp_path)


def train_with_foreach(mesh, foreach):
    import mistakes

    plan = mistakes.make_short_plan()
    model = parallelize_module(mistakes.make(), mesh["tp"], plan)
    mistakes.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=foreach)
    for step in range(2):
        optimizer.zero_grad()
        batch = mistakes.get_group_batch(mesh, step)
        mistakes.get_loss(model, batch).backward()
        optimizer.step()
    return model


def compare_foreach_with_the_loop(mesh):
    models = [train_with_foreach(mesh, foreach) for foreach in (False, True)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.to_local().equal(other.to_local())


@pytest.mark.release
def test_foreach_takes_weights_of_two_meshes(tmp_path):
    call_in_tp_groups(compare_foreach_with_the_loop, tmp_path, groups=2)


def spoil_one_copy(mesh):
    from mistakes import copies_that_differ

    norm = nn.LayerNorm(4)
    norm.weight.data[2] = math.nan if mesh["tp"].get_local_rank() == 1 else 1
    found = copies_that_differ(norm, mesh)
    assert found.keys() == {"weight"} and math.isnan(found["weight"])


def test_a_copy_that_is_nan_is_found(tmp_path):
    call_in_tp_groups(spoil_one_copy, tmp_path)


def have_an_empty_shard(mesh):
    from mistakes import copies_that_differ

    norm = nn.LayerNorm(1)
    distribute_module(norm, mesh["tp"])
    fully_shard(norm, mesh=mesh["dp"])
    rows = 1 - mesh["dp"].get_local_rank()  # one for two ranks
    assert len(norm.weight.to_local()) == rows
    assert copies_that_differ(norm, mesh) == {}
    with torch.no_grad():
        norm.weight.to_local().add_(mesh["tp"].get_local_rank())
    assert copies_that_differ(norm, mesh) == ({"weight": 1} if rows else {})


def test_a_rank_may_have_nothing_of_a_copy(tmp_path):
    """Of a weight with fewer rows than a dp group has ranks."""
    call_in_tp_groups(have_an_empty_shard, tmp_path, groups=2)


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "words, reason",
    [
        ("torchrun --standalone --nproc-per-node=2 {}", "name some of the mistakes: "),
        ("torchrun --standalone --nproc-per-node=2 {} no", "name some of the mistakes"),
        (
            "torchrun --standalone --nproc-per-node=2 {} mesh",
            "mesh needs --nproc-per-node=4",
        ),
        ("python {} mesh", "RANK is not set; a launcher sets it: start with torchrun"),
    ],
)
def test_bad_input_is_one_line(words, reason):
    done = harness.run(words.format(PROGRAM).split(), code=2, forks=True)
    for rank in done.ranks or [done]:
        (line,) = rank.stderr.splitlines()
        assert line.startswith("mistakes.py: error: ") and reason in line
    assert not done.stdout


# ---- the exercises -------------------------------------------------------------------
def tagged(tag):
    return [cell.source for cell in CELLS if cell.metadata.get("tags") == [tag]]


def solutions():
    """Return the solutions of this notebook's exercises, which others may follow."""
    source = (FOLDER / "solutions.py").read_text()
    banner = rf"^# -+ {NOTEBOOK.name}, exercise \d+ -+\n"
    _, *parts = re.split(banner, source, flags=re.MULTILINE)
    return [part.partition("\n# ----")[0] for part in parts]


def said(answer, check, capsys, monkeypatch):
    """Return the last line that a check prints after an answer."""
    import_demo(monkeypatch)
    monkeypatch.setattr("nbtools.lesson.FORKS", "all")
    setup = next(cell.source for cell in CELLS if cell.cell_type == "code")
    setup = setup.partition("\nshow(")[0]
    exec("\n".join([setup, answer, check]), {})
    return capsys.readouterr().out.splitlines()[-1]


def test_the_solutions_are_linked():
    assert "](solutions.py)" in NOTEBOOK.read_text()
    assert len(solutions()) == len(tagged("exercise")) == len(tagged("check")) == 2


@pytest.mark.parametrize("n", range(2))
def test_an_exercise_is_solved_by_its_solution_only(n, capsys, monkeypatch):
    check = tagged("check")[n]
    unsolved = said(tagged("exercise")[n], check, capsys, monkeypatch)
    assert re.match(r"Not solved yet: (?!\w+(Error|:)).{10,}", unsolved)
    assert said(solutions()[n], check, capsys, monkeypatch) == "Solved."


BACK_TO_THIRDS = """
def mistakes_rows_by_head(tensor, heads):
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
"""
BACKWARD = """
def mistakes_rows_by_head(tensor, heads):
    return tensor.flip(0)
"""
KEYS_FIRST = """
def mistakes_rows_by_head(tensor, heads):
    thirds = tensor.unflatten(0, (3, heads, -1))[[0, 2, 1]]
    return thirds.transpose(0, 1).flatten(0, 2)
"""
HALF = """
def mistakes_rows_by_head(tensor, heads):
    return tensor[: len(tensor) // 2]
"""


@pytest.mark.parametrize(
    "n, answer, reason",
    [
        (0, "mistakes_norm = 4.6041", "4.6041 is the norm in groups of two"),
        (0, "mistakes_norm = 3.4903", "those of the copies once for each rank"),
        (1, HALF, "of 12 rows, it returns"),
        (1, BACKWARD, "rows 0 and 1 are queries of head 0"),
        (1, BACK_TO_THIRDS, "the logits of the two models differ by"),
        (1, KEYS_FIRST, "the logits of the two models differ by"),
    ],
)
def test_a_wrong_answer_is_told_why(n, answer, reason, capsys, monkeypatch):
    assert reason in said(answer, tagged("check")[n], capsys, monkeypatch)
