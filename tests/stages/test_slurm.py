"""docs/faults.md: jobs train on two nodes, are requeued and resume, or fail at once.

By the job files of 06 and 10, on a real Slurm, as the notebooks of these stages say.
"""

import os
import re

import pytest

from harness import commands
from harness.commands import assert_gone
from harness.commands import wait_until
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import reference
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.slurm_cluster import EVERY
from tests.slurm_cluster import Cluster
from tests.slurm_cluster import SlurmJob
from tests.training import DOUBLE
from tests.training import ENDLESS
from tests.training import assert_one_error_line
from tests.training import missing_for_slurm
from tests.training import train_in_forks

pytestmark = pytest.mark.ci

SLURM = first_with("slurm")
SIGNALS = first_with("signals")
# How the ranks of a job are started: by srun, or by a torchrun on each node.
SRUN, TORCHRUN = False, True
CPU = ("--device", "cpu")

# One epoch of 600 steps, so that a job that is stopped has only the checkpoint that it
# writes then.
LONG = ("--data", "fake", "--image-size", "8", "--images", "36000", "--epochs", "1")
NEVER = ("--checkpoint-every", "1000000", *CPU)


@pytest.fixture(autouse=True, scope="module")
def require_slurm():
    if missing_for_slurm():
        assert "REQUIRE_SLURM" not in os.environ, missing_for_slurm()
        pytest.skip(missing_for_slurm())


@pytest.fixture(scope="module")
def started(require_slurm):  # noqa: ARG001
    """The tests' cluster. That of the notebooks finds a job's processes in cgroups."""
    one = Cluster("/run/local_cluster_of_the_tests")
    one.script("stop")  # what a killed test run left
    assert one.script("start").stdout.startswith("started\n")
    yield one
    one.script("stop")


@pytest.fixture
def cluster(started):
    """The cluster, without a job; what a test leaves there is cancelled."""
    yield started
    started.cancel_jobs()


@pytest.fixture
def grace_time(cluster):
    """A partition whose jobs have longer than a test to end before they are preempted.

    So a job that runs again was not requeued by Slurm when this time was over.
    """
    cluster.update("PartitionName=main", "GraceTime=3600")
    yield
    cluster.update("PartitionName=main", "GraceTime=0")


# ---- jobs train to the same weights, stopped or not ----------------------------------
@pytest.mark.parametrize("per_node", [1, only_in_release(2)])
def test_jobs_on_the_same_nodes_get_the_weights_of_one_process(
    per_node, cluster, trained, tmp_path
):
    """They run at once, with different seeds: none can get the gradients of another."""
    jobs = []
    for seed, (stage, torchrun) in enumerate([(SLURM, SRUN), (SIGNALS, TORCHRUN)]):
        flags = (*CPU, *DOUBLE, "--seed", seed, "--out-dir", tmp_path / f"out-{seed}")
        folder = tmp_path / f"job-{seed}"
        folder.mkdir()
        options = {"per_node": per_node, "torchrun": torchrun, "held": True}
        job = cluster.submit(stage, *flags, cwd=folder, CHECKPOINT_DIR="own", **options)
        jobs.append(job)
    cluster.call("scontrol", "release", ",".join(job.number for job in jobs))
    shown = []
    for job in jobs:
        job.wait("COMPLETED")
        shown.append(job.show())
        assert shown[-1]["NumNodes"] == "2"
    assert [each["Requeue"] for each in shown] == ["0", "1"]  # 10's file asks for it
    assert len({each["NodeList"] for each in shown}) == 1
    last_start = max(each["StartTime"] for each in shown)
    assert last_start < min(each["EndTime"] for each in shown)
    for seed, job in enumerate(jobs):
        assert job.log().count(f"{2 * per_node} processes on gloo") == 1
        # one process prints
        assert (
            len(re.findall(r"^(?:\d: )?epoch .: train", job.log(), re.MULTILINE)) == 2
        )
        flags = (*DOUBLE, "--seed", str(seed))
        on_one = trained(reference(SLURM), 1, *flags, how=train_in_forks)
        assert max_abs_diff(tmp_path / f"out-{seed}/last.pt", on_one.weights) <= 1e-10
    kept = sorted(path.name for path in tmp_path.glob("job-*/own/step-*"))
    assert kept == ["step-000000030.pt", "step-000000060.pt"]


