"""14_tensor_parallel/pipeline_parallel: a pipeline trains as one process does.

With each schedule, and after a resume on other processes; its mistakes do not. The
program compares itself with one process, and fails if a weight or a loss differs.
"""

import re
import sys

import pytest
import torch

from common import text
from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release

(PROGRAM,) = ROOT.glob("*/demos/pipeline.py")

sys.path.insert(0, str(PROGRAM.parent))

import pipeline

pytestmark = pytest.mark.ci


def run(processes, *flags, program="pipeline.py", **options):
    """Run a demo in forks; return its Done."""
    command = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    command += [PROGRAM.parent / program, *flags]
    return commands.run(command, forks=True, **options)


def differences(done):
    """Return how far weights and losses are from one process's, as printed."""
    pattern = r"^largest difference .* weights (\S+), losses (\S+)$"
    return [float(n) for n in re.search(pattern, done.stdout, re.MULTILINE).groups()]


@pytest.fixture(scope="module")
def alone():
    """The model that one process trains in four steps, and the loss of each."""
    args = pipeline.parse_args(["--steps", "4", "--dtype", "float64"])
    windows, _ = text.load(None, context_length=32)
    return pipeline.train_alone(args, windows, torch.device("cpu"))


@pytest.mark.parametrize(
    "schedule, processes, micro_batches",
    [("gpipe", 2, 4), ("1f1b", 4, 6), only_in_release("gpipe", 3, 2)],
)
def test_it_trains_as_one_process_does(schedule, processes, micro_batches, alone):
    """And the processes have as many micro-batches in flight as the notebook says."""
    flags = ["--schedule", schedule, "--micro-batches", micro_batches, "--steps", 4]
    done = run(processes, *flags, "--dtype", "float64")
    assert max(differences(done)) <= pipeline.TOLERANCE
    expected = [f"step {n}: loss {loss:.4f}" for n, loss in enumerate(alone[1], 1)]
    assert re.findall("^step .*", done.stdout, re.MULTILINE) == expected
    assert alone[1][-1] < alone[1][0] - 0.3  # otherwise nothing was trained
    found = re.findall(r"rank (\d): .*; (.*); at most (\d) in flight", done.stdout)
    assert len(found) == processes
    for rank, passes, most in found:
        left = micro_batches if schedule == "gpipe" else processes - int(rank)
        assert int(most) == left
        names = [f"{kind}{n}" for kind in "FB" for n in range(micro_batches)]
        assert sorted(passes.split()) == sorted(names)


MISTAKES = [
    only_in_release(name, unless=name == "own-norm")
    for name in pipeline.MISTAKES
    if name != "lists"  # which shows after a resume, as the notebook does
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_training_with_a_mistake_fails(mistake):
    flags = ["--steps", 2, "--dtype", "float64", "--mistake", mistake]
    assert differences(run(2, *flags, code=1))[0] > 1e-4


@pytest.mark.usefixtures("group")
def test_other_processes_resume_what_two_have_saved(tmp_path, alone):
    """Four do, and one process loads all of it into the whole model."""
    saved, double = tmp_path / "saved", ["--dtype", "float64"]
    run(2, "--steps", 4, *double, "--save", saved)
    done = run(4, "--load", saved, "--schedule", "gpipe", *double, "--steps", 6)
    assert re.findall(r"^step (\d)", done.stdout, re.MULTILINE) == ["5", "6"]
    assert max(differences(done)) <= pipeline.TOLERANCE
    model = pipeline.make_model(pipeline.parse_args(double))
    optimizer = pipeline.make_optimizer(model)
    assert pipeline.load(saved, model, optimizer) == 4
    for name, weight in alone[0].state_dict().items():
        found = model.state_dict()[name]
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-10)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_pipelines_with_fsdp_train_as_one_process_does():
    """The program asserts that the weights are those of one process."""
    lines = run(4, program="pipeline_grid.py").stdout.splitlines()
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank, (line, (pp, dp)) in enumerate(zip(lines, places, strict=True)):
        share = re.fullmatch(rf"rank {rank}: pp {pp}, dp {dp}, (\S+)% of .*", line)[1]
        assert float(share) == pytest.approx(25, abs=1)
