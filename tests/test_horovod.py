"""Horovod trains as stage 03 does, to the same weights; `make horovod` runs this."""

import os
import shutil

import pytest
from torch.utils.data import DistributedSampler

from nbtools import harness
from tests.neighbors_harness import FLAGS
from tests.neighbors_harness import Neighbor
from tests.neighbors_harness import assert_trains_as_stage_03
from tests.neighbors_harness import assert_trains_other_weights
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


def train(horovod, folder, script=None, code=0):
    """Train by the command that the program shows; return its Done.

    script: another one in the program's place; code: the exit code that it should have.
    """
    shown = f"horovodrun -np 2 --gloo python {horovod.script}"
    program, *options, script_shown = horovod.command(shown)
    programs = horovod.environment / "bin"
    words = [programs / program, *options, script or ROOT / script_shown]
    words += [*FLAGS, "--out-dir", folder / "out"]
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": folder}
    return harness.run(words, folder, code, **variables)


def test_horovod_trains_to_the_weights_of_stage_03(
    horovod, trained, tmp_path, record_property
):
    record_property("tested with", horovod.version("horovod"))
    done = train(horovod, tmp_path)
    assert_trains_as_stage_03(done, tmp_path, trained, prefix="[0]<stdout>:")


@pytest.mark.parametrize("change", [STEP_WITHOUT_GRADIENTS, NO_AVERAGE])
def test_a_changed_line_gives_other_weights(horovod, trained, tmp_path, change):
    train(horovod, tmp_path, horovod.changed(tmp_path / "project", change))
    assert_trains_other_weights(tmp_path, trained)


def test_a_sampler_that_is_not_told_asks_for_a_process_group():
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        DistributedSampler(range(4))


def test_horovod_refuses_channels_last(horovod, tmp_path):
    script = horovod.changed(tmp_path / "project", CHANNELS_LAST)
    done = train(horovod, tmp_path, script, code=1)
    assert "ValueError: Tensor is required to be contiguous." in done.stderr


def test_without_a_compiler_there_is_one_line(tmp_path):
    """tools/neighbor_env.sh says what is missing, and touches nothing."""
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script = ROOT / "tools/neighbor_env.sh"
    done = harness.run([script, "horovod", "python"], tmp_path, 2, PATH=tmp_path)
    (line,) = done.stderr.splitlines()
    assert "g++ is missing" in line
