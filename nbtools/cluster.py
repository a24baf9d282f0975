"""A Slurm cluster on this machine, for notebooks: commands sent to it, and its jobs."""

import os
import re
from pathlib import Path

import psutil

from harness import commands
from harness import slurm
from nbtools import lesson

NO_CLUSTER = "(no cluster here: not run)"
running = False


def start():
    """Start the cluster, unless it is running, and let Slurm's commands find it.

    Where it cannot be started, say why; then `run` and `submit` only print that. It is
    stopped when this process ends, unless it was running before. The logs of jobs go to
    $WORK/slurm-NUMBER.out.
    """
    global running
    folder = Path(os.environ.get("LOCAL_CLUSTER", "/run/local_cluster"))
    os.environ |= slurm.variables(folder)
    # Otherwise sbatch has them written to the folder in which it runs, the repository.
    os.environ["SBATCH_OUTPUT"] = f"{lesson.work}/slurm-%j.out"
    owner = folder / "started_by"
    if owner.exists() and not psutil.pid_exists(int(owner.read_text())):
        slurm.script("stop")  # another notebook's, which has just ended
    started = slurm.script("start")
    running = started.returncode == 0
    if started.stdout.startswith("started"):
        owner.write_text(str(os.getpid()))
        is_ours = f'[ "$(cat {owner})" = {os.getpid()} ]'
        lesson.run_at_end(f"{is_ours} && bash {slurm.SCRIPT} stop")
    print(*(started.stdout or started.stderr).splitlines()[:1])


def run(command, sort=False, errors=None, quiet=False, **options):
    """Call lesson.run with one of Slurm's commands; return the lines it printed.

    sort: print the lines in sorted order, since those of several tasks come in any.
    errors: a regular expression; print what matches it in the lines of standard error,
    each match once, in sorted order.
    """
    if not running:
        print(f"$ {command}\n{NO_CLUSTER}")
        return []
    done = lesson.run(command, quiet=quiet or sort, **options)
    lines = done.stdout.splitlines()
    if sort and not quiet:
        print(*sorted(lines), sep="\n")
    if errors:
        print(*sorted(set(re.findall(errors, done.stderr))), sep="\n")
    return lines


def submit(command):
    """Submit a job with sbatch, show its command and answer, and return its number."""
    lines = run(command)
    return int(lines[-1].split()[-1]) if lines else None


def state(job):
    """Return a job's state, such as PENDING, RUNNING or COMPLETED."""
    return slurm.show(job)["JobState"]


def wait(until, seconds=commands.LIMIT):
    """Wait until a function returns something true, and return that.

    Without a cluster, return None at once. Raises AssertionError after `seconds`.
    """
    hint = "see squeue, and the logs of the jobs"
    return commands.wait_until(until, seconds, hint, every=0.2) if running else None


def log(job):
    """Return the lines of a job's log, without progress lines, which hold times.

    job: its number, or the path of its log.
    """
    if not running:
        return [NO_CLUSTER]
    path = lesson.work / f"slurm-{job}.out" if isinstance(job, int) else Path(job)
    text = lesson.without_folders(path.read_text())
    return [line for line in text.splitlines() if "batch" not in line]
