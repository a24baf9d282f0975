"""Stage 10: at a signal all ranks stop after the same step, with a checkpoint.

What is shown first, that a stopped run ends with the same bits, is shown of the later
stages as well.
"""

import functools
import signal

import pytest

from tests.conftest import swept_unless
from tests.fault_injection import no_step
from tests.fault_injection import signalled
from tests.fault_injection import signalled_and_slow_to_write
from tests.harness import family
from tests.harness import injected
from tests.harness import little_work
from tests.harness import started
from tests.harness import wait_until
from tests.resume_faults import a_minute_per_look_at_the_clock
from tests.resume_faults import signalled_from_outside
from tests.resume_faults import signalled_in_call
from tests.resume_faults import signalled_in_different_steps
from tests.resume_harness import NEVER
from tests.resume_harness import SHORT
from tests.resume_harness import Run
from tests.resume_harness import assert_all_end
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import read_state
from tests.resume_harness import resumed_from
from tests.resume_harness import rows
from tests.resume_harness import torchrun_command
from tests.resume_harness import uninterrupted
from tools.stages import stages

STAGE = "10_preemption"
LATER = stages()[10:]
STOPPED = 128 + signal.SIGTERM
BOTH = ["0", "1"]


@pytest.fixture
def stage(request):
    """Stage 10, unless a test names others."""
    return getattr(request, "param", STAGE)


@pytest.fixture
def run(stage, device, several, tmp_path):
    """A run of two epochs that saves at the end of an epoch and at a signal."""
    flags = (*SHORT, *NEVER, *little_work(stage).flags)
    return Run(stage, tmp_path, device, *flags, processes=several)


@pytest.fixture
def reference(stage, trained, several):
    """What the same run ends with if nobody disturbs it."""
    flags = (*SHORT, *little_work(stage).flags)
    return uninterrupted(trained, stage, several, *flags)


def assert_resumes_and_finishes(run, reference):
    """Start a run again; assert that its end differs in no bit."""
    done = run.go()
    assert exit_codes(done) == [0] * run.processes, done
    assert resumed_from(done[0].stdout) == ([run.step] if run.step else [])
    assert_same(run.out_dir, reference)
    run.assert_no_step_is_lost_or_doubled(50)
    return done


# ---- while it trains -----------------------------------------------------------------
# In which step which ranks get which signals, in one start after the other, and after
# which step the run stops: after the next one, except at the end of an epoch.
SIGNALS = [
    (7, ["SIGTERM"], ["0"], 8),
    (9, ["SIGUSR1"], ["1"], 10),  # the first step after resuming
    (25, ["SIGTERM"], BOTH, 25),
    (38, ["SIGUSR1", "SIGUSR1"], ["1"], 39),
    (42, ["SIGUSR1", "SIGTERM", "SIGUSR1"], BOTH, 43),
    (50, ["SIGUSR1"], ["0"], 50),
]


@pytest.mark.fault(
    stages="10 to 13",
    what="SIGTERM or SIGUSR1 to any rank while it trains, from Slurm, from Kubernetes"
    " or by hand",
    sees="all ranks end after the same step, with a checkpoint and exit code 143 or"
    " 138; the next run says `resumed from step`",
    seconds=60,
    lost="nothing",
)
@pytest.mark.parametrize(
    "stage",
    [STAGE, *(swept_unless(stage == LATER[-1], stage) for stage in LATER)],
    indirect=True,
)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    stage, run, two, reference, fault
):
    each = little_work(stage).train // 25 // two  # targets of a rank in a step
    for step, names, who, last in SIGNALS:
        prepare = functools.partial(signalled, step, *names, ranks=who)
        done = run.go(prepare=prepare, seconds=fault.seconds)
        number = max(getattr(signal, name) for name in names)
        assert exit_codes(done) == [128 + number] * two, (step, done)
        assert run.latest() == last
        state = read_state(run.paths()[0])
        targets = each * ((last - 1) % 25 + 1)
        assert state["sums"][:, 3].tolist() == [targets] * two
        assert [row["epoch"] for row in rows(run.out_dir)] == [1] * (step > 25)
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done[0].stdout)