@pytest.mark.release  # notebook 10 preempts a job on Slurm, too
@pytest.mark.fault(
    since="signals",
    what="a job is preempted by a more urgent one",
    sees="Slurm requeues it; its log says `DUE TO PREEMPTION`, and `resumed from step`"
    " when it runs again",
    lost="nothing",
)
def test_a_preempted_job_resumes_by_itself(cluster, trained, tmp_path, fault):
    flags = (*LONG, *NEVER, "--out-dir", tmp_path / "out")
    job = cluster.submit(SIGNALS, *flags, cwd=tmp_path)
    assert sorted(job.preempt()) == ["0", "1"]
    (step,) = job.steps()
    assert 0 < step < 600
    job.wait("COMPLETED")
    fault.assert_seen(job.log())
    assert f"resumed from step {step}\n" in job.log()
    assert job.show()["Restarts"] == "1"
    undisturbed = trained(SIGNALS, 2, *LONG, how=train_in_forks)
    assert max_abs_diff(tmp_path / "out/last.pt", undisturbed.weights) == 0
    for line in undisturbed.epochs:
        # The train metrics of a resumed epoch leave out the steps before.
        _, _, val = line.partition(", val ")
        assert f", val {val}\n" in job.log()


@pytest.mark.release
@pytest.mark.usefixtures("grace_time")
@pytest.mark.parametrize("torchrun", [SRUN, only_in_release(TORCHRUN)])
@pytest.mark.fault(
    since="signals",
    what="a job is preempted in a partition with a `GraceTime`",
    sees="`requeued, to resume from` in its log, and `resumed from step` when it runs"
    " again",
    lost="nothing",
)
def test_a_job_preempted_with_a_grace_time_resumes_by_itself(
    torchrun, cluster, trained, tmp_path, fault
):
    """The processes alone get SIGTERM; Slurm before 24.05 would not requeue it."""
    flags = (*LONG, *NEVER, "--out-dir", tmp_path / "out")
    job = cluster.submit(SIGNALS, *flags, torchrun=torchrun, cwd=tmp_path)
    job.preempt()
    (step,) = job.steps()
    assert 0 < step < 600
    job.wait("COMPLETED")
    fault.assert_seen(job.log())
    assert job.log().count(f"resumed from step {step}\n") == 1
    assert job.show()["Restarts"] == "1"
    undisturbed = trained(SIGNALS, 2, *LONG, how=train_in_forks)
    assert max_abs_diff(tmp_path / "out/last.pt", undisturbed.weights) == 0


@pytest.mark.release
@pytest.mark.fault(
    since="signals",
    what="a rank of a job is killed, with one torchrun on each node",
    sees="`failed (exitcode: -9)` in the job's log, then `resumed from step`; in the"
    " end the job's state is COMPLETED",
    lost="the steps since the last checkpoint, which are done again",
)
def test_torchruns_on_two_nodes_restart_a_killed_rank(
    cluster, trained, tmp_path, fault
):
    """Before that, the job is told that its time is nearly over, and is requeued."""
    flags = (*LONG, *NEVER, "--out-dir", tmp_path / "out")
    job = cluster.submit(SIGNALS, *flags, torchrun=TORCHRUN, cwd=tmp_path)
    with job.stopped_until_sigterm():
        job.send_time_limit_signal()
    (step,) = job.steps()
    assert 0 < step < 600
    # Not job.wait_for, which also asks Slurm: the run has a few seconds left.
    wait_until(lambda: f"resumed from step {step}\n" in job.log(), commands.LIMIT)
    job.ranks()["1"].kill()
    job.wait("COMPLETED")
    fault.assert_seen(job.log())
    assert job.log().count("the time is nearly over") == 1
    assert job.log().count("2 processes on gloo") == 3
    assert job.log().count(f"resumed from step {step}\n") == 2
    assert job.show()["Restarts"] == "1"
    undisturbed = trained(SIGNALS, 2, *LONG, how=train_in_forks)
    assert max_abs_diff(tmp_path / "out/last.pt", undisturbed.weights) == 0


