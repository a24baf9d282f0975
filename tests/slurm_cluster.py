"""A Slurm cluster for the tests, and its jobs: what stages/test_slurm.py asks of them.

    Cluster     a local one, with a folder and ports of its own
    SlurmJob    a submitted job: its state, its log, its ranks, and signals to them

Slurm answers slowly on a busy machine. So what waits here waits for a job's state or
its log, with the generous limit of harness/commands.py.
"""

import contextlib
from pathlib import Path

import psutil

from harness import commands
from harness import slurm
from harness.commands import assert_gone
from harness.commands import in_mask
from harness.commands import wait_until
from harness.stages import ROOT

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
# Job files take a port from a job's number: it must not be one of the notebooks' jobs.
FIRST_JOB = 5001
EVERY = 0.5  # seconds between questions to Slurm, which take time on a busy machine


def is_stopped(process):
    """Return whether a process has been stopped with SIGSTOP."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


class Cluster:
    """A local cluster of the tests' own, with a folder and ports of its own.

    nodes: the names of its two nodes, as sinfo shows them.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.port = commands.free_ports(3)
        self.nodes = f"node{self.port}-[1-2]"
        self.variables = {
            "LOCAL_CLUSTER": folder,
            "LOCAL_CLUSTER_PORT": self.port,
            "LOCAL_CLUSTER_PROCTRACK": "linuxproc",  # which needs no control groups
            "LOCAL_CLUSTER_FIRST_JOB": FIRST_JOB,
            **slurm.variables(folder),
        }

    def call(self, *words, code=0, cwd=ROOT, **variables):
        """Run a command for this cluster; return its standard output."""
        variables = {**self.variables, **variables}
        return commands.run(words, code=code, cwd=cwd, **variables).stdout

    def script(self, what, code=0):
        """Run tools/local_slurm.sh; return its Done."""
        return slurm.script(what, code, **self.variables)

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

    def update(self, what, setting):
        """Change a setting of a job or a partition, such as `JobId=5001`."""
        self.call("scontrol", "update", what, setting)

    def cancel_jobs(self):
        """Cancel the jobs that are there; return when there is none."""
        if jobs := self.call("squeue", "--noheader", "--format=%A").split():
            self.call("scancel", "--full", *jobs)
            queue = ("squeue", "--noheader")
            wait_until(lambda: not self.call(*queue), commands.LIMIT, every=EVERY)

    def sbatch(self, *words, cwd, **variables):
        """Submit a job from the folder `cwd`; return the SlurmJob."""
        number = self.call("sbatch", "--parsable", *words, cwd=cwd, **variables)
        return SlurmJob(self, number.strip(), Path(cwd))

    def submit_urgent(self):
        """Submit a job that preempts those on both nodes."""
        words = ["--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1"]
        self.sbatch(*words, "--output=/dev/null", cwd=ROOT)

    def submit(
        self,
        stage,
        *flags,
        per_node=1,
        torchrun=False,
        held=False,
        srun="",
        cwd,
        **variables,
    ):
        """Submit a stage's job file, which asks for GPUs; return the SlurmJob.

        It gets two nodes without GPUs, and `per_node` processes on each. torchrun: with
        the edit that recipes/torchrun_per_node.sh asks for. held: it does not start
        before `scontrol release`. srun: an option more for the file's srun.
        """
        file = ROOT / stage / "job.sbatch"
        tasks, cpus, launcher = per_node, 1, "python"
        if torchrun:
            tasks, cpus = 1, per_node
            launcher = f"bash {ROOT / 'recipes/torchrun_per_node.sh'}"
        if torchrun or srun:
            text = file.read_text()
            assert text.count("  python ") == 1
            file = Path(cwd) / "job.sbatch"
            file.write_text(text.replace("  python ", f"  {srun} {launcher} "))
        words = ["--gpus-per-node=0", f"--ntasks-per-node={tasks}"]
        words += [f"--cpus-per-task={cpus}", *["--hold"] * held]
        variables = {"SCRIPT": ROOT / stage / "train.py", **variables}
        return self.sbatch(*words, file, *flags, cwd=cwd, **variables)


class SlurmJob:
    """A job that was submitted from the folder `cwd`."""

    def __init__(self, cluster, number, cwd):
        self.cluster = cluster
        self.number = number
        self.log_file = cwd / f"slurm-{number}.out"
        self.checkpoints = cwd / f"checkpoints-{number}"

    def show(self):
        """Return what Slurm says of it, as a dict."""
        return slurm.show(self.number, **self.cluster.variables)

    def log(self):
        """Return what it has printed."""
        return self.log_file.read_text() if self.log_file.exists() else ""

    def steps(self):
        """Return the steps of its checkpoints, the latest last."""
        return sorted(int(path.stem[5:]) for path in self.checkpoints.glob("step-*"))

    def wait(self, state, seconds=commands.LIMIT):
        """Wait until it is in this state; fail if it ends in another one."""

        def reached():
            now = self.show()["JobState"]
            assert now == state or now not in ENDED, f"{now}\n{self.log()}"
            return now == state

        wait_until(reached, seconds, self.log, EVERY)

    def wait_for(self, text, times=1, seconds=commands.LIMIT):
        """Wait until its log has a text so many times; fail if it ends before."""

        def seen():
            ended = self.show()["JobState"] in ENDED  # before the last look at the log
            if self.log().count(text) >= times:
                return True
            assert not ended, self.log()
            return False

        wait_until(seen, seconds, self.log, EVERY)

    def ranks(self):
        """Return its live processes that train, by rank."""
        ours = {"SLURM_JOB_ID": self.number}
        ours["SLURM_CONF"] = self.cluster.variables["SLURM_CONF"]
        found = {}
        for process in psutil.process_iter():
            try:
                words, variables = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            launches = (
                "torch.distributed.run" in words or "SLURM_STEP_ID" not in variables
            )
            trains = "train.py" in " ".join(words) and not launches
            if trains and ours.items() <= variables.items():
                rank = variables.get("RANK", variables.get("SLURM_PROCID"))
                found[rank] = process
        return found

    def ready_ranks(self, count=2):
        """Wait until so many ranks record signals; return them as `ranks` does."""

        def found():
            ranks = self.ranks()
            ready = all(in_mask(rank, "SigCgt") for rank in ranks.values())
            return ready and len(ranks) == count and ranks

        return wait_until(found, commands.LIMIT, self.log, every=0.1)

    @contextlib.contextmanager
    def stopped_until_sigterm(self):
        """Stop its two ranks, and let them run again when SIGTERM has reached both.

        Otherwise a short run could end before a busy Slurm sends the signal. Yields the
        ranks, as `ranks` returns them. Afterwards they have ended.
        """
        ranks = self.ready_ranks()
        for rank in ranks.values():
            rank.suspend()
        wait_until(lambda: all(map(is_stopped, ranks.values())), commands.LIMIT)
        yield ranks

        def arrived(rank):  # a preemption wakes it with SIGCONT, too
            return in_mask(rank, "ShdPnd") or not is_stopped(rank)

        wait_until(lambda: all(map(arrived, ranks.values())), commands.LIMIT, self.log)
        for rank in ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()
        assert_gone(ranks.values(), [], commands.LIMIT)

    def preempt(self):
        """Have a more urgent job take its nodes; return the ranks that it had."""
        with self.stopped_until_sigterm() as ranks:
            self.cluster.submit_urgent()
        return ranks

    def send_time_limit_signal(self):
        """Send it the signal that Slurm sends before its time is over."""
        self.cluster.call("scancel", "--batch", "--signal=USR1", self.number)
