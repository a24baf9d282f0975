"""A notebook's command that fails stops the cell, and a stopped cell leaves nothing."""

import os
import signal

import psutil

from harness import commands


def cell(command, **options):
    """Return the command of a Python that runs this cell."""
    words = f"from nbtools import lesson; lesson.run({command!r}, **{options})"
    return ["python", "-c", words]


def test_a_cell_raises_unless_its_command_ends_as_it_should():
    fails = """python -c 'import sys; sys.exit("its reason")'"""
    assert "its reason" in commands.run(cell(fails), code=1).stderr
    commands.run(cell(fails, fails=True))
    assert "exit code 0" in commands.run(cell("true", fails=True), code=1).stderr
    hangs = commands.run(cell("sleep 3600", seconds=0), code=1).stderr
    assert "it did nothing for 0 s" in hangs


def test_a_cell_that_is_stopped_leaves_no_process(tmp_path):
    """As Jupyter stops it, with SIGINT."""
    sleeps = cell("bash -c 'sleep 3600 & echo $$ $!; wait'")
    with commands.start(sleeps, tmp_path) as job:
        commands.wait_until(lambda: len(job.screen().splitlines()) == 2, commands.LIMIT)
        pids = job.screen().splitlines()[1].split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        os.kill(job.pid, signal.SIGINT)
        assert job.wait().returncode == -signal.SIGINT
    commands.assert_gone(processes, (), commands.LIMIT)
