"""Stage 06 on a real Slurm: the local cluster, both job files, and what ends a job."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from nbtools.lesson import max_abs_diff
from tests.harness import ROOT
from tests.harness import environment
from tests.harness import fork
from tests.harness import free_port
from tests.harness import missing_for_slurm
from tests.harness import train_in_forks
from tests.test_rank_failures import ENDLESS
from tests.test_rank_failures import alive
from tests.test_rank_failures import answers

import psutil
import pytest

STAGE = ROOT / "06_slurm"
DOUBLE = ("--dtype", "float64", "--epochs", "2")


@pytest.fixture(autouse=True, scope="module")
def slurm():
    if missing_for_slurm():
        assert "REQUIRE_SLURM" not in os.environ, missing_for_slurm()
        pytest.skip(missing_for_slurm())


class Cluster:
    """A local cluster of the test's own: `folder` and ports are no one else's."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.port = int(free_port()) // 10 * 10  # the next two are hardly ever in use
        self.variables = environment(
            LOCAL_CLUSTER=str(folder),
            LOCAL_CLUSTER_PORT=str(self.port),
            SLURM_CONF=f"{folder}/slurm.conf",
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )

    def call(self, *arguments, check=True, **options):
        """Run a command that shall see this cluster; return the CompletedProcess."""
        options = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(arguments, check=check, env=self.variables, **options)

    def script(self, what, check=True):
        return self.call("bash", ROOT / "tools/local_slurm.sh", what, check=check)

    def members(self):
        """Return the processes that hold one of the cluster's files open."""
        found = []
        for process in psutil.process_iter():
            try:
                files = [link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            except OSError:
                continue
            if any(self.folder in file.parents for file in files):
                found.append(process)
        return found

    def submit(self, name, *flags, per_node=1, cwd, stage=STAGE, **variables):
        """Submit a stage's job file from the folder `cwd`; return the job's number and its log.

        It has two nodes; per_node: processes on each.
        """
        self.variables.update(variables)
        option = "--cpus-per-task" if "torchrun" in name else "--ntasks-per-node"
        words = ["sbatch", "--parsable", f"{option}={per_node}", stage / name, *map(str, flags)]
        number = self.call(*words, cwd=cwd).stdout.strip()
        for variable in variables:
            del self.variables[variable]
        return SimpleNamespace(number=number, log=Path(cwd, f"slurm-{number}.out"))

    def show(self, job):
        """Return what Slurm says of a job, as a dict."""
        text = self.call("scontrol", "show", "job", job.number).stdout
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def wait(self, job, *states, seconds=300):
        """Wait until a job is in one of the states; return which."""
        end = time.monotonic() + seconds
        while (state := self.show(job)["JobState"]) not in states:
            assert time.monotonic() < end, (state, job.log.exists() and job.log.read_text())
            time.sleep(0.1)
        return state

    def wait_for(self, job, text, seconds=300):
        """Wait until a job has written a text into its log."""
        end = time.monotonic() + seconds
        while not job.log.exists() or text not in job.log.read_text():
            assert time.monotonic() < end, job.log.exists() and job.log.read_text()
            assert self.show(job)["JobState"] in ("PENDING", "RUNNING"), job.log.read_text()
            time.sleep(0.1)

    def ranks(self, job):
        """Return the job's processes that train, by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                words, environ = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            trains = "train.py" in " ".join(words) and "torch.distributed.run" not in words
            if trains and environ.get("SLURM_JOB_ID") == job.number and "SLURM_STEP_ID" in environ:
                found[environ.get("RANK", environ.get("SLURM_PROCID"))] = process
        return found


@pytest.fixture(scope="module")
def cluster(slurm):
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


def assert_gone(processes, seconds=60):
    end = time.monotonic() + seconds
    while alive(processes):
        assert time.monotonic() < end, [process.cmdline() for process in alive(processes)]
        time.sleep(0.1)


def test_both_jobs_at_once_on_the_same_two_nodes_get_the_weights_of_stage_01(
    cluster, trained, tmp_path
):
    """Two tasks per node; with different seeds, so that neither can take the other's gradients."""
    seeds = {"job.sbatch": [], "job_torchrun.sbatch": ["--seed", "1"]}
    jobs = {}
    for name, seed in seeds.items():
        flags = ["--device", "cpu", *DOUBLE, *seed, "--out-dir", tmp_path / name]
        jobs[name] = cluster.submit(name, *flags, per_node=2, cwd=tmp_path)
    shown = []
    for job in jobs.values():
        state = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        assert state == "COMPLETED", job.log.read_text()
        shown.append(cluster.show(job))
        assert (shown[-1]["NumNodes"], shown[-1]["Requeue"]) == ("2", "1")
    assert shown[0]["NodeList"] == shown[1]["NodeList"]
    assert max(one["StartTime"] for one in shown) < min(one["EndTime"] for one in shown)
    for name, job in jobs.items():
        log = job.log.read_text()
        assert "4 processes on gloo" in log
        assert len(re.findall("^epoch .: train", log, re.MULTILINE)) == 2  # one process prints
        reference = trained("01_single_gpu", 1, *DOUBLE, *seeds[name], how=train_in_forks)
        assert max_abs_diff(tmp_path / name / "last.pt", reference.weights) <= 1e-10


@pytest.mark.fault(
    stages="06 to 08",
    what="a rank of a job is killed",
    sees="the job's state FAILED, and which task it was, in its log: `srun: error: ... task`",
    seconds=60,
    lost="the run",
)
@pytest.mark.parametrize("name", ["job.sbatch", "job_torchrun.sbatch"])
def test_a_rank_that_is_killed_fails_the_job(name, cluster, tmp_path, fault):
    job = cluster.submit(name, "--device", "cpu", *ENDLESS, cwd=tmp_path)
    cluster.wait_for(job, "epoch 2: ")
    ranks = cluster.ranks(job)
    assert sorted(ranks) == ["0", "1"]
    ranks["1"].kill()
    assert cluster.wait(job, "FAILED", "COMPLETED", seconds=fault.seconds) == "FAILED"
    fault.assert_seen(job.log.read_text())
    assert_gone(ranks.values())


@pytest.mark.fault(
    stages="06 to 09",
    what="a job is cancelled with scancel",
    sees="the job's state CANCELLED and, in its log, `CANCELLED`; no process and no port is left",
    seconds=60,
    lost="the run; with stage 09 nothing, it can go on from a checkpoint",
)
@pytest.mark.parametrize("name", ["job.sbatch", "job_torchrun.sbatch"])
def test_scancel_leaves_nothing_behind(name, cluster, tmp_path, fault):
    """The jobs train another stage, as the variable SCRIPT says."""
    script = ROOT / "07_distributed_eval/train.py"
    job = cluster.submit(name, "--device", "cpu", *ENDLESS, cwd=tmp_path, SCRIPT=str(script))
    cluster.wait_for(job, "epoch 2: ")
    ranks = cluster.ranks(job)
    assert len(ranks) == 2 and all(str(script) in rank.cmdline() for rank in ranks.values())
    cluster.call("scancel", job.number)
    assert cluster.wait(job, "CANCELLED", seconds=fault.seconds) == "CANCELLED"
    assert_gone(ranks.values())
    fault.assert_seen(job.log.read_text())
    assert cluster.call("squeue", "--noheader").stdout == ""
    assert not answers(10000 + int(job.number) % 20000)  # rank 0's port


@pytest.mark.fault(
    stages="06 to 08",
    what="a job's time is nearly over",
    sees="`the time is nearly over` in its log; it is queued again, once, and begins anew",
    seconds=60,
    lost="the run so far",
)
def test_before_its_time_is_over_a_job_is_queued_again(cluster, tmp_path, fault):
    """Slurm's signal, sent by hand; the job trains from the start, once more and not for ever."""
    job = cluster.submit("job.sbatch", "--device", "cpu", *ENDLESS, "--epochs", 60, cwd=tmp_path)
    cluster.wait_for(job, "epoch 2: ")
    ranks = cluster.ranks(job)
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    cluster.wait_for(job, "the time is nearly over")
    cluster.wait(job, "PENDING")
    assert_gone(ranks.values())
    cluster.wait(job, "RUNNING", seconds=fault.seconds)
    log = job.log.read_text()
    fault.assert_seen(log)
    end = time.monotonic() + 300
    while job.log.read_text().count("epoch 1: ") < 2:
        assert time.monotonic() < end, log
        time.sleep(0.1)
    assert cluster.show(job)["Restarts"] == "1"
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    assert cluster.wait(job, "FAILED", "PENDING") == "FAILED"


# One epoch of 600 steps, so a job that is stopped has no checkpoint but the one it writes then.
LONG = ("--data", "fake", "--image-size", "8", "--images", "36000", "--epochs", "1")
NEVER = ("--checkpoint-every", "1000000", "--device", "cpu")


def at(folder):
    """Say to `Cluster.submit` that the job is stage 09's, submitted from a folder."""
    return {"cwd": folder, "stage": ROOT / "10_preemption"}


def stopped_by_slurms_signal(cluster, job, cwd):
    """Send the signal that a job gets before its time is over; return the step of its checkpoint."""
    ranks = cluster.ranks(job)
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    assert cluster.wait(job, "PENDING", "FAILED") == "PENDING", job.log.read_text()
    assert_gone(ranks.values())
    return steps_of(job, cwd)[-1]


def steps_of(job, cwd):
    """Return the steps of the checkpoints that a job has written."""
    return [int(path.stem[5:]) for path in sorted(Path(cwd, f"checkpoints-{job.number}").glob("*"))]


@pytest.mark.fault(
    stages="09",
    what="a job is preempted by a more urgent one, or its time is nearly over",
    sees="it is queued again by itself, and its log says `DUE TO PREEMPTION` or `the time "
    "is nearly over`, and `goes on after step` when it runs again",
    seconds=120,
    lost="nothing",
)
def test_a_preempted_job_and_one_whose_time_is_over_go_on(cluster, trained, tmp_path, fault):
    """Both happen to the same job, which is long enough; no bit of its weights knows of it."""
    reference = trained("10_preemption", 2, *LONG, how=train_in_forks)
    job = cluster.submit("job.sbatch", *LONG, *NEVER, "--out-dir", tmp_path / "out", **at(tmp_path))
    cluster.wait_for(job, "2 processes on gloo")
    ranks = cluster.ranks(job)
    words = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
    cluster.call(*words, "--output=/dev/null", "--wrap=sleep 2", cwd=tmp_path)
    cluster.wait(job, "PENDING")
    assert_gone(ranks.values())
    (first,) = steps_of(job, tmp_path)
    cluster.wait_for(job, f"goes on after step {first}\n", seconds=fault.seconds)
    second = stopped_by_slurms_signal(cluster, job, tmp_path)
    assert 0 < first < second < 600
    state = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", seconds=fault.seconds)
    log = job.log.read_text()
    fault.assert_seen(log)
    assert state == "COMPLETED" and f"goes on after step {second}\n" in log, log
    assert cluster.show(job)["Restarts"] == "2"
    assert max_abs_diff(tmp_path / "out/last.pt", reference.weights) == 0
    for line in reference.epochs:  # each epoch ended with the figures of the other run
        assert f"{line}\n" in log


@pytest.mark.fault(
    stages="09",
    what="a rank of a job is killed, with job_torchrun.sbatch",
    sees="`failed (exitcode: -9)` in the job's log, then `goes on after step`; the job's "
    "state COMPLETED in the end",
    seconds=120,
    lost="the steps since the last checkpoint, taken once more",
)
def test_torchruns_on_two_nodes_start_a_killed_rank_again(cluster, trained, tmp_path, fault):
    """Before that its time is nearly over, as above."""
    reference = trained("10_preemption", 2, *LONG, how=train_in_forks)
    flags = (*LONG, *NEVER, "--out-dir", tmp_path / "out")
    job = cluster.submit("job_torchrun.sbatch", *flags, **at(tmp_path))
    cluster.wait_for(job, "2 processes on gloo")
    step = stopped_by_slurms_signal(cluster, job, tmp_path)
    assert 0 < step < 600
    cluster.wait_for(job, f"goes on after step {step}\n", seconds=fault.seconds)
    cluster.ranks(job)["1"].kill()
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    state = cluster.wait(job, *ends, seconds=fault.seconds)
    log = job.log.read_text()
    assert state == "COMPLETED", log
    fault.assert_seen(log)
    assert log.count("2 processes on gloo") == 3
    assert log.count(f"goes on after step {step}\n") == 2
    assert max_abs_diff(tmp_path / "out/last.pt", reference.weights) == 0


def test_a_job_that_gets_no_further_is_not_queued_again(cluster, tmp_path):
    job = cluster.submit("job.sbatch", cwd=tmp_path, stage=ROOT / "10_preemption")
    cluster.wait(job, "RUNNING")
    time.sleep(1)  # its processes are importing torch
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    assert cluster.wait(job, "FAILED", "PENDING", "COMPLETED") == "FAILED"
    assert "the time is nearly over" in job.log.read_text()
    assert steps_of(job, tmp_path) == []


def test_a_job_file_that_cannot_find_the_script_says_so(cluster, tmp_path):
    words = ["sbatch", "--parsable", "--output=slurm-%j.out"]
    with (STAGE / "job.sbatch").open() as file:
        number = cluster.call(*words, stdin=file, cwd=tmp_path).stdout.strip()
    job = SimpleNamespace(number=number, log=tmp_path / f"slurm-{number}.out")
    assert cluster.wait(job, "FAILED", "COMPLETED") == "FAILED"
    assert "set SCRIPT to its path" in job.log.read_text()
    assert cluster.show(job)["ExitCode"] == "2:0"


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
    assert {address.port for address in listening} == {cluster.port + n for n in range(3)}


def test_start_and_stop_may_be_called_twice(cluster):
    before = {process.pid for process in cluster.members()}
    assert cluster.script("start").stdout.startswith("it runs already\n")
    assert {process.pid for process in cluster.members()} == before
    assert "idle node[1-2]" in cluster.script("status").stdout


def test_one_cluster_leaves_another_alone_and_no_trace(cluster, other):
    assert other.script("status", check=False).returncode == 1
    assert other.script("start").stdout.startswith("started\n")
    steps = subprocess.Popen(
        ["srun", "--nodes=2", "sleep", "1000"], env=other.variables, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 30
    while len(other.members()) < 6:  # the four daemons and a starter of tasks on each node
        assert time.monotonic() < end
        time.sleep(0.1)
    members = other.members()
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if "1000" in (p.info["cmdline"] or [])]
    assert len(sleeping) >= 2
    assert other.script("stop").stdout == "stopped\n"
    assert steps.wait(10) != 0
    assert not alive([*members, *sleeping])
    assert not other.folder.exists()
    assert not any(answers(other.port + n) for n in range(3))
    assert other.script("stop").stdout == "stopped\n"
    assert "idle node[1-2]" in cluster.script("status").stdout


@pytest.mark.parametrize(
    "what, named",
    [
        ("start", "is not a folder of this script's"),
        ("stop", "is not a folder of this script's"),
        ("restart", "restart is none of start, status and stop"),
    ],
)
def test_a_wrong_call_of_the_cluster_touches_nothing(what, named, tmp_path):
    (tmp_path / "mine").write_text("keep me")
    done = Cluster(tmp_path).script(what, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("local_slurm.sh: error: ") and named in line
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


def test_the_script_in_the_shell_of_a_job_says_who_starts_it(tmp_path):
    variables = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    script = STAGE / "train.py"
    done = fork(script, [], tmp_path, **variables)()
    assert done.returncode == 2
    assert "SLURM_STEP_NUM_TASKS is not set" in done.stderr
    assert "start with: sbatch 06_slurm/job.sbatch or torchrun" in done.stderr
