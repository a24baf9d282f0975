"""docs/faults.md: when a rank fails, or a launcher is stopped, the whole run ends."""

import contextlib
import os
import re
import signal

import psutil
import pytest

from harness.commands import LIMIT
from harness.commands import assert_gone
from harness.commands import ports
from harness.commands import wait_until
from harness.sections import sections
from harness.stages import first_with
from harness.stages import with_feature
from tests.conftest import only_in_release
from tests.training import ENDLESS
from tests.training import injected
from tests.training import start_stage

TORCHRUN, SPAWN = first_with("torchrun"), first_with("spawn")
STOPS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
HARDEST = TORCHRUN, signal.SIGKILL  # which the launcher cannot pass on
# slow: its file comes early, because it takes long
pytestmark = [pytest.mark.usefixtures("two"), pytest.mark.slow]


@pytest.fixture
def start(tmp_path, device):
    """Return a function that starts a stage on two processes, by its launcher."""
    with contextlib.ExitStack() as stack:

        def get(stage, *flags, **options):
            flags = [*ENDLESS, "--device", device, *flags]
            options = {"forks": False, **options}
            return stack.enter_context(
                start_stage(stage, 2, flags, tmp_path / "screen", **options)
            )

        yield get


@pytest.fixture
def train(start):
    """Return a function that does the same, and waits until both ranks train."""

    def get(*arguments, **options):
        job = start(*arguments, **options)
        job.wait_for("epoch 2: ")
        assert len(job.ranks()) == 2
        return job

    return get


FAILS_IN_EPOCH_3 = """
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []

def fail(*_):
    steps.append(None)
    if len(steps) == 75 and dist.get_rank() == 1:
        raise RuntimeError("rank 1 failed")

register_optimizer_step_post_hook(fail)
"""


@pytest.mark.fault(
    since="distributed",
    what="a rank raises an exception",
    sees="the traceback of that rank, here `RuntimeError: rank 1 failed`; exit code 1",
    lost="the run; from stage {checkpoints} on the steps since the latest checkpoint",
)
@pytest.mark.parametrize("stage", [TORCHRUN, only_in_release(SPAWN)])
def test_a_rank_that_raises_ends_the_run(stage, train, tmp_path, fault):
    job = train(stage, root=injected(stage, tmp_path / "copy", FAILS_IN_EPOCH_3))
    assert job.wait().returncode == 1
    fault.assert_seen(job.screen())
    assert re.search(r"in train_one_epoch\n", job.screen())
    assert_gone(job.processes, [], LIMIT)


@pytest.mark.fault(
    since="distributed",
    what="a rank is killed, for example because it is out of memory",
    sees="which rank it was, and `SIGKILL`; the connections of the others break; exit"
    " code 1",
    lost="the run; from stage {checkpoints} on the steps since the latest checkpoint",
)
@pytest.mark.parametrize("stage", [TORCHRUN, only_in_release(SPAWN)])
def test_a_rank_that_is_killed_ends_the_run(stage, train, fault):
    job = train(stage)
    job.ranks()[1].kill()
    assert job.wait().returncode == 1
    fault.assert_seen(job.screen())
    assert_gone(job.processes, [], LIMIT)


@pytest.mark.fault(
    since="distributed",
    what="a rank hangs, here with `--timeout 20` seconds (300 by default)",
    sees="after the timeout, a traceback of the others with `timed out`; the launcher"
    " waits another 30 s for the rank that hangs",
    lost="the run; from stage {checkpoints} on the steps since the latest checkpoint",
)
@pytest.mark.release
@pytest.mark.parametrize("stage", [TORCHRUN, SPAWN])
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(stage, train, fault):
    job = train(stage, "--timeout", "20")  # enough to meet, also on a busy machine
    job.ranks()[1].suspend()
    assert job.wait().returncode == 1
    fault.assert_seen(job.screen())
    assert_gone(job.processes, [], LIMIT)


@pytest.mark.release
def test_a_rank_waits_for_one_that_hangs_until_the_timeout(train):
    """Without a launcher, which would wait for the rank that hangs."""
    job = train(TORCHRUN, "--timeout", "20", forks=True)
    waiting, hanging = job.forks
    job.ranks()[1].suspend()
    waiting.join(LIMIT)
    assert (waiting.exitcode, hanging.exitcode) == (1, None)
    assert re.search(r"timed out.* 20000 ?ms", job.screen(), re.IGNORECASE)


def test_all_stages_start_and_end_like_these_two():
    """So what is shown of these two holds for the others, too."""
    for stages in (with_feature("torchrun"), with_feature("spawn")):
        ends = set()
        for stage in stages:
            text = "\n".join(sections(stage)["6. the run"])
            ends.add(text[text.index("    exit_code = run(args)") :])
            setup = "\n".join(sections(stage)["2. processes"])
            assert re.search(r"^    launch\.die_with_parent\(", setup, re.M), stage
        assert len(ends) == 1, stages
    both = {*with_feature("torchrun"), *with_feature("spawn")}
    assert both == {*with_feature("distributed")}


def send(stop, job):
    """Send a signal to a launcher; Ctrl-C goes to all processes of its group."""
    (os.killpg if stop == signal.SIGINT else os.kill)(job.pid, stop)


@pytest.mark.fault(
    since="distributed",
    what="the launcher is stopped: Ctrl-C, SIGTERM, or SIGKILL, which it cannot pass"
    " on to its processes",
    sees="no process and no port of the run is left; the exit code is not 0",
    lost="the run; from stage {checkpoints} on the steps since the latest checkpoint,"
    " but from stage {signals} on nothing after SIGTERM",
)
@pytest.mark.parametrize(
    "stage, stop",
    [
        only_in_release(stage, stop, unless=(stage, stop) == HARDEST)
        for stage in (TORCHRUN, SPAWN)
        for stop in STOPS
    ]
    + [only_in_release(first_with("signals"), signal.SIGINT)],
)
def test_a_launcher_that_is_stopped_leaves_nothing(
    stage,
    stop,
    train,
    tmp_path,
    fault,  # noqa: ARG001 (its row shows no output)
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    job = train(stage, TMPDIR=temporary)
    assert bool(list(temporary.glob("*/rendezvous"))) == (stage == SPAWN)
    listening = ports(job.processes)
    send(stop, job)
    assert job.wait().returncode not in (0, "hung")
    assert_gone(job.processes, listening, LIMIT)
    if stop == signal.SIGINT:
        assert not list(temporary.glob("*/rendezvous"))


def imports_torch(process):
    """Return whether a process has opened torch's library: it is far from ready."""
    with contextlib.suppress(psutil.Error):
        return any("libtorch" in each.path for each in process.memory_maps())
    return False


@pytest.mark.release
@pytest.mark.parametrize(
    "stage, stop",
    [(stage, stop) for stage in (TORCHRUN, SPAWN) for stop in STOPS],
)
def test_a_launcher_that_is_stopped_while_its_ranks_start(stage, stop, start):
    """They are importing torch, and must neither wait for it nor train on their own.

    If torchrun has died before they could ask the kernel to end them with it, they wait
    for it in init_process_group, until the timeout.
    """
    job = start(stage, "--timeout", "5")
    wait_until(
        lambda: len(job.ranks()) == 2 and all(map(imports_torch, job.ranks())),
        LIMIT,
        job.screen,
    )
    job.look()
    send(stop, job)
    assert job.wait().returncode not in (0, "hung")
    assert_gone(job.processes, [], LIMIT)
