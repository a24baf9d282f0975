"""The job files of the stages 06 and 10 on a real Slurm, and the local cluster itself.

The first three tests belong together: while a job that was preempted waits for its next
start, which Slurm delays, others run.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from nbtools.lesson import max_abs_diff
from tests.harness import ENDLESS
from tests.harness import ROOT
from tests.harness import assert_gone
from tests.harness import assert_one_error_line
from tests.harness import environment
from tests.harness import fork
from tests.harness import little_work
from tests.harness import missing_for_slurm
from tests.harness import train_in_forks
from tests.harness import wait_until

SLURM = "06_slurm"
PREEMPTION = "10_preemption"
SHARDED = "13_sharded_checkpoints"
JOB, TORCHRUN = "job.sbatch", "job_torchrun.sbatch"
CPU = ("--device", "cpu")
DOUBLE = ("--dtype", "float64", "--epochs", "2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.fixture(autouse=True, scope="module")
def slurm():
    if missing_for_slurm():
        assert "REQUIRE_SLURM" not in os.environ, missing_for_slurm()
        pytest.skip(missing_for_slurm())


def free_ports(count):
    """Return the first of so many free ports in a row.

    They are below those that the kernel gives to the connections of other tests, one of
    which could take a port before a daemon does.
    """
    while True:
        first = random.randrange(20_000, 30_000, count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                one = stack.enter_context(socket.socket())
                one.bind(("127.0.0.1", port))
            return first


class Cluster:
    """A local cluster of the tests' own, with a folder and ports of its own."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.port = free_ports(3)
        self.variables = environment(
            LOCAL_CLUSTER=str(folder),
            LOCAL_CLUSTER_PORT=str(self.port),
            SLURM_CONF=f"{folder}/slurm.conf",
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )

    def call(self, *arguments, check=True, variables=None, **options):
        """Run a command for this cluster; return the CompletedProcess."""
        options = {"capture_output": True, "text": True, "timeout": 60, **options}
        variables = {**self.variables, **(variables or {})}
        return subprocess.run(arguments, check=check, env=variables, **options)

    def script(self, what, check=True):
        """Run tools/local_slurm.sh; with `check`, it has to succeed."""
        words = ["bash", ROOT / "tools/local_slurm.sh", what]
        done = self.call(*words, check=False, timeout=180)
        assert not check or done.returncode == 0, done.stderr
        return done

    def members(self):
        """Return the processes that hold one of the cluster's files open."""
        found = []
        for process in psutil.process_iter():
            try:
                links = [*Path(f"/proc/{process.pid}/fd").iterdir()]
                files = [link.readlink() for link in links]
            except OSError:
                continue
            if any(self.folder in file.parents for file in files):
                found.append(process)
        return found

    def submit(self, stage, name, *flags, per_node=1, cwd, **variables):
        """Submit a stage's job file from the folder `cwd`; return the job.

        It gets two nodes, and `per_node` processes on each. The result has its `number`
        and the path of its `log`.
        """
        option = "--cpus-per-task" if name == TORCHRUN else "--ntasks-per-node"
        words = ["sbatch", "--parsable", f"{option}={per_node}", ROOT / stage / name]
        done = self.call(*words, *map(str, flags), cwd=cwd, variables=variables)
        number = done.stdout.strip()
        return types.SimpleNamespace(
            number=number,
            log=Path(cwd, f"slurm-{number}.out"),
            checkpoints=Path(cwd, f"checkpoints-{number}"),
        )

    def show(self, job):
        """Return what Slurm says of a job, as a dict."""
        text = self.call("scontrol", "show", "job", job.number).stdout
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def wait(self, job, *states, seconds=300):
        """Wait until a job is in one of the states; return which."""

        def state():
            now = self.show(job)["JobState"]
            return now if now in states else None

        return wait_until(state, seconds, lambda: log_of(job), every=0.1)

    def wait_for(self, job, text, times=1, seconds=300):
        """Wait until a job has written a text into its log so many times."""

        def seen():
            state = self.show(job)["JobState"]  # before the last look at the log
            if log_of(job).count(text) >= times:
                return True
            assert state in ("PENDING", "RUNNING", "COMPLETING"), log_of(job)
            return False

        wait_until(seen, seconds, lambda: log_of(job), every=0.1)

    def ranks(self, job):
        """Return the job's processes that train, by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                words, variables = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            launches = (
                "torch.distributed.run" in words or "SLURM_STEP_ID" not in variables
            )
            if launches or variables.get("SLURM_JOB_ID") != job.number:
                continue
            if "train.py" in " ".join(words):
                found[variables.get("RANK", variables.get("SLURM_PROCID"))] = process
        return found

    def ranks_that_catch_signals(self, job):
        """Return `ranks` as soon as a signal does not kill any of them."""

        def found():
            ranks = self.ranks(job)
            return all(map(catches_sigterm, ranks.values())) and ranks

        return wait_until(found, 60, lambda: log_of(job), every=0.1)

    def preempt(self, job):
        """Have a more urgent job take a job's nodes; return when it waits for them."""
        words = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2"]
        words += ["--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        ranks = self.ranks_that_catch_signals(job)
        self.call(*words)
        self.wait(job, "PENDING")
        assert_gone(ranks.values(), [], 60)
        return ranks

    def send_time_limit_signal(self, job):
        """Send the signal that Slurm sends to a job before its time is over."""
        self.call("scancel", "--batch", "--signal=USR1", job.number)


def catches_sigterm(process):
    """Return whether a process has a handler for SIGTERM; see proc(5)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def log_of(job):
    return job.log.read_text() if job.log.exists() else ""


def steps_of(job):
    """Return the steps of a job's checkpoints, the latest last."""
    return sorted(int(path.stem[5:]) for path in job.checkpoints.glob("step-*"))


@pytest.fixture(scope="module")
def cluster(slurm):  # noqa: ARG001
    one = Cluster("/run/local_cluster_of_the_tests")
    one.script("stop")  # what a killed test run left
    assert one.script("start").stdout.startswith("started\n")
    yield one
    one.script("stop")


@pytest.fixture
def other():
    one = Cluster("/run/local_cluster_of_the_tests_2")
    one.script("stop")
    yield one
    one.script("stop")


# ---- jobs train to the same weights, preempted or not --------------------------------
# One epoch of 600 steps, so that a job that is stopped has only the checkpoint that it
# writes then.
LONG = ("--data", "fake", "--image-size", "8", "--images", "36000", "--epochs", "1")
NEVER = ("--checkpoint-every", "1000000", *CPU)


@pytest.fixture(scope="module")
def preempted(cluster, tmp_path_factory):
    """A job that a more urgent one has taken the nodes from; it waits for them."""
    folder = tmp_path_factory.mktemp("preempted")
    flags = (*LONG, *NEVER, "--out-dir", folder / "out")
    job = cluster.submit(PREEMPTION, JOB, *flags, cwd=folder)
    cluster.wait_for(job, "2 processes on gloo")
    job.ranks = cluster.preempt(job)
    job.steps = steps_of(job)
    return job


def test_a_preempted_job_saves_a_checkpoint_and_ends(preempted):
    assert sorted(preempted.ranks) == ["0", "1"]
    (step,) = preempted.steps
    assert 0 < step < 600


JOBS = [(SLURM, JOB), (SLURM, TORCHRUN), (PREEMPTION, TORCHRUN)]


@pytest.mark.parametrize(
    "per_node, files",
    [(1, JOBS), pytest.param(2, JOBS[:2], marks=pytest.mark.sweep)],
)
def test_jobs_on_the_same_nodes_get_the_weights_of_stage_01(
    per_node, files, cluster, trained, tmp_path
):
    """They run at once, with different seeds: none can get the gradients of another."""
    jobs = []
    for seed, (stage, name) in enumerate(files):
        out = tmp_path / f"out-{seed}"
        flags = (*CPU, *DOUBLE, "--seed", seed, "--out-dir", out)
        options = {"CHECKPOINT_DIR": f"own-{seed}"} if stage == PREEMPTION else {}
        where = {"per_node": per_node, "cwd": tmp_path}
        jobs.append(cluster.submit(stage, name, *flags, **where, **options))
    shown = []
    for job in jobs:
        assert cluster.wait(job, *ENDED) == "COMPLETED", log_of(job)
        shown.append(cluster.show(job))
        assert (shown[-1]["NumNodes"], shown[-1]["Requeue"]) == ("2", "1")
    assert len({one["NodeList"] for one in shown}) == 1
    last_start = max(one["StartTime"] for one in shown)
    assert last_start < min(one["EndTime"] for one in shown)
    for seed, job in enumerate(jobs):
        log = log_of(job)
        assert log.count(f"{2 * per_node} processes on gloo") == 1
        assert len(re.findall("^epoch .: train", log, re.M)) == 2  # one process prints
        flags = (*DOUBLE, "--seed", str(seed))
        reference = trained("01_single_gpu", 1, *flags, how=train_in_forks)
        ours = tmp_path / f"out-{seed}/last.pt"
        assert max_abs_diff(ours, reference.weights) <= 1e-10
    kept = sorted(path.name for path in tmp_path.glob("own-2/*"))
    assert kept == ["step-000000025.pt", "step-000000050.pt"] * (files == JOBS)


@pytest.mark.fault(
    stages="10 to 13",
    what="a job is preempted by a more urgent one",
    sees="Slurm requeues it; its log says `DUE TO PREEMPTION`, and `resumed from step`"
    " when it runs again",
    seconds=120,
    lost="nothing",
)
def test_a_preempted_job_resumes_by_itself(preempted, cluster, trained, fault):
    state = cluster.wait(preempted, *ENDED, seconds=fault.seconds)
    log = log_of(preempted)
    assert state == "COMPLETED", log
    fault.assert_seen(log)
    assert f"resumed from step {preempted.steps[-1]}\n" in log
    assert cluster.show(preempted)["Restarts"] == "1"
    reference = trained(PREEMPTION, 2, *LONG, how=train_in_forks)
    weights = preempted.log.parent / "out/last.pt"
    assert max_abs_diff(weights, reference.weights) == 0
    for line in reference.epochs:
        assert f"{line}\n" in log


def requeued_before_its_time_is_over(cluster, name, folder):
    """Submit a job and send it the signal; return it and the line of its next start."""
    flags = (*LONG, *NEVER, "--out-dir", folder / "out")
    job = cluster.submit(PREEMPTION, name, *flags, cwd=folder)
    cluster.wait_for(job, "2 processes on gloo")
    ranks = cluster.ranks_that_catch_signals(job)
    cluster.send_time_limit_signal(job)
    assert cluster.wait(job, "PENDING", "FAILED") == "PENDING", log_of(job)
    assert_gone(ranks.values(), [], 60)
    (step,) = steps_of(job)
    assert 0 < step < 600
    return job, f"resumed from step {step}\n"


@pytest.mark.sweep
def test_before_its_time_is_over_a_job_is_requeued_and_resumes(
    cluster, trained, tmp_path
):
    """The signal is sent by hand, so that the run can be a short one, and compared."""
    job, resumed = requeued_before_its_time_is_over(cluster, JOB, tmp_path)
    assert cluster.wait(job, *ENDED, seconds=120) == "COMPLETED", log_of(job)
    log = log_of(job)
    assert log.count("the time is nearly over") == 1
    assert log.count("2 processes on gloo") == 2
    assert log.count(resumed) == 1
    assert cluster.show(job)["Restarts"] == "1"
    reference = trained(PREEMPTION, 2, *LONG, how=train_in_forks)
    assert max_abs_diff(tmp_path / "out/last.pt", reference.weights) == 0


@pytest.mark.sweep
def test_a_preempted_job_with_shards_resumes_on_as_many_tasks_and_on_others(
    cluster, trained, tmp_path
):
    """While it waits for its nodes, its checkpoints are copied for a job of four."""
    work = little_work(SHARDED, 4800)
    flags = (*work.flags, *DOUBLE[:2], "--epochs", "1", "--batch-size", "12")
    own = (*flags, *CPU, "--async-save", "--checkpoint-every", "20")
    script = {"SCRIPT": str(ROOT / SHARDED / "train.py")}

    def submit(per_node, **options):
        out = tmp_path / f"out-{per_node}"
        where = {"per_node": per_node, "cwd": tmp_path}
        flags = (*own, "--out-dir", out)
        return cluster.submit(PREEMPTION, JOB, *flags, **where, **script, **options)

    job = submit(1)
    wait_until(lambda: steps_of(job), 120, lambda: log_of(job))
    assert sorted(cluster.preempt(job)) == ["0", "1"]
    step = steps_of(job)[-1]
    assert 20 <= step < 400
    shutil.copytree(job.checkpoints, tmp_path / "copy")
    other = submit(2, CHECKPOINT_DIR="copy")
    for one, processes, most in ((job, 2, 0), (other, 4, 1e-10)):
        assert cluster.wait(one, *ENDED) == "COMPLETED", log_of(one)
        resumed = f"{processes} processes on gloo\nresumed from step {step}\n"
        assert resumed in log_of(one)
        reference = trained(SHARDED, 2, *flags, how=train_in_forks)
        weights = tmp_path / f"out-{processes // 2}/last.pt"
        assert max_abs_diff(weights, reference.weights) <= most
    assert "DUE TO PREEMPTION" in log_of(job)
    assert cluster.show(job)["Restarts"] == "1"
    assert steps_of(job) == [380, 400]


@pytest.fixture
def limited(cluster, tmp_path):
    """Two jobs without an end, which have a minute each, the shortest limit there is.

    The first gets the signal before its minute is over, and the second does not. Slurm
    compares times every 30 seconds, and sends a signal as soon as the next time might
    be too late. So one that is wanted a second before the end comes 1 to 31 seconds
    before it, and in any case 30 seconds before the job is killed.
    """
    variables = {"SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "B:USR1@1"}
    flags = (*LONG, *NEVER, *ENDLESS)
    first = cluster.submit(PREEMPTION, JOB, *flags, cwd=tmp_path, **variables)
    words = ["sbatch", "--parsable", "--time=1", "--requeue", "--wrap=sleep 1000"]
    number = cluster.call(*words, cwd=tmp_path).stdout.strip()
    log = tmp_path / f"slurm-{number}.out"
    second = types.SimpleNamespace(number=number, log=log)
    yield first, second
    cluster.call("scancel", first.number, second.number)


@pytest.mark.sweep
@pytest.mark.fault(
    stages="10",
    what="a job needs more time than its limit, in the test a real one of a minute",
    sees="`the time is nearly over` in its log; it is requeued, and says `resumed from"
    " step` when it runs again (a job that does not act on the signal: `DUE TO TIME"
    " LIMIT`; its state is TIMEOUT, and it is not requeued)",
    seconds=180,
    lost="nothing (without the signal: the steps since the last checkpoint)",
)
def test_a_job_that_needs_more_time_than_it_gets_resumes_by_itself(
    limited, cluster, fault
):
    job, other = limited
    assert cluster.show(job)["TimeLimit"] == "00:01:00"
    cluster.wait_for(job, "the time is nearly over", seconds=120)
    state = cluster.wait(job, "PENDING", "FAILED", "TIMEOUT")
    assert state == "PENDING", log_of(job)
    step = steps_of(job)[-1]
    cluster.wait_for(job, f"resumed from step {step}\n", seconds=fault.seconds)
    assert log_of(job).count("2 processes on gloo") == 2
    assert "DUE TO TIME LIMIT" not in log_of(job)
    assert cluster.show(job)["Restarts"] == "1"
    assert cluster.wait(other, "TIMEOUT", "FAILED", "PENDING") == "TIMEOUT"
    assert cluster.show(other)["Restarts"] == "0"
    fault.assert_seen(log_of(job) + log_of(other))


@pytest.mark.sweep
@pytest.mark.fault(
    stages="10",
    what="a rank of a job is killed, with job_torchrun.sbatch",
    sees="`failed (exitcode: -9)` in the job's log, then `resumed from step`; in the"
    " end the job's state is COMPLETED",
    seconds=120,
    lost="the steps since the last checkpoint, which are done again",
)
def test_torchruns_on_two_nodes_restart_a_killed_rank(
    cluster, trained, tmp_path, fault
):
    """The job has been requeued before that, as above."""
    job, resumed = requeued_before_its_time_is_over(cluster, TORCHRUN, tmp_path)
    cluster.wait_for(job, resumed, seconds=fault.seconds)
    cluster.ranks(job)["1"].kill()
    assert cluster.wait(job, *ENDED, seconds=fault.seconds) == "COMPLETED", log_of(job)
    log = log_of(job)
    fault.assert_seen(log)
    assert log.count("2 processes on gloo") == 3
    assert log.count(resumed) == 2
    reference = trained(PREEMPTION, 2, *LONG, how=train_in_forks)
    assert max_abs_diff(tmp_path / "out/last.pt", reference.weights) == 0


@pytest.mark.sweep
def test_a_job_that_saved_nothing_is_not_requeued(cluster, tmp_path):
    """It would be requeued forever: its processes are still importing torch."""
    job = cluster.submit(PREEMPTION, JOB, *CPU, cwd=tmp_path)
    cluster.wait(job, "RUNNING")
    time.sleep(1)
    cluster.send_time_limit_signal(job)
    assert cluster.wait(job, "FAILED", "PENDING", "COMPLETED") == "FAILED"
    assert "the time is nearly over" in log_of(job)
    assert steps_of(job) == []


@pytest.mark.sweep
@pytest.mark.fault(
    stages="06 to 08",
    what="a job's time is nearly over (in the test the signal is sent by hand)",
    sees="`the time is nearly over` in its log; it is requeued, once, and starts over",
    seconds=60,
    lost="the run so far",
)
def test_before_its_time_is_over_a_job_starts_over_once(cluster, tmp_path, fault):
    flags = (*CPU, "--epochs", 60)
    job = cluster.submit(SLURM, JOB, *flags, cwd=tmp_path)
    cluster.wait_for(job, "epoch 2: ")
    ranks = cluster.ranks(job)
    cluster.send_time_limit_signal(job)
    cluster.wait_for(job, "the time is nearly over")
    cluster.wait(job, "PENDING")
    assert_gone(ranks.values(), [], 60)
    cluster.wait(job, "RUNNING", seconds=fault.seconds)
    fault.assert_seen(log_of(job))
    cluster.wait_for(job, "epoch 1: ", times=2)
    assert cluster.show(job)["Restarts"] == "1"
    cluster.send_time_limit_signal(job)
    assert cluster.wait(job, "FAILED", "PENDING") == "FAILED"


# ---- jobs that end early -------------------------------------------------------------
@pytest.mark.sweep
@pytest.mark.fault(
    stages="06 to 09",
    what="a rank of a job is killed",
    sees="the job's state FAILED, and in its log which task it was: `srun: error: ..."
    " task`",
    seconds=60,
    lost="the run; in stage 09 the steps since the last checkpoint",
)
@pytest.mark.parametrize("name", [JOB, TORCHRUN])
def test_a_rank_that_is_killed_fails_the_job(name, cluster, tmp_path, fault):
    job = cluster.submit(SLURM, name, *CPU, *ENDLESS, cwd=tmp_path)
    cluster.wait_for(job, "epoch 2: ")
    ranks = cluster.ranks(job)
    assert sorted(ranks) == ["0", "1"]
    ranks["1"].kill()
    state = cluster.wait(job, "FAILED", "COMPLETED", seconds=fault.seconds)
    assert state == "FAILED"
    fault.assert_seen(log_of(job))
    assert_gone(ranks.values(), [], 60)


@pytest.mark.sweep
@pytest.mark.fault(
    stages="06 to 10",
    what="a job is cancelled with scancel",
    sees="the job's state CANCELLED, and `CANCELLED` in its log; no process and no port"
    " of it is left",
    seconds=60,
    lost="the run; in stage 09 the steps since the last checkpoint; in stage 10"
    " nothing",
)
@pytest.mark.parametrize("name", [JOB, TORCHRUN])
def test_scancel_leaves_nothing_behind(name, cluster, tmp_path, fault):
    """The jobs train another stage, as the variable SCRIPT says."""
    script = str(ROOT / "07_distributed_eval/train.py")
    flags = (*CPU, *ENDLESS)
    job = cluster.submit(SLURM, name, *flags, cwd=tmp_path, SCRIPT=script)
    cluster.wait_for(job, "epoch 2: ")
    ranks = cluster.ranks(job)
    assert len(ranks) == 2
    assert all(script in rank.cmdline() for rank in ranks.values())
    cluster.call("scancel", job.number)
    assert cluster.wait(job, "CANCELLED", seconds=fault.seconds) == "CANCELLED"
    rank_0s_port = 10000 + int(job.number) % 20000
    assert_gone(ranks.values(), [rank_0s_port], 60)
    fault.assert_seen(log_of(job))
    assert cluster.call("squeue", "--noheader").stdout == ""


def test_a_job_file_that_cannot_find_the_script_says_so(cluster, tmp_path):
    words = ["sbatch", "--parsable", "--output=slurm-%j.out"]
    with (ROOT / SLURM / JOB).open() as file:
        number = cluster.call(*words, stdin=file, cwd=tmp_path).stdout.strip()
    job = types.SimpleNamespace(number=number, log=tmp_path / f"slurm-{number}.out")
    assert cluster.wait(job, "FAILED", "COMPLETED") == "FAILED"
    assert "set SCRIPT to its path" in log_of(job)
    assert cluster.show(job)["ExitCode"] == "2:0"


# ---- the variables that srun sets ----------------------------------------------------
@pytest.mark.parametrize("stage", [SLURM, PREEMPTION])
def test_without_srun_the_shell_of_a_job_is_no_launcher(stage, tmp_path):
    """Its variables name a task, but only srun says how many tasks there are."""
    variables = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    variables["SLURM_NTASKS"] = "2"
    done = fork(ROOT / stage / "train.py", [*CPU], tmp_path, **variables)()
    command = f"start with sbatch {stage}/job.sbatch or torchrun "
    assert_one_error_line(done, f"RANK is not set; a launcher sets it: {command}")


# ---- the local cluster ---------------------------------------------------------------
def test_the_cluster_listens_on_loopback_only(cluster):
    members = cluster.members()
    names = {process.name() for process in members}
    assert names >= {"munged", "slurmctld", "slurmd"}
    listening = [
        connection.laddr
        for process in members
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) == 3
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert {address.port for address in listening} == {
        cluster.port + n for n in range(3)
    }


def test_starting_it_again_changes_nothing(cluster):
    before = {process.pid for process in cluster.members()}
    assert cluster.script("start").stdout.startswith("it is running already\n")
    assert {process.pid for process in cluster.members()} == before
    assert "idle node[1-2]" in cluster.script("status").stdout


@pytest.mark.sweep
def test_one_cluster_leaves_another_alone_and_no_trace(cluster, other):
    assert other.script("status", check=False).returncode == 1
    assert other.script("start").stdout.startswith("started\n")
    steps = subprocess.Popen(
        ["srun", "--nodes=2", "sleep", "1000"],
        env=other.variables,
        stderr=subprocess.DEVNULL,
    )
    # the four daemons, and on each node the one that starts the tasks
    wait_until(lambda: len(other.members()) >= 6, 30, every=0.1)
    members = other.members()
    processes = psutil.process_iter(["cmdline"])
    sleeping = [p for p in processes if "1000" in (p.info["cmdline"] or [])]
    assert len(sleeping) >= 2
    assert other.script("stop").stdout == "stopped\n"
    assert steps.wait(10) != 0
    assert_gone([*members, *sleeping], [other.port + n for n in range(3)], 1)
    assert not other.folder.exists()
    assert other.script("stop").stdout == "stopped\n"
    assert "idle node[1-2]" in cluster.script("status").stdout


@pytest.mark.parametrize(
    "what, named",
    [
        ("start", "was not made by this script"),
        ("stop", "was not made by this script"),
        ("restart", "restart is not one of start, status and stop"),
    ],
)
def test_a_wrong_call_of_the_cluster_touches_nothing(what, named, tmp_path):
    (tmp_path / "mine").write_text("keep me")
    done = Cluster(tmp_path).script(what, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("local_slurm.sh: error: ")
    assert named in line
    assert (tmp_path / "mine").read_text() == "keep me"


def test_a_cluster_without_slurm_names_the_packages(tmp_path):
    for program in ("bash", "id", "dirname", "flock", "realpath"):
        (tmp_path / program).symlink_to(shutil.which(program))
    one = Cluster(tmp_path / "none")
    one.variables["PATH"] = str(tmp_path)
    done = one.script("start", check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("type: apt-get install slurmctld slurmd slurm-client munge")
