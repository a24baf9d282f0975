"""Stage 10: at a signal all ranks stop after the same step, with a checkpoint.

What is shown first, that a stopped run ends with the same bits, is shown of the later
stages as well.
"""

import os
import signal
from functools import partial

import pytest

from tests.conftest import only_in_sweep
from tests.fault_injection import RANKS
from tests.fault_injection import a_minute_per_look_at_the_clock
from tests.fault_injection import no_step
from tests.fault_injection import signalled
from tests.fault_injection import signalled_at_file
from tests.fault_injection import signalled_before_handler
from tests.fault_injection import signalled_from_outside
from tests.fault_injection import signalled_while_evaluating
from tests.fault_injection import slow_to_write
from tests.resume_harness import NEVER
from tests.resume_harness import SHORT
from tests.resume_harness import Run
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import read_state
from tests.resume_harness import resumed_from
from tests.resume_harness import rows
from tests.resume_harness import uninterrupted
from tests.training import call_all
from tests.training import injected
from tests.training import small_workload
from tools.harness import LIMIT
from tools.harness import assert_gone
from tools.harness import family
from tools.harness import wait_until
from tools.stages import with_feature

STAGE, *LATER = with_feature("signals")
STOPPED = 128 + signal.SIGTERM


@pytest.fixture
def stage(request):
    """The stage that explains it, unless a test names others."""
    return getattr(request, "param", STAGE)


@pytest.fixture
def run(stage, device, several, tmp_path):
    """A run of two epochs that saves at the end of an epoch and at a signal."""
    flags = (*SHORT, *NEVER, *small_workload(stage).flags)
    return Run(stage, tmp_path, device, *flags, processes=several)


@pytest.fixture
def reference(stage, trained, several):
    """What the same run ends with if nobody disturbs it."""
    flags = (*SHORT, *small_workload(stage).flags)
    return uninterrupted(trained, stage, several, *flags)


def assert_resumes_and_finishes(run, reference):
    """Start a run again; assert that its end differs in no bit."""
    done = run.run()
    assert resumed_from(done.stdout) == ([run.step] if run.step else [])
    assert_same(run.out_dir, reference)
    run.assert_no_step_is_lost_or_doubled(50)
    return done


# ---- while it trains -----------------------------------------------------------------
# In which step which ranks get which signals, in one start after the other, and after
# which step the run stops: after the next one, except at the end of an epoch.
SIGNALS = [
    (7, ["SIGTERM"], ["0"], 8),
    (9, ["SIGUSR1"], ["1"], 10),  # the first step after resuming
    (25, ["SIGTERM"], RANKS, 25),
    (38, ["SIGUSR1", "SIGUSR1"], ["1"], 39),
    (42, ["SIGUSR1", "SIGTERM", "SIGUSR1"], RANKS, 43),
    (50, ["SIGUSR1"], ["0"], 50),
]


@pytest.mark.fault(
    since="signals",
    what="SIGTERM or SIGUSR1 to any rank while it trains, from Slurm, from Kubernetes"
    " or by hand",
    sees="all ranks end after the same step, with a checkpoint and exit code 143 or"
    " 138; the next run says `resumed from step`",
    seconds=60,
    lost="nothing",
)
@pytest.mark.parametrize(
    "stage",
    [STAGE, *(only_in_sweep(stage, unless=stage == LATER[-1]) for stage in LATER)],
    indirect=True,
)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    stage, run, two, reference, fault
):
    each = small_workload(stage).train // 25 // two  # targets of a rank in a step
    for step, names, who, last in SIGNALS:
        run.stop(step, *names, ranks=who)
        assert run.latest() == last
        state = read_state(run.paths()[0])
        targets = each * ((last - 1) % 25 + 1)
        assert state["sums"][:, 3].tolist() == [targets] * two
        assert [row["epoch"] for row in rows(run.out_dir)] == [1] * (step > 25)
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done.stdout)


def test_ranks_that_get_the_signal_in_different_steps_stop_after_the_same(
    run, two, reference
):
    """The second one comes while the first one is being agreed on."""
    steps = [partial(signalled, 7 + n, "SIGTERM", ranks=[str(n)]) for n in range(two)]
    run.run(code=STOPPED, prepare=partial(call_all, *steps))
    assert run.latest() == 8
    assert_resumes_and_finishes(run, reference)