@pytest.mark.release
@pytest.mark.fault(
    since="signals",
    what="a job needs more time than its limit",
    sees="`the time is nearly over` in its log; it is requeued, and says `resumed from"
    " step` when it runs again (a job that does not act on the signal: `DUE TO TIME"
    " LIMIT`; its state is TIMEOUT, and it is not requeued)",
    lost="nothing (without the signal: the steps since the last checkpoint)",
)
def test_a_job_that_needs_more_time_than_it_gets_resumes_by_itself(
    cluster, tmp_path, fault
):
    """Their time is cut while they run; Slurm looks at the clock every 30 seconds.

    The job file wants its signal five minutes before the end, so it is due when the
    limit is 6 minutes, and does not come before. Then a job without the signal has the
    nodes, until the first one has its four hours again.
    """
    job = cluster.submit(SIGNALS, *LONG, *NEVER, *ENDLESS, cwd=tmp_path)
    ranks = job.ready_ranks()
    words = ["--nodes=2", "--exclusive", "--requeue", "--priority=4294967293"]
    without_signal = cluster.sbatch(*words, "--wrap=sleep 1000", cwd=tmp_path)
    assert job.show()["TimeLimit"] == "04:00:00"
    assert "the time is nearly over" not in job.log()
    cluster.update(f"JobId={job.number}", "TimeLimit=6")
    job.wait_for("the time is nearly over")
    assert_gone(ranks.values(), [], commands.LIMIT)
    without_signal.wait("RUNNING")
    assert job.show()["JobState"] == "PENDING"
    cluster.update(f"JobId={job.number}", "TimeLimit=240")
    cluster.update(f"JobId={without_signal.number}", "EndTime=now")
    without_signal.wait("TIMEOUT")
    assert without_signal.show()["Restarts"] == "0"
    step = job.steps()[-1]
    job.wait_for(f"resumed from step {step}\n")
    assert job.log().count("2 processes on gloo") == 2
    assert "DUE TO TIME LIMIT" not in job.log()
    assert job.show()["Restarts"] == "1"
    fault.assert_seen(job.log() + without_signal.log())


@pytest.mark.release
def test_a_signal_to_one_task_of_an_array_does_not_requeue_the_others(
    cluster, tmp_path
):
    """The task whose SLURM_JOB_ID is the number of the array gets it."""
    words = ("--array=1-2", "--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=1")
    words = (*words, "--cpus-per-task=1", ROOT / SIGNALS / "job.sbatch")
    script = ROOT / SIGNALS / "train.py"
    flags = (*LONG, *NEVER, *ENDLESS)
    array = cluster.sbatch(*words, *flags, cwd=tmp_path, SCRIPT=script).number
    tasks = [SlurmJob(cluster, f"{array}_{n}", tmp_path) for n in (1, 2)]
    for task in tasks:
        task.wait("RUNNING")
    ids = [task.show()["JobId"] for task in tasks]
    first = ids.index(array)
    for number in ids:  # the environment has it, and the log's name, without underscore
        SlurmJob(cluster, number, tmp_path).ready_ranks(1)
    cluster.call("scancel", "--batch", "--signal=USR1", f"{array}_{first + 1}")
    log = SlurmJob(cluster, array, tmp_path).log
    wait_until(lambda: "requeued, to" in log(), commands.LIMIT, log, EVERY)
    folder = tmp_path / f"checkpoints-{array}_{first + 1}"
    assert len(list(folder.glob("step-*"))) == 1
    shown = [task.show() for task in tasks]
    assert shown[first]["Restarts"] == "1"
    other = shown[1 - first]
    assert (other["JobState"], other["Restarts"]) == ("RUNNING", "0")


