"""Start a job for each command, run the command, and print which process got what.

python 10_preemption/demos/who_gets_what.py "scancel JOB" "scancel --signal=USR1 JOB"

JOB stands for the job's number. An argument that is a folder is not a command: it holds
what a job of log_signals.sbatch has logged before.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB_FILE = Path(__file__).with_name("log_signals.sbatch")
PROCESSES = ("batch script", "srun", "launcher", "rank", "loader worker")
LINE = "{:36}" + "{:14}" * len(PROCESSES)


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        if time.monotonic() > end:
            sys.exit("the job has not done what is expected: see squeue")
        time.sleep(0.1)


def signals(folder):
    """Return the signals that each of PROCESSES has got."""
    files = [folder / name for name in PROCESSES]
    return [" ".join(sorted({*file.read_text().split()})) or "-" for file in files]


def submit(folder):
    """Start a job that logs its signals, and return its number."""
    words = ["sbatch", "--parsable", "--output=/dev/null", JOB_FILE]
    variables = {**os.environ, "LOGS": str(folder)}
    return subprocess.check_output(words, env=variables, text=True).strip()


def main(arguments):
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, str(n)) for n in range(len(arguments))]
        jobs = {}
        for n, argument in enumerate(arguments):
            if Path(argument).is_dir():
                folders[n] = Path(argument)
            else:
                jobs[n] = submit(folders[n])
        for n, job in jobs.items():
            wait_until(lambda n=n: len([*folders[n].glob("*")]) == len(PROCESSES))
            subprocess.run(arguments[n].replace("JOB", job).split(), check=True)
        time.sleep(10)  # for the signals to arrive
        print(LINE.format("", *PROCESSES).rstrip())
        for argument, folder in zip(arguments, folders, strict=True):
            shown = argument if " " in argument else Path(argument).name
            print(LINE.format(shown, *signals(folder)).rstrip())
        # what is left of them does not end on SIGTERM
        kill = ["scancel", "--full", "--signal=KILL", *jobs.values()]
        subprocess.run(kill, check=False, capture_output=True)


if __name__ == "__main__":
    main(sys.argv[1:])