def test_no_rank_ends_before_the_checkpoint_is_written(run, two):  # noqa: ARG001
    """A launcher would take the first end for a failure, and kill rank 0."""
    slow = partial(slow_to_write, 1.5)
    stop = partial(signalled, 7, "SIGTERM")
    with run.start(prepare=partial(call_all, slow, stop)) as job:
        job.forks[1].join(LIMIT)
        assert run.latest() == 8
        assert exit_codes(job.wait()) == [STOPPED] * 2
    assert not list(run.checkpoint_dir.glob(".*"))


def test_checkpoint_minutes(run, two):  # noqa: ARG001
    """The clock advances by a minute each time that it is looked at.

    That is once for each vote and for each save. The third vote after a save finds that
    it was three minutes ago, and is counted one step later. Each epoch ends with a save
    and a vote, and the next one begins with another vote. Rank 0 decides: rank 1 never
    saves, so for its own clock a save is always due.
    """
    run.run(
        *("--checkpoint-minutes", "3", "--keep-checkpoints", "100"),
        prepare=a_minute_per_look_at_the_clock,
    )
    assert run.steps()[::-1] == [*range(3, 25, 3), 25, *range(27, 50, 3), 50]


# ---- loading, evaluating, ending -----------------------------------------------------
MOMENTS = {
    "loading": partial(signalled_at_file, "open", "*/digits.npz", "SIGTERM"),
    "loading_text": partial(signalled_at_file, "open", "*/1500.txt", "SIGTERM"),
    "just_before_signals_are_caught": partial(signalled_before_handler, 1, "SIGTERM"),
    "just_before_evaluating": partial(signalled_before_handler, 2, "SIGTERM"),
    "evaluating": partial(signalled_while_evaluating, 25, "SIGUSR1"),
    "evaluating_the_last_epoch": partial(signalled_while_evaluating, 50, "SIGTERM"),
}
RESUMED = ("loading", "loading_text", "just_before_signals_are_caught")
OF_IMAGES = [(STAGE, moment) for moment in MOMENTS if moment != "loading_text"]
OF_TEXT = [(LATER[-1], moment) for moment in MOMENTS if moment != "loading"]


@pytest.mark.fault(
    since="signals",
    what="SIGTERM or SIGUSR1 while the run loads or evaluates",
    sees="it ends at once; the next run says `resumed from step`",
    seconds=60,
    lost="nothing but the evaluation, which is done again",
)
@pytest.mark.parametrize(
    "stage, moment",
    [*OF_IMAGES, *(only_in_sweep(*case) for case in OF_TEXT)],
    indirect=["stage"],
)
def test_a_signal_during_loading_and_evaluation_ends_the_run_at_once(
    moment, run, reference, fault
):
    """The signals' default action ends it, so all that is needed has been saved."""
    if moment in RESUMED:
        run.stop(12, "SIGTERM")
    before = run.latest()
    done = run.run(code=None, prepare=MOMENTS[moment])
    number = signal.SIGUSR1 if moment == "evaluating" else signal.SIGTERM
    # Rank 1 waits for rank 0 to load first, so it ends by the broken connection.
    codes = {1, 2} if moment.startswith("loading") else {-number}
    assert exit_codes(done)[0] == -number, done
    assert codes.issuperset(exit_codes(done)[1:]), done
    epoch = 2 if moment == "evaluating_the_last_epoch" else 1
    assert run.latest() == (before or 25 * epoch)
    assert len(rows(run.out_dir)) == epoch - 1
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done.stdout)


def test_a_signal_to_one_rank_while_all_evaluate_ends_the_other(run, two, reference):
    """The one that got it ends by it, the other by a broken connection."""
    evaluating = partial(signalled_while_evaluating, 25, "SIGTERM", ranks=["1"])
    done = run.run(code=None, prepare=evaluating)
    assert exit_codes(done) == [1, -signal.SIGTERM]
    assert run.latest() == 25 * (two - 1)
    assert_resumes_and_finishes(run, reference)