@pytest.mark.usefixtures("grace_time")
def test_a_job_preempted_while_it_loads_is_requeued(cluster, tmp_path):
    """It has no checkpoint; that it was preempted is not its fault."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "print('loading', flush=True)\n"
        "time.sleep(0 if 'SLURM_RESTART_COUNT' in os.environ else 1000)\n"
    )
    job = cluster.submit(SIGNALS, cwd=tmp_path, SCRIPT=script)
    job.wait_for("loading", times=2)
    cluster.submit_urgent()
    job.wait("COMPLETED")
    assert "requeued, to resume from its beginning" in job.log()
    assert job.show()["Restarts"] == "1"


@pytest.mark.release
@pytest.mark.parametrize("saves", [True, False])
def test_a_job_is_requeued_if_it_has_saved_something(saves, cluster, tmp_path):
    """A new checkpoint, by its time, not by its name: that of step 9 may be corrupt.

    Otherwise a job that never gets as far as a checkpoint would be requeued forever.
    """
    script, saved = tmp_path / "train.py", tmp_path / "own"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    if {saves}:\n"
        "        pathlib.Path(sys.argv[2], 'step-000000008.pt').touch()\n"
        "    pathlib.Path(sys.argv[2], '.step-000000008.pt.1.tmp').touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('training', flush=True)\n"
        "time.sleep(0 if 'SLURM_RESTART_COUNT' in os.environ else 1000)\n"
    )
    saved.mkdir()
    for name in ("step-000000009.pt", "step-best.pt"):
        (saved / name).write_text("not a checkpoint")
    job = cluster.submit(SIGNALS, cwd=tmp_path, SCRIPT=script, CHECKPOINT_DIR="own")
    job.wait_for("training", times=2)
    job.send_time_limit_signal()
    job.wait("COMPLETED" if saves else "FAILED")
    assert "the time is nearly over" in job.log()
    resumes = "requeued, to resume from own/step-000000008.pt" in job.log()
    assert resumes == saves == (job.show()["Restarts"] == "1")


def test_a_flag_that_the_job_file_sets_itself_is_refused(tmp_path):
    """Otherwise it would be ignored, and the checkpoints would be elsewhere."""
    words = ["bash", ROOT / SIGNALS / "job.sbatch", "--checkpoint-dir=mine"]
    done = commands.run(words, code=2, cwd=tmp_path, SLURM_JOB_ID="1")
    (line,) = done.stderr.splitlines()
    assert line.startswith("CHECKPOINT_DIR=... in front of sbatch names the directory")
    assert not list(tmp_path.iterdir())


# ---- jobs that end early -------------------------------------------------------------
@pytest.mark.release
@pytest.mark.fault(
    since="slurm",
    without="signals",
    what="a rank of a job is killed",
    sees="the job's state FAILED, and in its log which task it was: `srun: error: ..."
    " task`",
    lost="the run; in stage {checkpoints} the steps since the last checkpoint",
)
def test_a_rank_that_is_killed_fails_the_job(cluster, tmp_path, fault):
    job = cluster.submit(SLURM, *CPU, *ENDLESS, cwd=tmp_path)
    job.wait_for("epoch 2: ")
    ranks = job.ranks()
    assert sorted(ranks) == ["0", "1"]
    ranks["1"].kill()
    job.wait("FAILED")
    fault.assert_seen(job.log())
    assert_gone(ranks.values(), [], commands.LIMIT)


@pytest.mark.release
@pytest.mark.fault(
    since="slurm",
    what="a job is cancelled with scancel",
    sees="the job's state CANCELLED, and `CANCELLED` in its log; no process and no port"
    " of it is left",
    lost="the run; in stage {checkpoints} the steps since the last checkpoint; from"
    " stage {signals} on nothing",
)
@pytest.mark.parametrize("torchrun", [TORCHRUN, SRUN])
def test_scancel_leaves_nothing_behind(torchrun, cluster, tmp_path, fault):
    """The jobs train another stage, as the variable SCRIPT says."""
    script = str(ROOT / first_with("exact_eval") / "train.py")
    flags = (*CPU, *ENDLESS)
    options = {"torchrun": torchrun, "cwd": tmp_path, "SCRIPT": script}
    job = cluster.submit(SLURM, *flags, **options)
    job.wait_for("epoch 2: ")
    ranks = job.ranks()
    assert len(ranks) == 2
    assert all(script in rank.cmdline() for rank in ranks.values())
    cluster.call("scancel", job.number)
    job.wait("CANCELLED")
    rank_0s_port = 10000 + int(job.number) % 20000
    assert_gone(ranks.values(), [rank_0s_port], commands.LIMIT)
    fault.assert_seen(job.log())
    assert cluster.call("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    "stage, torchrun",
    [(SLURM, SRUN), (SIGNALS, SRUN), only_in_release(SIGNALS, TORCHRUN)],
)
def test_no_rank_waits_for_one_that_has_failed(stage, torchrun, cluster, tmp_path):
    """The other one never notices by itself: only --kill-on-bad-exit ends it.

    srun is then in a hurry: what the rank printed last may not reach the job's log, but
    it is in a file that its node writes.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "rank = os.environ.get('RANK', os.environ['SLURM_PROCID'])\n"
        "time.sleep(1000 if rank == '0' else 0)\n"
        "sys.exit('rank 1 has failed')\n"
    )
    own = "--error=slurm-%j-%t.err"
    options = {"torchrun": torchrun, "srun": own, "cwd": tmp_path, "SCRIPT": script}
    job = cluster.submit(stage, **options)
    job.wait("FAILED")
    assert re.search("srun: error: .*: task .: Exited with exit code 1", job.log())
    files = [tmp_path / f"slurm-{job.number}-{task}.err" for task in (0, 1)]
    assert "rank 1 has failed" in "".join(file.read_text() for file in files)
    assert job.ranks() == {}


