"""Horovod trains as stage 03 does, to the same weights; `make horovod` runs this."""

import os
import shutil

import pytest
from torch.utils.data import DistributedSampler

from tests import harness
from tests.neighbors_harness import DOUBLE
from tests.neighbors_harness import Neighbor
from tests.neighbors_harness import assert_as_stage_03
from tests.neighbors_harness import difference_from_stage_03
from tools.stages import ROOT

STEP_WITHOUT_GRADIENTS = (
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
    "    hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
)
NO_AVERAGE = (
    "    optimizer = hvd.DistributedOptimizer(\n"
    "        optimizer, named_parameters=model.named_parameters()\n"
    "    )\n",
    "",
)
CHANNELS_LAST = (
    "model.to(args.device, args.dtype)",
    "model.to(args.device, args.dtype, memory_format=args.memory_format)",
)


@pytest.fixture(scope="module")
def horovod():
    return Neighbor("horovod")


def train(horovod, folder, script):
    """Train by the command that the program shows; return `run`'s result."""
    text = (ROOT / horovod.script).read_text()
    command = f"horovodrun -np 2 --gloo python {horovod.script}"
    assert f"\n$ {command}\n" in text
    arguments = [*command.split()[:-1], script, *DOUBLE, "--out-dir", folder / "out"]
    arguments[0] = horovod.environment / "bin" / arguments[0]
    path = f"{horovod.environment / 'bin'}:{os.environ['PATH']}"
    return harness.run(arguments, folder, PATH=path, TMPDIR=str(folder))


def test_horovod_trains_to_the_weights_of_stage_03(horovod, trained, tmp_path, capsys):
    done = train(horovod, tmp_path, ROOT / horovod.script)
    shared = (horovod, "horovod", done, trained, tmp_path, capsys)
    assert_as_stage_03(*shared, prefix="[0]<stdout>:")


@pytest.mark.parametrize("change", [STEP_WITHOUT_GRADIENTS, NO_AVERAGE])
def test_a_changed_line_gives_other_weights(horovod, trained, tmp_path, change):
    done = train(horovod, tmp_path, horovod.changed(tmp_path / "project", change))
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference_from_stage_03(trained, tmp_path / "out/last.pt") > 1e-6


def test_a_sampler_that_is_not_told_asks_for_a_process_group():
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        DistributedSampler(range(4))


def test_horovod_refuses_channels_last(horovod, tmp_path):
    script = horovod.changed(tmp_path / "project", CHANNELS_LAST)
    done = train(horovod, tmp_path, script)
    assert done.returncode == 1
    assert "ValueError: Tensor is required to be contiguous." in done.stderr


def test_without_a_compiler_there_is_one_line(tmp_path):
    """tools/neighbor_env.sh says what is missing, and touches nothing."""
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script = ROOT / "tools/neighbor_env.sh"
    done = harness.run([script, "horovod", "python"], tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "g++ is missing" in line
