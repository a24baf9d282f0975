"""A notebook shows a command as it runs it, and fails when the command fails."""

import psutil
import pytest

from harness import commands
from harness.commands import CommandError
from nbtools import lesson


def test_run_shows_a_command_as_it_is_typed_and_what_it_prints(capsys):
    command = """A=1 python -c 'import os, sys; print(os.environ["A"], sys.argv[1])' \\
  $WORK/a"""
    assert lesson.run(command).stdout == "1 $WORK/a\n"
    assert capsys.readouterr().out == f"$ {command}\n1 $WORK/a\n"


def test_run_raises_unless_the_child_ends_as_it_should():
    fails = """python -c 'import sys; sys.exit("its reason")'"""
    with pytest.raises(CommandError, match="its reason"):
        lesson.run(fails)
    assert lesson.run(fails, fails=True).returncode == 1
    with pytest.raises(CommandError, match="exit code 0"):
        lesson.run("python -c pass", fails=True)
    with pytest.raises(CommandError, match="did nothing for 0 s"):
        lesson.run("python -c 'import time; time.sleep(3600)'", seconds=0)


@pytest.mark.parametrize("forks", [None, "all"])
def test_a_rank_that_fails_ends_the_others(forks, tmp_path, monkeypatch):
    """In forks as by torchrun, and with the same traceback."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('its reason')\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(lesson, "FORKS", forks)
    command = f"torchrun --standalone --nproc-per-node=2 {script}"
    done = lesson.run(command, fails=True)
    assert done.returncode == 1
    assert (
        "[rank1]: Traceback (most recent call last):\n"
        f'[rank1]:   File "{script}", line 6, in <module>\n'
    ) in done.stderr
    assert "\n[rank1]: ValueError: its reason\n" in done.stderr


def test_whatever_ends_run_ends_what_it_started(monkeypatch):
    """Ctrl-C for instance: no process of the command is left."""
    processes = []

    def interrupt(line, **_):
        if not line.startswith("$"):
            processes.extend(psutil.Process(int(pid)) for pid in line.split())
            raise KeyboardInterrupt

    monkeypatch.setattr(lesson, "print", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        lesson.run("bash -c 'sleep 3600 & echo $$ $!; wait'")
    assert len(processes) == 2
    commands.assert_gone(processes, (), commands.LIMIT)