def test_ranks_that_get_the_signal_in_different_steps_stop_after_the_same(
    run, two, reference
):
    """The second one comes while the first one is being agreed on."""
    steps = {"0": 7, "1": 8}
    prepare = functools.partial(signalled_in_different_steps, "SIGTERM", steps)
    assert exit_codes(run.go(prepare=prepare)) == [STOPPED] * two
    assert run.latest() == 8
    assert_resumes_and_finishes(run, reference)


def test_no_rank_ends_before_the_checkpoint_is_written(run, two):  # noqa: ARG001
    """A launcher would take the first end for a failure, and kill rank 0."""
    rank_0, rank_1 = run.start(
        prepare=functools.partial(signalled_and_slow_to_write, 7, 1.5)
    )
    assert rank_1().returncode == STOPPED
    assert run.latest() == 8
    assert rank_0().returncode == STOPPED
    assert not list(run.checkpoint_dir.glob(".*"))


def test_checkpoint_minutes(run, two):  # noqa: ARG001
    """The clock advances by a minute each time that it is looked at.

    That is once for each vote and for each save. The third vote after a save finds that
    it was three minutes ago, and is counted one step later. Each epoch ends with a save
    and a vote, and the next one begins with another vote. Rank 0 decides: rank 1 never
    saves, so for its own clock a save is always due.
    """
    done = run.go(
        *("--checkpoint-minutes", "3", "--keep-checkpoints", "100"),
        prepare=a_minute_per_look_at_the_clock,
    )
    assert exit_codes(done) == [0] * run.processes, done
    assert run.steps()[::-1] == [*range(3, 25, 3), 25, *range(27, 50, 3), 50]


# ---- loading, evaluating, ending -----------------------------------------------------
MOMENTS = {
    "loading": (1, "data", "load_data or load_text"),
    "just_before_it_resumes": (1, "launch", "catch_signals"),
    "just_before_evaluating": (1, "launch", "default_signals"),
    "evaluating": (2, "meters", "progress"),
    "evaluating_the_last_epoch": (4, "meters", "progress"),
}


@pytest.mark.fault(
    stages="10 to 13",
    what="SIGTERM or SIGUSR1 while the run loads or evaluates",
    sees="it ends at once; the next run says `resumed from step`",
    seconds=60,
    lost="nothing but the evaluation, which is done again",
)
@pytest.mark.parametrize(
    "stage, moment",
    [
        swept_unless(stage == STAGE, stage, moment)
        for stage in (STAGE, LATER[-1])
        for moment in MOMENTS
    ],
    indirect=["stage"],
)
def test_a_signal_during_loading_and_evaluation_ends_the_run_at_once(
    moment, run, several, reference, fault
):
    """The signals' default action ends it, so all that is needed has been saved."""
    if moment in ("loading", "just_before_it_resumes"):
        done = run.go(prepare=functools.partial(signalled, 12, "SIGTERM"))
        assert exit_codes(done) == [STOPPED] * several
    before = run.latest()
    name = "SIGUSR1" if moment == "evaluating" else "SIGTERM"
    prepare = functools.partial(signalled_in_call, *MOMENTS[moment], name)
    done = run.go(prepare=prepare, seconds=fault.seconds)
    codes = exit_codes(done)
    assert codes[0] == -getattr(signal, name), done
    # Rank 1 waits for rank 0 to load first, so it ends by the broken connection.
    assert set(codes[1:]) <= ({1, 2} if moment == "loading" else {codes[0]})
    epoch = 2 if moment == "evaluating_the_last_epoch" else 1
    assert run.latest() == (before or 25 * epoch)
    assert len(rows(run.out_dir)) == epoch - 1
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done[0].stdout)


def test_a_signal_to_one_rank_while_all_evaluate_ends_the_other(run, two, reference):
    """The one that got it ends by it, the other by a broken connection."""
    moment = MOMENTS["evaluating"]
    done = run.go(
        prepare=functools.partial(signalled_in_call, *moment, "SIGTERM", ranks=["1"])
    )
    assert exit_codes(done) == [1, -signal.SIGTERM]
    assert run.latest() == 25 * (two - 1)
    assert_resumes_and_finishes(run, reference)