@pytest.mark.release
def test_a_script_that_reads_torchruns_names_trains_under_srun(
    cluster, trained, tmp_path
):
    """By recipes/ranks_from_srun.sh, in the place of `python` in the job file."""
    file, recipe = ROOT / SLURM / "job.sbatch", ROOT / "recipes/ranks_from_srun.sh"
    replaced = file.read_text().replace("  python ", f"  bash {recipe} python ")
    (tmp_path / "job.sbatch").write_text(replaced)
    stage = first_with("torchrun")
    words = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1"]
    words += ["job.sbatch", *CPU, *DOUBLE, "--out-dir", "out"]
    job = cluster.sbatch(*words, cwd=tmp_path, SCRIPT=ROOT / stage / "train.py")
    job.wait("COMPLETED")
    assert job.log().count("2 processes on gloo") == 1
    on_one = trained(reference(SLURM), 1, *DOUBLE, how=train_in_forks)
    assert max_abs_diff(tmp_path / "out/last.pt", on_one.weights) <= 1e-10


@pytest.mark.parametrize("stage", [SLURM, SIGNALS])
def test_without_srun_the_shell_of_a_job_is_no_launcher(stage, tmp_path):
    """Its variables name a task, but only srun says how many tasks there are."""
    variables = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    variables |= {"SLURM_NTASKS": "2", "forks": True}
    words = ["python", ROOT / stage / "train.py", *CPU]
    done = commands.run(words, tmp_path, code=2, **variables)
    command = f"start with sbatch {stage}/job.sbatch or torchrun "
    assert_one_error_line(done, f"RANK is not set; a launcher sets it: {command}")
