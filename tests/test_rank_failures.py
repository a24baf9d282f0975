"""A rank fails, is killed or hangs, or a launcher is stopped: everything ends soon."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from nbtools.sections import sections
from tests.conftest import swept_unless
from tests.harness import ENDLESS
from tests.harness import LAUNCHED
from tests.harness import LAUNCHERS
from tests.harness import ROOT
from tests.harness import assert_gone
from tests.harness import family
from tests.harness import fork_ranks
from tests.harness import injected
from tests.harness import kill
from tests.harness import ports
from tests.harness import ranks
from tests.harness import started
from tests.harness import wait_until
from tools.stages import command
from tools.stages import launcher

GRACE = 30 + 90  # torchrun gives its ranks 30 seconds to end before it kills them
TORCHRUN, SPAWN = LAUNCHERS
# How a stage's processes are started. A fork of the tests' server proves as much as a
# command about what stage 04 does after its imports; torchrun must be a command.
BY_TORCHRUN = (TORCHRUN, "launched")
FORKED = (SPAWN, "forked")
SPAWNED = (SPAWN, "launched")
STARTS = [BY_TORCHRUN, FORKED, swept_unless(False, *SPAWNED)]
pytestmark = pytest.mark.usefixtures("two")


class Forked:
    """A spawning stage in a fork, with what the tests use of a launched one."""

    def __init__(self, arguments, folder, root, **variables):
        options = {"root": root, **variables}
        (self.end,) = fork_ranks(SPAWN, 2, arguments, folder, **options)
        self.folder, self.pid = Path(folder), self.end.process.pid

    def screen(self):
        paths = [self.folder / name for name in ("stdout", "stderr")]
        return "".join(path.read_text() for path in paths if path.exists())

    def wait_for(self, text):
        wait_until(lambda: text in self.screen(), 300, self.screen)
        self.members = family(self.pid)

    def ranks(self):
        return family(self.pid)[1:]

    def wait(self, seconds):
        self.end.process.join(seconds)
        return self.end.process.exitcode


@pytest.fixture
def training(tmp_path, device):
    """Return a function that starts a stage on two processes, which then train."""
    with contextlib.ExitStack() as stack:

        def start(stage, how, *flags, root=ROOT, folder=tmp_path, **variables):
            folder.mkdir(exist_ok=True)
            flags = [*ENDLESS, "--device", device, *flags]
            if how == "forked":
                child = Forked(flags, folder, root, **variables)
                stack.callback(lambda: kill([*child.members, *family(child.pid)]))
            else:
                arguments = [*command(stage, 2, root), *flags]
                child = stack.enter_context(started(arguments, folder, **variables))
                child.ranks = lambda: ranks(child)
            child.wait_for("epoch 2: ")
            assert len(child.ranks()) == 2
            return child

        yield start


FAILS_IN_EPOCH_3 = """
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []

def fail(*_):
    steps.append(None)
    if len(steps) == 60 and dist.get_rank() == 1:
        raise RuntimeError("rank 1 failed")

