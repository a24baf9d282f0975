"""nbtools shows a command as it runs it, and fails when the command fails."""

import linecache
import math
from pathlib import Path

import psutil
import pytest
import torch

from common import weights
from harness import commands
from harness.commands import CommandError
from nbtools import lesson


def test_run_shows_a_command_as_it_is_typed_and_what_it_prints(capsys):
    command = """A=1 python -c 'import os, sys; print(os.environ["A"], sys.argv[1])' \\
  $WORK/a"""
    assert lesson.run(command).stdout == "1 $WORK/a\n"
    assert capsys.readouterr().out == f"$ {command}\n1 $WORK/a\n"
    assert lesson.run(command, quiet=True).stdout == "1 $WORK/a\n"
    assert capsys.readouterr().out == f"$ {command}\n"


def test_run_prints_the_lines_as_they_come(tmp_path, monkeypatch):
    """The child prints its second line only when the first one has been seen here."""
    script, lines = tmp_path / "script.py", []
    script.write_text(
        "import pathlib, time\n"
        "print('one', flush=True)\n"
        "while not pathlib.Path(__file__).with_name('seen').exists():\n"
        "    time.sleep(0.01)\n"
        "print('two')\n"
    )

    def note(line, **_):
        lines.append(line)
        if line == "one\n":
            (tmp_path / "seen").touch()

    monkeypatch.setattr(lesson, "print", note, raising=False)
    lesson.run(f"python {script}")
    assert lines == [f"$ python {script}", "one\n", "two\n"]


def test_run_raises_unless_the_child_ends_as_it_should():
    fails = """python -c 'import sys; sys.exit("its reason")'"""
    with pytest.raises(CommandError, match="its reason"):
        lesson.run(fails)
    assert lesson.run(fails, fails=True).returncode == 1
    with pytest.raises(CommandError, match="exit code 0"):
        lesson.run("python -c pass", fails=True)
    for flag in (False, True):
        with pytest.raises(CommandError, match="did nothing for 0 s"):
            lesson.run("python -c 'import time; time.sleep(3600)'", flag, seconds=0)


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
    assert ("ChildFailedError" in done.stderr) == (not forks)
    script.write_text("import time\ntime.sleep(3600)\n")  # a hang is no failure
    with pytest.raises(CommandError, match="did nothing for 0 s"):
        lesson.run(command, fails=True, seconds=0)


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(
    "work",
    [
        "end = time.process_time() + 5\nwhile time.process_time() < end:\n    pass\n",
        "for _ in range(10):\n    time.sleep(0.5)\n    print('.', flush=True)\n",
    ],
    ids=["computes", "prints"],
)
def test_a_command_has_a_limit_only_while_it_does_nothing(forks, work, tmp_path):
    """However long it takes, as it does on a machine that has other work."""
    script = tmp_path / "script.py"
    script.write_text(f"import time\n{work}")
    command = f"python {script}"
    assert commands.run(command, seconds=3, forks=forks).returncode == 0
    script.write_text(f"import time\n{work}time.sleep(3600)\n")
    done = commands.run(command, code=None, seconds=3, forks=forks)
    assert done.returncode == "hung"


# ---- what a check says ---------------------------------------------------------------
def say(answer, check, capsys):
    """Return what a check prints after an answer, as two cells of a notebook."""
    shared = {"lesson": lesson}
    for name, source in (("answer", answer), ("check", check)):
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), shared)
    return capsys.readouterr().out.splitlines()[-1]


def test_a_check_names_the_line_of_the_answer_that_raised_an_error(capsys):
    """Not its own lines, and not those of what the answer calls."""
    answer = "import json\n\n\ndef half(n):\n    n = json.loads(n)\n    return n / 0\n"
    check = "@lesson.check\ndef exercise_1():\n    half({})\n"
    wrong = "Not solved yet: {} (line {}: {})"
    said = say(answer, check.format("'1'"), capsys)
    assert said == wrong.format(
        "ZeroDivisionError: division by zero", 6, "return n / 0"
    )
    said = say(answer, check.format("'x'"), capsys)
    assert "JSONDecodeError: Expecting" in said
    assert said.endswith(" (line 5: n = json.loads(n))")
    said = say(answer, check.replace("half({})", "1 / 0"), capsys)
    assert said == "Not solved yet: ZeroDivisionError: division by zero"
    said = say(answer, check.replace("half({})", "assert not half, 'none'"), capsys)
    assert said == "Not solved yet: none"


