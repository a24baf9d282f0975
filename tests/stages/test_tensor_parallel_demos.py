"""14_tensor_parallel: the lines that its notebooks offer to paste do what they say.

Those of the three notebooks' first cells train as one process does. The mistakes assert
what they show, and the notebook runs them.
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

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with

pytestmark = pytest.mark.ci

FOLDER = ROOT / first_with("tensor_parallel")


def be_a_rank(rank, folder, function, groups):
    """Be one of the ranks of some tp groups of two; call a function of the mesh."""
    sys.path.insert(0, str(FOLDER / "demos"))
    store = dist.FileStore(str(folder / "store"), 2 * groups)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * groups)
    mesh = dist.init_device_mesh("cpu", (groups, 2), mesh_dim_names=("dp", "tp"))
    function(mesh)
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()


def call_in_tp_groups(function, folder, groups=1):
    arguments = [(rank, folder, function, groups) for rank in range(2 * groups)]
    commands.call_in_forks(be_a_rank, arguments)


# ---- lines to paste ------------------------------------------------------------------
def lines_of(notebook):
    """Return the Python lines of a notebook's first cell, as they are pasted."""
    first = nbformat.read(FOLDER / notebook, as_version=4).cells[0].source
    (indent, code), *_ = re.findall(r"^( *)```python\n(.*?)^ *```", first, re.M | re.S)
    return re.sub(f"^{indent}", "", code, flags=re.MULTILINE)


def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def paste(mesh):
    from mistakes import get_batch
    from mistakes import get_group_batch
    from mistakes import make

    one, names = make(), {"model": make(), "loss_fn": mean_loss, "torch": torch}
    exec(lines_of("14_tensor_parallel.ipynb").replace('"cuda"', '"cpu"'), names)
    names["inputs"], names["targets"] = get_group_batch(mesh)
    exec(lines_of("what_goes_wrong.ipynb"), names)
    inputs, targets = get_batch()
    loss = mean_loss(one(inputs), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(one.parameters(), 1.0)
    found = names["loss"] / mesh["dp"].size()
    assert math.isclose(found, loss, rel_tol=1e-12)
    assert math.isclose(names["norm"], norm, rel_tol=1e-12)
    parameters = names["model"].parameters()
    clipped = nn.utils.clip_grad_norm_(parameters, 1.0).full_tensor()
    assert math.isclose(clipped, norm, rel_tol=1e-12)


def test_the_first_lines_give_the_gradient_of_one_process(tmp_path):
    """Those of the stage, and those that compare; clipping knows the norm, too."""
    call_in_tp_groups(paste, tmp_path, groups=2)


def paste_a_pipeline(_):
    import mistakes
    import pipeline

    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, batches = mistakes.make(), [mistakes.get_batch()] * 3
    names = {"loader": batches, "loss_fn": pipeline.loss_fn}
    names |= {"part": pipeline.Part(mistakes.make(), rank, ranks)}
    names |= {"device": torch.device("cpu")}
    lines = lines_of("pipeline_parallel.ipynb")
    exec(lines.replace("n_microbatches=8", "n_microbatches=4"), names)
    optimizer = torch.optim.AdamW(one.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        mean_loss(one(inputs), targets).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        optimizer.step()
    expected = dict(one.named_parameters())
    for name, weight in names["part"].named_parameters():
        assert (weight - expected[name]).abs().max() < 1e-10


def test_the_first_lines_of_the_pipeline_train_as_one_process(tmp_path):
    call_in_tp_groups(paste_a_pipeline, tmp_path)