register_optimizer_step_post_hook(fail)
"""


@pytest.mark.fault(
    stages="03 to 13",
    what="a rank raises an exception",
    sees="the traceback of that rank, ending in `RuntimeError: rank 1 failed`; exit"
    " code 1",
    seconds=30,
    lost="the run; from stage 09 on the steps since the latest checkpoint",
)
@pytest.mark.parametrize("stage, how", STARTS)
def test_a_rank_that_raises_ends_the_run(stage, how, training, tmp_path, fault):
    root = injected(stage, tmp_path / "copy", FAILS_IN_EPOCH_3)
    child = training(stage, how, root=root)
    assert child.wait(fault.seconds) == 1
    fault.assert_seen(child.screen())
    assert re.search(r"in train_one_epoch\n", child.screen())
    assert_gone(child.members, [], 10)


@pytest.mark.fault(
    stages="03 to 13",
    what="a rank is killed, for example because it is out of memory",
    sees="which rank it was, and `SIGKILL`; the connections of the others break; exit"
    " code 1",
    seconds=30,
    lost="the run; from stage 09 on the steps since the latest checkpoint",
)
@pytest.mark.parametrize("stage, how", STARTS)
def test_a_rank_that_is_killed_ends_the_run(stage, how, training, fault):
    child = training(stage, how)
    child.ranks()[1].kill()
    assert child.wait(fault.seconds) == 1
    fault.assert_seen(child.screen())
    assert_gone(child.members, [], 10)


@pytest.mark.fault(
    stages="03 to 13",
    what="a rank hangs, here with `--timeout 5` seconds (300 by default)",
    sees="after the timeout, a traceback of the others with `timed out`; the launcher"
    " waits another 30 s for the rank that hangs",
    seconds=60,
    lost="the run; from stage 09 on the steps since the latest checkpoint",
)
@pytest.mark.sweep
@pytest.mark.parametrize("stage", LAUNCHERS)
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(stage, training, fault):
    child = training(stage, "launched", "--timeout", "5")
    child.ranks()[1].suspend()
    assert child.wait(fault.seconds) == 1
    fault.assert_seen(child.screen())
    assert_gone(child.members, [], 10)


def test_a_rank_waits_for_one_that_hangs_until_the_timeout(tmp_path, device):
    """Without a launcher, which would wait for the rank that hangs."""
    flags = [*ENDLESS, "--device", device, "--timeout", "5"]
    first, second = fork_ranks(TORCHRUN, 2, flags, tmp_path, seconds=60)
    screen = tmp_path / "0/stdout"
    wait_until(lambda: screen.exists() and "epoch 1: " in screen.read_text(), 60)
    (rank,) = family(second.process.pid)
    rank.suspend()
    begin = time.monotonic()
    done = first()
    assert 4 < time.monotonic() - begin < 30
    assert done.returncode == 1
    assert "timed out" in done.stderr.lower()
    kill([rank])


def test_all_stages_start_and_end_like_03_or_04():
    """So what is shown of these two holds for the others, too."""
    programs = [launcher(stage) for stage in LAUNCHED]
    assert [LAUNCHED[programs.index(p)] for p in ("torchrun", "python")] == LAUNCHERS
    mains = {}
    for stage in LAUNCHED:
        text = "\n".join(sections(stage)["6. the run"])
        mains.setdefault(text[text.index("\ndef main") :], []).append(stage)
        setup = "\n".join(sections(stage)["2. processes"])
        assert "\n    launch.die_with_parent(PARENT_PID)\n" in setup
    spawning = ["04_ddp_spawn", "05_amp"]
    assert list(mains.values()) == [
        [s for s in LAUNCHED if s not in spawning],
        spawning,
    ]


@pytest.mark.fault(
    stages="03 to 13",
    what="the launcher is stopped: Ctrl-C, SIGTERM, or SIGKILL, which it cannot pass"
    " on to its processes",
    sees="no process and no port of the run is left; the exit code is not 0",
    seconds=60,
    lost="the run; with stage 09 the steps since the latest checkpoint, with stage 10"
    " only after SIGKILL",
)
@pytest.mark.parametrize(
    "stage, how, stop",
    [
        swept_unless(start == FORKED or stop == signal.SIGKILL, *start, stop)
        for start in (BY_TORCHRUN, FORKED)
        for stop in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    ]
    + [
        swept_unless(False, stage, "launched", stop)
        for stage, stop in (
            (SPAWN, signal.SIGTERM),
            (SPAWN, signal.SIGKILL),
            (SPAWN, signal.SIGINT),
            ("10_preemption", signal.SIGINT),
        )
    ],
)
def test_a_launcher_that_is_stopped_leaves_nothing(
    stage, how, stop, training, tmp_path, fault
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    child = training(stage, how, TMPDIR=str(temporary))
    assert bool(list(temporary.glob("*/rendezvous"))) == (stage == SPAWN)
    listening = ports(child.members)
    os.kill(child.pid, stop)
    assert child.wait(fault.seconds) != 0
    assert_gone(child.members, listening, 10)
    if stop != signal.SIGKILL:
        assert not list(temporary.glob("*/rendezvous"))


@pytest.mark.parametrize(
    "stage, stop",
    [
        swept_unless((stage, stop) == (TORCHRUN, signal.SIGKILL), stage, stop)
        for stage in LAUNCHERS
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    ],
)
def test_a_launcher_that_is_stopped_while_its_ranks_start(
    stage, stop, tmp_path, device
):
    """They are importing torch, and must neither wait for it nor train on their own."""
    arguments = [*command(stage, 2), *ENDLESS, "--device", device]
    with started(arguments, tmp_path) as child:
        wait_until(lambda: len(ranks(child)) == 2, 300, child.screen)
        child.members = family(child.pid)
        time.sleep(1)
        os.kill(child.pid, stop)
        assert child.wait(GRACE) != 0
        assert_gone(child.members, [], 60)  # a rank notices after its imports