@pytest.mark.parametrize("forks", [None, "all"])
def test_a_check_says_why_a_command_failed(forks, capsys, tmp_path, monkeypatch):
    """The error of the rank that failed, not of one that waited for it."""
    monkeypatch.setattr(lesson, "FORKS", forks)
    script = tmp_path / "script.py"
    run = f"lesson.run('torchrun --standalone --nproc-per-node=2 {script}', seconds=0)"
    check = f"@lesson.check\ndef exercise_1():\n    {run}\n"
    lines = [
        "import torch.distributed as dist",
        "dist.init_process_group('gloo')",
        "if dist.get_rank() == 1:",
        "    raise ValueError('its reason')",
        "dist.barrier()",
    ]
    script.write_text("\n".join(lines))
    source = "script.py, line 4: raise ValueError('its reason')"
    said = say("", check.replace(", seconds=0", ""), capsys)
    assert said == f"Not solved yet: rank 1: ValueError: its reason ({source})"
    script.write_text("import sys\nsys.exit('its reason')\n")
    said = say("", check.replace(", seconds=0", ""), capsys)
    assert said == "Not solved yet: its reason"
    script.write_text("import time\ntime.sleep(3600)\n")
    said = say("", check, capsys)
    assert said.startswith("Not solved yet: it hangs: it did nothing for 0 s")


def test_a_check_says_why_a_solution_is_right(capsys, tmp_path, monkeypatch):
    """From the comment on top of it, in the notebook's folder."""
    monkeypatch.chdir(tmp_path)
    check = "@lesson.check\ndef {}():\n    pass\n"
    assert say("", check.format("exercise_1"), capsys) == "Solved."
    Path("solutions.py").write_text(
        "# ---- exercise 1 -----\n# One\n# two.\na = 1  # x\n# three\n\n\n"
        "# ---- other exercise 1 -----\n# Four.\n"
    )
    assert say("", check.format("exercise_1"), capsys) == "Solved. One two."
    assert say("", check.format("other_exercise_1"), capsys) == "Solved. Four."
    assert say("", check.format("exercise_2"), capsys) == "Solved."


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


def test_grep_shows_the_lines_that_match_and_wants_one(capsys):
    """Of torch's C++ code no line numbers, and gloo's two messages as one."""
    lesson.grep(r"b\d", "a1\nb2\nc [/x/y.cc:12] b3 d")
    assert capsys.readouterr().out == "b2\nc b3 d\n"
    for message in (
        "[/x/y.cc:12] Timed out waiting 5000ms for send operation to complete",
        "[/x/y.cc:34] Application timeout caused pair closure",
    ):
        lesson.grep("Error", f"a\n[rank0]: RuntimeError: {message}\nb")
        shown = "[rank0]: RuntimeError: <Timed out waiting ...>\n"
        assert capsys.readouterr().out == shown
    with pytest.raises(ValueError, match="no line"):
        lesson.grep("x", "a\nb")


def test_require_names_the_packages_that_are_missing_in_one_line():
    lesson.require("torch")
    with pytest.raises(ImportError) as raised:
        lesson.require("torch", "no_such_package", "nor_this")
    line = "This notebook needs: pip install no_such_package nor_this"
    assert raised.value._render_traceback_() == [line]  # what Jupyter shows


def test_max_abs_diff_compares_weights_of_the_same_names(tmp_path):
    weights.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a")
    weights.save({"w": torch.tensor([1.5, 2.0])}, tmp_path / "b")
    weights.save({"module.w": torch.tensor([1.5, 2.0])}, tmp_path / "c")
    assert lesson.max_abs_diff(tmp_path / "a", tmp_path / "b") == 0.5
    with pytest.raises(ValueError, match="module.w"):
        lesson.max_abs_diff(tmp_path / "a", tmp_path / "c")


def test_a_weight_that_is_no_number_is_not_repaired(monkeypatch):
    """Also if it is not the first one: a comparison with it is never true."""
    two = {"a": torch.zeros(2), "b": torch.tensor([0.0, math.nan])}
    each = iter([two, {name: torch.zeros(2) for name in two}])
    monkeypatch.setattr(lesson, "weights_of", lambda *_: next(each))
    with pytest.raises(AssertionError, match="b is off by nan"):
        lesson.assert_repaired("mine.py", "program.py", check=False)