@pytest.mark.parametrize("epoch, code, last", [(1, STOPPED, 26), (2, 0, 50)])
def test_a_signal_after_the_evaluation(epoch, code, last, run, several, reference):
    """The epoch's weights and metrics are written; a finished run exits with 0."""
    moment = (epoch, "checkpoint", "save_epoch")
    done = run.go(prepare=functools.partial(signalled_in_call, *moment, "SIGTERM"))
    assert exit_codes(done) == [code] * several, done
    assert run.latest() == last
    assert len(rows(run.out_dir)) == epoch
    if code:
        assert_resumes_and_finishes(run, reference)
    else:
        assert_same(run.out_dir, reference)


# ---- the workers of the loaders ------------------------------------------------------
@pytest.mark.parametrize(
    "start_method",  # Python 3.14 made forkserver the default
    ["fork", pytest.param("forkserver", marks=pytest.mark.sweep)],
)
def test_a_rank_that_fails_ends_the_workers_of_its_loaders(
    start_method, device, tmp_path
):
    run = Run(STAGE, tmp_path, device, *SHORT, "--workers", "2", processes=1)
    (end,) = run.start(prepare=functools.partial(no_step, start_method))
    run.wait_until(lambda: len(family(end.process.pid)) >= 3)
    members = family(end.process.pid)[1:]
    assert end().returncode == 1
    assert_all_end(members)


def test_a_signal_to_the_workers_of_the_loaders_too_loses_nothing(
    trained, device, tmp_path
):
    """Slurm sends it to every process of a job."""
    run = Run(STAGE, tmp_path, device, *SHORT, "--workers", "2", processes=1)
    done = run.go(prepare=functools.partial(signalled_from_outside, 13, "SIGTERM"))
    assert exit_codes(done) == [STOPPED], done
    assert run.latest() == 14
    assert_resumes_and_finishes(run, uninterrupted(trained, STAGE, 1, *SHORT))


# ---- torchrun ------------------------------------------------------------------------
# One epoch of 150 steps.
LONG = ("--data", "fake", "--image-size", "8", "--images", "9000", "--epochs", "1")
TELL = """
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: print("a step", flush=True))
"""


def test_torchrun_is_stopped(trained, two, device, tmp_path):
    """It hands SIGTERM on to the ranks."""
    root = injected(STAGE, tmp_path / "copy", TELL)
    flags = (*LONG, *NEVER, "--device", device)
    arguments, variables = torchrun_command(STAGE, two, tmp_path, *flags, root=root)
    with started(arguments, tmp_path, **variables) as child:
        child.wait_for("a step", times=10)
        child.send_signal(signal.SIGTERM)
        assert child.wait(90) not in (0, None)
        assert_all_end(child.members)
    run = Run(STAGE, tmp_path, device, *LONG, *NEVER, processes=two)
    (step,) = run.steps()
    assert 5 < step < 150
    assert not run.out_dir.exists()
    assert exit_codes(run.go()) == [0] * two
    assert resumed_from(run.screen()) == [step]
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two, *LONG))


@pytest.mark.sweep
def test_torchrun_is_killed(trained, two, device, tmp_path):
    """The ranks end with it, at some moment, and the same command resumes the run."""
    flags = (*LONG, "--checkpoint-every", "10", "--device", device)
    arguments, variables = torchrun_command(STAGE, two, tmp_path, *flags)
    run = Run(STAGE, tmp_path, device, processes=two)
    for _ in range(2):
        before = run.latest()
        with started(arguments, tmp_path, **variables) as child:
            child.wait_for("processes on")
            wait_until(lambda old=before: run.latest() >= old + 20, 300, child.screen)
            members = family(child.pid)[1:]
            child.kill()
            assert_all_end(members)
        assert before < run.latest() < 150
    step = run.latest()
    with started(arguments, tmp_path, **variables) as child:
        assert child.wait(300) == 0, child.screen()
        assert resumed_from(child.screen()) == [step]
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two, *LONG))
