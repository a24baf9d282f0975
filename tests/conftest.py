"""The option --device, and runs that several tests look at."""

import os
import re
from types import SimpleNamespace

# One thread per process, here and in all that is started from here: tests run side by side, and
# threads that spin while they wait for others on the same cores make a step ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.harness import train
from tools.stages import takes_processes

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where stages train")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs notebooks; `make check` leaves these out")
    config.addinivalue_line("markers", "fault(...): a row of docs/faults.md, see tools/fault_table.py")
    config.addinivalue_line("markers", "long: takes half an hour; only `make exits` runs it")
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: no GPU is visible here")


def counts(device):
    """Return the numbers of processes to try: 1 to 4, or as far as there are GPUs."""
    return range(1, min(4, torch.cuda.device_count() if device == "cuda" else 4) + 1)


def pytest_generate_tests(metafunc):
    if "processes" in metafunc.fixturenames and "launched" in metafunc.fixturenames:
        from tools.stages import stages

        device = metafunc.config.getoption("--device")
        pairs = [(s, n) for s in stages() if takes_processes(s) for n in counts(device)]
        metafunc.parametrize("launched, processes", pairs)


@pytest.fixture
def fault(request):
    """Return what the test's mark `fault` says, for the test to hold the run to it.

    Besides the mark's own arguments: `assert_seen(screen)` asserts that the screen shows what it
    has `in this type`, where `...` stands for anything.
    """
    said = SimpleNamespace(**request.node.get_closest_marker("fault").kwargs)

    def assert_seen(screen):
        literals = re.findall("`([^`]+)`", said.sees)
        assert literals
        for literal in literals:
            pattern = ".*".join(map(re.escape, literal.split("...")))
            assert re.search(pattern, screen, re.IGNORECASE), f"{literal}\n{screen}"

    said.assert_seen = assert_seen
    return said


@pytest.fixture(scope="session")
def device(request):
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def several(device):
    """The number of processes of a test that wants more than one, where there are the GPUs."""
    return min(2, counts(device)[-1])


@pytest.fixture(scope="session")
def trained(device, tmp_path_factory):
    """Return a function that trains a stage, once per session for the same arguments.

    how: `train`, by the stage's own command, or `train_in_forks`.
    """
    done = {}

    def get(stage, processes=1, *flags, how=train):
        key = (stage, processes, flags, how)
        if key not in done:
            folder = tmp_path_factory.mktemp(f"{stage}-{processes}-")
            done[key] = how(stage, processes, [*flags, "--device", device], folder)
        return done[key]

    return get
