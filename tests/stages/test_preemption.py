"""docs/faults.md, from 10 on: told to stop, all ranks save after the same step.

A stopped run ends with the bits of one that was not. This is shown of the later stages
as well.
"""

import os
import signal
from functools import partial

import pytest
import torch

from harness import commands
from harness.commands import LIMIT
from harness.commands import assert_gone
from harness.stages import first_with
from harness.stages import with_feature
from tests.conftest import only_in_release
from tests.fault_injection import RANKS
from tests.fault_injection import no_step
from tests.fault_injection import signalled
from tests.fault_injection import signalled_at_file
from tests.fault_injection import signalled_from_outside
from tests.fault_injection import signalled_while_evaluating
from tests.fault_injection import slow_to_write
from tests.resume_harness import NEVER
from tests.resume_harness import SAMPLES
from tests.resume_harness import STOPPED
from tests.resume_harness import Run
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import read_state
from tests.resume_harness import resumed_from
from tests.resume_harness import rows
from tests.resume_harness import uninterrupted
from tests.training import call_all
from tests.training import injected

STAGE, *LATER = with_feature("signals")
SHORT = f"{STAGE}/demos/stop_in_time.py"
SPLITS = first_with("tensor_parallel")


@pytest.fixture
def stage(request):
    """The stage that explains it, unless a test names others."""
    return getattr(request, "param", STAGE)


@pytest.fixture
def run(stage, device, several, tmp_path):
    """A run of two epochs that saves at the end of an epoch and at a signal."""
    return Run(stage, tmp_path, device, *NEVER, processes=several)


@pytest.fixture
def reference(stage, trained, several):
    """What the same run ends with if nobody disturbs it."""
    return uninterrupted(trained, stage, several)


def assert_resumes_and_finishes(run, reference):
    """Start a run again; assert that its end differs in no bit."""
    done = run.run()
    assert resumed_from(done.stdout) == ([run.step] if run.step else [])
    assert_same(run.out_dir, reference)
    run.assert_no_step_is_lost_or_doubled()
    return done


# ---- while it trains -----------------------------------------------------------------
# In which step which ranks get which signals, in one start after the other, and after
# which step the run stops.
SIGNALS = [
    (3, ["SIGTERM"], ["0"], 3),
    (4, ["SIGUSR1"], ["1"], 4),  # the first step after resuming
    (10, ["SIGTERM"], RANKS, 10),  # the last of an epoch
    (16, ["SIGUSR1", "SIGTERM", "SIGINT", "SIGUSR1"], RANKS, 16),
    (20, ["SIGUSR1", "SIGUSR1"], ["1"], 20),
]


@pytest.mark.fault(
    since="signals",
    what="SIGTERM or SIGUSR1 to any rank while it trains, from Slurm, from Kubernetes"
    " or by hand",
    sees="all ranks end after the same step, with a checkpoint and exit code 143; the"
    " next run says `resumed from step`",
    lost="nothing",
)
@pytest.mark.parametrize(
    "stage",
    [STAGE, *map(only_in_release, LATER)],
    indirect=True,
)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    run,
    two,  # noqa: ARG001
    reference,
    fault,
):
    for step, names, who, last in SIGNALS:
        run.stop(step, *names, ranks=who)
        assert run.latest() == last
        state = read_state(run.paths()[0])
        assert state["step"] == state["scheduler"]["last_epoch"] == last
        assert [row["epoch"] for row in rows(run.out_dir)] == [1] * (step > 10)
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done.stdout)


def test_ranks_that_get_the_signal_in_different_steps_stop_after_the_same(
    run, two, reference
):
    """The second one never comes to its step."""
    steps = [partial(signalled, 3 + n, "SIGTERM", ranks=[str(n)]) for n in range(two)]
    run.run(code=STOPPED, prepare=partial(call_all, *steps))
    assert run.latest() == 3
    assert_resumes_and_finishes(run, reference)


def test_no_rank_ends_before_the_checkpoint_is_written(run, two):  # noqa: ARG001
    """A launcher would take the first end for a failure, and kill rank 0."""
    slow = partial(slow_to_write, 1.5)
    stop = partial(signalled, 3, "SIGTERM")
    with run.start(prepare=partial(call_all, slow, stop)) as job:
        job.forks[1].join(LIMIT)
        assert run.latest() == 3
        assert exit_codes(job.wait()) == [STOPPED] * 2
    assert not list(run.checkpoint_dir.glob(".step-*"))


