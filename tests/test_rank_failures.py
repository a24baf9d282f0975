"""A rank that falls, is killed or hangs, and a launcher that is stopped: all end, and soon."""

import contextlib
import os
import re
import signal
import socket
import time

from nbtools.lesson import sections
from tests.harness import ROOT
from tests.harness import changed
from tests.harness import family
from tests.harness import started
from tools.stages import command
from tools.stages import launcher
from tools.stages import stages
from tools.stages import takes_processes

import psutil
import pytest


def launches():
    """Return the first stage of each way in which processes start and end.

    What a fault does is decided by the launcher and by what follows `run`. A stage that has both
    from an earlier one, but for comments, ends as that one does.
    """
    first = {}
    for stage in ALL:
        script = re.sub("  # .*", "", "\n".join(sections(stage)["6. the run"]))
        first.setdefault((launcher(stage), script[script.index("\ndef main") :]), stage)
    return list(first.values())


ALL = [stage for stage in stages() if takes_processes(stage)]
LAUNCHED = launches()
LAUNCHERS = [  # the first stage of each
    next(stage for stage in ALL if launcher(stage) == program) for program in ("torchrun", "python")
]
ENDLESS = ["--epochs", "100000"]
GRACE = 30 + 90  # torchrun gives its ranks 30 seconds to end before it kills them


@pytest.fixture(autouse=True)
def two_processes(several):
    if several < 2:
        pytest.skip("a second process needs a second GPU")


def alive(members):
    """Return those of the processes that still run; a zombie does not."""
    running = []
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def ports(members):
    """Return the TCP ports on which the processes listen."""
    found = set()
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {
                connection.laddr.port
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return found


def answers(port):
    """Return whether somebody on this machine takes connections at a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def assert_gone(members, listening, seconds):
    """Wait until the processes have ended and nobody answers at their ports.

    A process whose first thread has ended counts as a zombie, but its other threads may still hold
    a port for a moment.
    """
    end = time.monotonic() + seconds
    while alive(members) or any(map(answers, listening)):
        assert time.monotonic() < end, [process.cmdline() for process in alive(members)]
        time.sleep(0.05)


def ranks(child):
    """Return the processes of the ranks, rank 0 first, and none of the helpers of an import."""
    found = []
    for process in child.members[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as such, too
            if re.search("train.py|spawn_main", " ".join(process.cmdline())):
                found.append(process)
    return found


@pytest.fixture
def training(tmp_path, device):
    """Return a function that starts a stage on two processes and waits until it trains."""
    with contextlib.ExitStack() as stack:

        def start(stage, *flags, root=ROOT, folder=tmp_path):
            folder.mkdir(exist_ok=True)
            arguments = [*command(stage, 2, root), *ENDLESS, "--device", device, *flags]
            child = stack.enter_context(started(arguments, folder))
            child.wait_for("epoch 2: ")
            assert len(ranks(child)) == 2
            return child

        yield start


@pytest.mark.fault(
    stages="03 to 09",
    what="a rank raises an error",
    sees="the traceback of that rank, ending in `RuntimeError: rank 1 fell`; exit code 1",
    seconds=30,
    lost="the run; with stage 09 the steps since the last checkpoint",
)
@pytest.mark.parametrize("stage", LAUNCHERS)
def test_a_rank_that_raises_takes_the_run_down(stage, training, tmp_path, fault):
    old = "    dist.all_reduce(meter.sums)  # [03]"
    new = '    if epoch == 3 and dist.get_rank() == 1:\n        raise RuntimeError("rank 1 fell")\n'
    root = changed(stage, tmp_path / "copy", (old, new + old))
    child = training(stage, root=root)
    assert child.wait(fault.seconds) == 1
    fault.assert_seen(child.screen())
    assert re.search(r"in train_one_epoch\n", child.screen())
    assert_gone(child.members, [], 10)


@pytest.mark.fault(
    stages="03 to 09",
    what="a rank is killed, for want of memory for instance",
    sees="which rank it was, and `SIGKILL`; the others' connections break; exit code 1",
    seconds=30,
    lost="the run; with stage 09 the steps since the last checkpoint",
)
@pytest.mark.parametrize("stage", LAUNCHERS)
def test_a_rank_that_is_killed_takes_the_run_down(stage, training, fault):
    child = training(stage)
    ranks(child)[1].kill()
    assert child.wait(fault.seconds) == 1
    fault.assert_seen(child.screen())
    assert_gone(child.members, [], 10)


@pytest.mark.fault(
    stages="03 to 09",
    what="a rank hangs, here with `--timeout 5` seconds (300 by default)",
    sees="after the timeout a traceback of the others with `timed out`; torchrun gives the one"
    " that hangs another 30 s",
    seconds=60,
    lost="the run; with stage 09 the steps since the last checkpoint",
)
def test_a_rank_that_hangs_is_noticed_after_the_timeout(training, tmp_path, fault):
    """Both launchers at once: most of the time goes by in waiting for torchrun's grace to end."""
    children = []
    for stage in LAUNCHERS:
        children.append(training(stage, "--timeout", "5", folder=tmp_path / stage))
        ranks(children[-1])[1].suspend()
    for child in children:
        assert child.wait(fault.seconds) == 1
        fault.assert_seen(child.screen())
        assert_gone(child.members, [], 10)


def test_the_launches_are_torchrun_and_spawn_and_the_stage_that_notes_signals():
    assert LAUNCHERS == ["03_ddp_launch", "04_ddp_spawn"]
    assert [*LAUNCHERS, "10_preemption"] == LAUNCHED
    for stage in ALL:  # otherwise a launcher that is killed leaves its processes
        assert "\n    attached.die_with_parent()" in "\n".join(sections(stage)["2. processes"])


@pytest.mark.fault(
    stages="03 to 09",
    what="the launcher is stopped: Ctrl-C, SIGTERM, or SIGKILL, which it cannot hand on",
    sees="no process and no port of the run is left; the exit code is not 0",
    seconds=60,
    lost="the run; with stage 09 nothing after SIGTERM, else the steps since the last checkpoint",
)
@pytest.mark.parametrize("stage, stop", [
    *((stage, stop) for stage in LAUNCHERS for stop in (signal.SIGTERM, signal.SIGKILL)),
    *((stage, signal.SIGINT) for stage in LAUNCHED),  # the others in tests/test_fault_tolerance.py
])  # fmt: skip
def test_a_launcher_that_is_stopped_leaves_nothing(
    stage, stop, training, tmp_path, monkeypatch, fault
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    child = training(stage)
    assert bool(list(temporary.glob("*/rendezvous"))) == (stage == "04_ddp_spawn")
    listening = ports(child.members)
    os.kill(child.pid, stop)
    assert child.wait(fault.seconds) != 0
    assert_gone(child.members, listening, 10)
    if stop != signal.SIGKILL:
        assert not list(temporary.glob("*/rendezvous"))


@pytest.mark.parametrize("stage", LAUNCHERS)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_while_its_ranks_start(stage, stop, tmp_path, device):
    """The ranks are still importing torch; they must neither wait for it nor train on their own."""
    arguments = [*command(stage, 2), *ENDLESS, "--device", device]
    with started(arguments, tmp_path) as child:
        end = time.monotonic() + 300
        while len(ranks(child)) < 2:
            assert time.monotonic() < end
            child.members = family(child.pid)
        time.sleep(1)
        os.kill(child.pid, stop)
        assert child.wait(GRACE) != 0
        assert_gone(child.members, [], 60)  # none hears of it before it has imported torch
