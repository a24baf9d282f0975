"""Serves pytest: its options, the order of the tests, fixtures of several files."""

import collections
import os
import re
import shutil
from types import SimpleNamespace

# One thread per process, here and in all that is started from here: tests run side by
# side, and threads that spin while they wait for a core make a step ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"
# Otherwise asking whether there is a GPU initializes CUDA, and then no fork can use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pytest
import torch
from torch import distributed as dist
from xdist.scheduler import LoadFileScheduling

from harness.stages import ROOT
from harness.stages import known_files
from tests.training import counts
from tests.training import train

RUNS_NOTEBOOK = re.compile(r"notebook_runs_\w+\[(\S+\.ipynb)\]")


def only_in_ci(*values, unless=False):
    """Return a case of a parametrized test that only --all runs, or every run."""
    return pytest.param(*values, marks=() if unless else pytest.mark.ci)


def only_in_release(*values, unless=False):
    """Return a case of a parametrized test that only --release runs, or every run."""
    return pytest.param(*values, marks=() if unless else pytest.mark.release)


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu")
    parser.addoption("--ranks-per-gpu", help="how many ranks share a GPU, with nccl")
    parser.addoption("--all", action="store_true", help="run the tests marked ci, too")
    parser.addoption(
        "--release", action="store_true", help="in addition, those marked release"
    )


def pytest_configure(config):
    for line in (
        "slow: notebooks, and what takes long or waits; `make check` leaves these out",
        "fault(...): a row of docs/faults.md, see tools/fault_table.py",
        "ci: not about a stage itself, or takes long; --all runs it, as CI does",
        "release: one of many more cases of a claim, or of what others change; "
        "only --release runs it",
    ):
        config.addinivalue_line("markers", line)
    config.option.loadscopereorder = False  # the order below is better
    if config.getoption("--ranks-per-gpu"):  # for harness/commands.py
        os.environ["RANKS_PER_GPU"] = config.getoption("--ranks-per-gpu")
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: no GPU is visible here")


def starts_slurm(notebook):
    """Return whether a notebook starts a Slurm cluster."""
    return "cluster.start(" in (ROOT / notebook).read_text()


def uses_slurm(item):
    """Return whether a test starts a Slurm cluster, and so often waits."""
    if notebook := RUNS_NOTEBOOK.search(item.nodeid):
        return starts_slurm(notebook[1])
    return item.path.name == "test_slurm.py"


def pytest_collection_modifyitems(config, items):
    """Put the tests in order, and leave out those that are not asked for.

    Files and notebooks that take long come first, so that no worker is left alone with
    one of them: what uses Slurm, then what is marked `slow`, then files by their tests.
    """
    sizes = collections.Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item):
        is_slow = item.path in slow and item.path.name != "test_notebooks.py"
        is_slow |= RUNS_NOTEBOOK.search(item.nodeid) is not None
        return not uses_slurm(item), not is_slow, -sizes[item.path], item.path

    items.sort(key=place)
    marks = ["ci", "release"]
    if config.getoption("--all"):
        marks.remove("ci")
    if config.getoption("--release"):
        marks.clear()
    left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])


class Scheduling(LoadFileScheduling):
    """One worker runs all tests of a file, which share what the fixtures trained.

    Notebooks share nothing, and together take longer than any file: each is scheduled
    by itself, except that those which start the same Slurm cluster go to one worker.
    """

    def _split_scope(self, nodeid):
        notebook = RUNS_NOTEBOOK.search(nodeid)
        if notebook is None:
            return super()._split_scope(nodeid)
        if starts_slurm(notebook[1]):
            return "notebooks with Slurm"
        return nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute the tests over the workers of `pytest -n`."""
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.line(f"{name} {value}")


@pytest.fixture
def fault(request):
    """Return what the test's mark `fault` says, so that the test can assert it.

    In addition to the mark's arguments: `assert_seen(screen)` asserts that the screen
    shows what `sees` has `in this type`, where `...` stands for anything.
    """
    row = SimpleNamespace(**request.node.get_closest_marker("fault").kwargs)

    def assert_seen(screen):
        literals = re.findall("`([^`]+)`", row.sees)
        assert literals
        for literal in literals:
            pattern = ".*".join(map(re.escape, literal.split("...")))
            assert re.search(pattern, screen, re.IGNORECASE), f"{literal}\n{screen}"

    row.assert_seen = assert_seen
    return row


@pytest.fixture
def clean_copy(tmp_path):
    """A folder with a copy of the files that git tracks or would add."""
    copy = tmp_path / "copy"
    for path in known_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    return copy


@pytest.fixture(scope="session")
def device(request):
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def several(device):
    """The number of processes of a test that wants more than one, if GPUs allow it."""
    return min(2, counts(device)[-1])


@pytest.fixture
def two(several):
    """Two processes; without a second GPU the test is skipped."""
    if several < 2:
        pytest.skip("a second process needs a second GPU")
    return several


@pytest.fixture
def group():
    """A process group that consists of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def trained(device, tmp_path_factory):
    """Return a function that trains a stage, once per session for the same arguments.

    how: `train`, by the stage's own command, `train_in_forks`, or one like them.
    """
    done = {}

    def get(stage, processes=1, *flags, how=train):
        key = (stage, processes, flags, how)
        if key not in done:
            folder = tmp_path_factory.mktemp(f"{stage}-{processes}-")
            done[key] = how(stage, processes, [*flags, "--device", device], folder)
        return done[key]

    return get