@pytest.mark.parametrize("epoch, code, last", [(1, STOPPED, 26), (2, 0, 50)])
def test_a_signal_after_the_evaluation(epoch, code, last, run, reference):
    """The epoch's weights and metrics are written; a finished run exits with 0."""
    written = partial(signalled_at_file, "os.rename", "*/last.pt", "SIGTERM", epoch)
    run.run(code=code, prepare=written)
    assert run.latest() == last
    assert len(rows(run.out_dir)) == epoch
    if code:
        assert_resumes_and_finishes(run, reference)
    else:
        assert_same(run.out_dir, reference)


# ---- the workers of the loaders ------------------------------------------------------
@pytest.mark.parametrize(
    "start_method",  # Python 3.14 made forkserver the default
    ["fork", only_in_sweep("forkserver")],
)
def test_a_rank_that_fails_ends_the_workers_of_its_loaders(
    start_method, device, tmp_path
):
    run = Run(STAGE, tmp_path, device, *SHORT, "--workers", "2", processes=1)
    looked = tmp_path / "looked"
    with run.start(prepare=partial(no_step, start_method, looked)) as job:
        job.wait_for("an optimizer step")
        members = job.processes[1:]
        assert len(members) >= 2
        looked.touch()
        assert job.wait().returncode == 1
        assert_gone(members, [], LIMIT)


def test_a_signal_to_the_workers_of_the_loaders_too_loses_nothing(
    trained, device, tmp_path
):
    """Slurm sends it to every process of a job."""
    run = Run(STAGE, tmp_path, device, *SHORT, "--workers", "2", processes=1)
    run.run(code=STOPPED, prepare=partial(signalled_from_outside, 13, "SIGTERM"))
    assert run.latest() == 14
    assert_resumes_and_finishes(run, uninterrupted(trained, STAGE, 1, *SHORT))


# ---- torchrun ------------------------------------------------------------------------
WAITS_IN_STEP_10 = """
import itertools
import signal
from torch.optim.optimizer import register_optimizer_step_post_hook

count = itertools.count(1)
arrived, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)

def wait(*_):
    if next(count) == 10:
        print("in step 10", flush=True)
        os.read(arrived, 1)  # returns when a signal has arrived

register_optimizer_step_post_hook(wait)
"""


def test_torchrun_is_stopped(run, two, reference, tmp_path):
    """It hands SIGTERM on to the ranks."""
    root = injected(STAGE, tmp_path / "copy", WAITS_IN_STEP_10)
    with run.start(root=root, forks=False) as job:
        job.wait_for("in step 10", times=two)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait().returncode not in (0, "hung")
        assert_gone(job.processes, [], LIMIT)
    assert run.steps() == [11]
    assert not run.out_dir.exists()
    assert_resumes_and_finishes(run, reference)


WAITS_AFTER_60_STEPS = """
import itertools
import time
from torch.optim.optimizer import register_optimizer_step_post_hook

count = itertools.count(1)
register_optimizer_step_post_hook(lambda *_: next(count) == 60 and time.sleep(3600))
"""


@pytest.mark.sweep
def test_torchrun_is_killed(trained, two, device, tmp_path):
    """The ranks end with it, at some moment, and the same command resumes the run."""
    data = ("--data", "fake", "--image-size", "8", "--images", "9000", "--epochs", "1")
    flags = (*data, "--checkpoint-every", "10")  # an epoch has 150 steps
    run = Run(STAGE, tmp_path, device, *flags, processes=two)
    root = injected(STAGE, tmp_path / "copy", WAITS_AFTER_60_STEPS)
    for _ in range(2):
        with run.start(root=root, forks=False) as job:
            wait_until(lambda: run.latest() >= run.step + 20, LIMIT, job.screen)
            members = family(job.pid)[1:]
            assert len(members) >= two
            os.kill(job.pid, signal.SIGKILL)
            assert_gone(members, [], LIMIT)
        assert run.step < run.latest() < 150
    with run.start(forks=False) as job:
        assert job.wait().returncode == 0, job.screen()
        assert resumed_from(job.screen()) == [run.step]
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two, *data))
