"""Print which process of a job gets which signal: a row for each of six events.

python 10_preemption/demos/who_gets_what.py

For the local cluster (tools/local_slurm.sh), and as root: it makes a partition with a
GraceTime, and preempts the jobs that run there. Each event has a job of its own, of
log_signals.sbatch.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB_FILE = Path(__file__).with_name("log_signals.sbatch")
PROCESSES = ("batch script", "srun", "task", "child", "grandchild")
# The first two are what the timer of sbatch's option of that name does.
COMMANDS = {
    "--signal=B:USR1@300": "scancel --batch --signal=USR1 JOB",
    "--signal=USR1@300": "scancel --signal=USR1 JOB",
    "scancel JOB": "scancel JOB",
    "scancel --signal=TERM JOB.0": "scancel --signal=TERM JOB.0",
}
PREEMPTED = {"preemption": "main", "GraceTime, at first": "patient"}  # in a partition
LINE = "{:28}" + "{:13}" * len(PROCESSES)


def output_of(command, **variables):
    return subprocess.check_output(
        command.split(), env={**os.environ, **variables}, text=True
    ).strip()


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        if time.monotonic() > end:
            sys.exit("the jobs have not done what is expected: see squeue")
        time.sleep(0.1)


def submit(folder, partition):
    """Start a job that logs its signals in a folder, and return its number."""
    options = f"--parsable --output=/dev/null --partition={partition}"
    return output_of(f"sbatch {options} {JOB_FILE}", LOGS=str(folder))


def signals(folder):
    """Return the signals that each of PROCESSES has got, "-" for none."""
    files = [folder / name for name in PROCESSES]
    return [" ".join(sorted({*file.read_text().split()})) or "-" for file in files]


@contextlib.contextmanager
def patient_partition():
    """Have a partition in which preempted jobs may run on for an hour."""
    output_of("scontrol create PartitionName=patient Nodes=ALL GraceTime=3600 State=UP")
    yield
    wait_until(lambda: not output_of("squeue --noheader --partition=patient"))
    output_of("scontrol delete PartitionName=patient")


def main(scratch):
    folders = {event: Path(scratch, event) for event in (*COMMANDS, *PREEMPTED)}
    jobs = {
        event: submit(folder, PREEMPTED.get(event, "main"))
        for event, folder in folders.items()
    }
    files = len(folders) * len(PROCESSES)
    wait_until(lambda: len([*Path(scratch).glob("*/*")]) == files)
    for event, command in COMMANDS.items():
        output_of(command.replace("JOB", jobs[event]))
    time.sleep(5)  # for the signals to arrive
    got = {event: signals(folders[event]) for event in COMMANDS}
    job = "sbatch --parsable --partition=urgent --nodes=2 --exclusive --wrap=true"
    urgent = output_of(f"{job} --output=/dev/null")
    wait_until(lambda: all("SIGTERM" in signals(folders[each]) for each in PREEMPTED))
    time.sleep(5)
    got |= {event: signals(folders[event]) for event in PREEMPTED}
    numbers = [urgent, *jobs.values()]
    for options in (["--full", "--signal=KILL"], []):  # they do not end on SIGTERM
        command = ["scancel", *options, *numbers]  # some have ended
        subprocess.run(command, check=False, capture_output=True)
    print(LINE.format("", *PROCESSES).rstrip())
    for event, row in got.items():
        print(LINE.format(event, *row).rstrip())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, patient_partition():
        main(folder)