# ---- loading, evaluating, ending -----------------------------------------------------
@pytest.mark.fault(
    since="signals",
    what="SIGTERM or SIGUSR1 while the run loads data or a checkpoint",
    sees="it ends at once; the next run says `resumed from step`",
    lost="nothing",
)
@pytest.mark.parametrize("stage", [SPLITS], indirect=True)
def test_a_signal_during_loading_ends_the_run_at_once(run, reference, fault):
    """The signals' default action ends it: there is nothing to save."""
    run.stop(7, "SIGTERM")
    before = run.files()
    loading = partial(signalled_at_file, "open", f"*/{SAMPLES}.txt", "SIGTERM")
    done = run.run(code=None, prepare=loading)
    # A rank that is still connecting when another one ends loses the connection: 1.
    assert -signal.SIGTERM in exit_codes(done), done
    assert {1, -signal.SIGTERM}.issuperset(exit_codes(done)), done
    assert run.files() == before
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done.stdout)


EVALUATING = {
    "one_rank": partial(signalled_while_evaluating, 10, "SIGUSR1", ranks=["1"]),
    "all_ranks": partial(signalled_while_evaluating, 10, "SIGTERM"),
    "after_evaluating": partial(signalled_at_file, "os.rename", "*/last.pt", "SIGTERM"),
}


@pytest.mark.fault(
    since="signals",
    what="SIGTERM or SIGUSR1 while the run evaluates",
    sees="the evaluation is finished, and all ranks end after the next step; the next"
    " run says `resumed from step`",
    lost="nothing; but the evaluation has to fit into the time that Slurm gives",
)
@pytest.mark.parametrize(
    "stage, moment",
    [
        (STAGE, "one_rank"),
        *(only_in_release(STAGE, moment) for moment in list(EVALUATING)[1:]),
        only_in_release(SPLITS, "one_rank"),
    ],
    indirect=["stage"],
)
@pytest.mark.usefixtures("two")
def test_a_signal_during_evaluation_ends_the_run_after_the_next_step(
    moment, run, reference, fault
):
    """The epoch's weights and metrics are written before it ends."""
    done = run.run(code=STOPPED, prepare=EVALUATING[moment])
    assert "epoch 1:" in done.stdout
    assert run.latest() == 11
    assert len(rows(run.out_dir)) == 1
    done = assert_resumes_and_finishes(run, reference)
    fault.assert_seen(done.stdout)


def test_a_signal_during_the_last_evaluation_changes_nothing(run, reference):
    """A finished run ends with 0: otherwise it would be started again and again."""
    evaluating = partial(signalled_while_evaluating, 20, "SIGTERM")
    run.run(code=0, prepare=evaluating)
    assert run.latest() == 20
    assert_same(run.out_dir, reference)


# ---- the script that is copied -------------------------------------------------------
def test_the_short_script_saves_the_bare_model(tmp_path):
    """Otherwise a program without DDP cannot load them."""
    command = f"torchrun --standalone --nproc-per-node=1 {SHORT} --checkpoint-dir"
    commands.run(
        [*command.split(), tmp_path / "saved"],
        code=STOPPED,
        forks=True,
        prepare=partial(signalled, 3, "SIGTERM"),
    )
    state = torch.load(tmp_path / "saved/step-000000003.pt", weights_only=True)
    assert not [name for name in state["model"] if name.startswith("module.")]
    torch.nn.Linear(8, 1).load_state_dict(state["model"])


# ---- the workers of the loaders ------------------------------------------------------
def test_a_rank_that_fails_ends_the_workers_of_its_loaders(device, tmp_path):
    run = Run(STAGE, tmp_path, device, "--workers", "2", processes=1)
    looked = tmp_path / "looked"
    with run.start(prepare=partial(no_step, looked)) as job:
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
    run = Run(STAGE, tmp_path, device, "--workers", "2", processes=1)
    run.run(code=STOPPED, prepare=partial(signalled_from_outside, 3, "SIGTERM"))
    assert run.latest() == 3
    assert_resumes_and_finishes(run, uninterrupted(trained, STAGE, 1))


# ---- torchrun ------------------------------------------------------------------------
WAITS_IN_STEP_3 = """
import itertools
import signal
from torch.optim.optimizer import register_optimizer_step_post_hook

count = itertools.count(1)
arrived, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)

def wait(*_):
    if next(count) == 3:
        print("in step 3", flush=True)
        os.read(arrived, 1)  # returns when a signal has arrived

register_optimizer_step_post_hook(wait)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "stop, saved",
    [
        (signal.SIGTERM, [3]),
        only_in_release(signal.SIGHUP, []),
    ],
)
def test_torchrun_is_stopped(stop, saved, run, two, reference, tmp_path):
    """It hands the signal on to the ranks, which save at SIGTERM and at no other."""
    root = injected(STAGE, tmp_path / "copy", WAITS_IN_STEP_3)
    with run.start(root=root, forks=False) as job:
        job.wait_for("in step 3", times=two)
        os.killpg(job.pid, stop)
        assert job.wait().returncode not in (0, "hung")
        assert_gone(job.processes, [], LIMIT)
    assert run.steps() == saved
    assert not run.out_dir.exists()
    assert_resumes_and_finishes(run, reference)
