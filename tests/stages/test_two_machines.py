"""tools/two_machines.sh makes two machines of this one, and leaves nothing behind."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import commands
from harness.stages import ROOT
from nbtools import machines as shown_machines
from tests.training import missing_for_two_machines

pytestmark = pytest.mark.ci

SCRIPT = ROOT / "tools/two_machines.sh"
NOTEBOOK = ROOT / "06_slurm/two_machines.ipynb"
PAIR = f"test-{os.getpid()}-"


@pytest.fixture(autouse=True)
def needs_namespaces():
    if missing := missing_for_two_machines():
        pytest.skip(missing)


@pytest.fixture
def machines():
    """Return a function that calls the script, with two machines that have started."""

    def call(*words, code=0):
        return commands.run(["bash", SCRIPT, *words], code=code, TWO_MACHINES=PAIR)

    call("start")
    yield call
    call("stop")


def names():
    return subprocess.check_output(["ip", "netns"], text=True)


def test_each_has_a_name_an_address_and_a_way_to_the_other(machines, tmp_path):
    for one, other in ((1, 2), (2, 1)):
        assert machines("on", one, "hostname").stdout == f"machine{one}\n"
        shown = machines("on", one, "ip", "-br", "-4", "address", "show", "eth0").stdout
        assert shown.split()[-1] == f"10.0.0.{one}/24"
        found = machines("on", one, "getent", "hosts", f"machine{other}").stdout
        assert found.split()[0] == f"10.0.0.{other}"
    server = "import socket; s = socket.create_server(('', 5000)); s.accept()"
    client = "import socket; print(socket.create_connection(('machine1', 5000)))"
    command = ["bash", SCRIPT, "on", 1, "python", "-c", server]
    with commands.start(command, tmp_path, TWO_MACHINES=PAIR) as job:
        listening = ["on", 1, "ss", "-Hltn", "sport = :5000"]
        commands.wait_until(lambda: machines(*listening).stdout, commands.LIMIT)
        assert "10.0.0.1" in machines("on", 2, "python", "-c", client).stdout
        assert job.wait().returncode == 0


def test_the_own_name_can_mean_loopback(machines):
    own = ("on", 2, "getent", "hosts", "machine2")
    machines("hosts", "loopback")
    assert machines(*own).stdout.split()[0] == "127.0.1.1"
    assert machines("on", 1, "getent", "hosts", "machine2").stdout.startswith(
        "10.0.0.2"
    )
    machines("hosts", "eth0")
    assert machines(*own).stdout.split()[0] == "10.0.0.2"


def test_the_cable_can_be_pulled(machines):
    state = ("on", 1, "cat", "/sys/class/net/eth0/carrier")
    assert machines(*state).stdout == "1\n"
    machines("cable", "out")
    assert machines(*state).stdout == "0\n"
    machines("cable", "in")
    assert machines(*state).stdout == "1\n"


def test_stop_ends_what_runs_and_leaves_nothing(machines, tmp_path):
    command = ["bash", SCRIPT, "on", 1, "sleep", 3600]
    with commands.start(command, tmp_path, TWO_MACHINES=PAIR) as job:
        inside = ["ip", "netns", "pids", f"{PAIR}1"]
        commands.wait_until(lambda: commands.run(inside).stdout, commands.LIMIT)
        machines("stop")
        assert job.wait().returncode != 0
    assert PAIR not in names()
    assert not [*Path("/etc/netns").glob(f"{PAIR}*")]
    machines("stop")  # a second time
    line = machines("on", 1, "true", code=2).stderr
    assert line == "two_machines.sh: error: start the machines first\n"


@pytest.mark.parametrize(
    "words, line",
    [
        (["start"], "the machines are already there"),
        (["on", 1], "on 1: which command?"),
    ],
)
def test_wrong_calls_are_one_line(words, line, machines):
    done = machines(*words, code=2)
    assert done.stderr == f"two_machines.sh: error: {line}\n"
    assert names().count(PAIR) == 2


def test_where_it_cannot_start_it_says_why_and_leaves_nothing(tmp_path):
    (tmp_path / "ip").write_text("#!/bin/sh\nexit 1\n")  # namespaces are not allowed
    (tmp_path / "ip").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", SCRIPT, "start"]
    done = commands.run(command, code=2, PATH=path, TWO_MACHINES=PAIR)
    error = "two_machines.sh: error: network namespaces are not allowed here\n"
    assert done.stderr == error
    command = ["setpriv", "--reuid=65534", "--clear-groups", *command]
    done = commands.run(command, code=2, TWO_MACHINES=PAIR)
    assert done.stderr == "two_machines.sh: error: network namespaces need root\n"
    assert PAIR not in names()
    usage = commands.run(["bash", SCRIPT, "on", 3], code=2).stderr
    assert usage.startswith("Two machines, made of this one")


def test_a_shell_can_read_the_commands_that_the_notebook_shows():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE)
    assert sum("nft" in command for command in commands) > 4
    for command in commands:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), command


def test_standard_error_is_shortened():
    stderr = """[W1125 18:42:35.3 socket.cpp:469] [c10d] a warning
[rank0]: Traceback (most recent call last):
[rank0]:   File "/somewhere/meet.py", line 26, in <module>
[rank0]:     raise ValueError("Error")
[rank0]: RuntimeError: [/__w/gloo/tcp/unbound_buffer.cc:78] Timed out
E1125 18:42:03.129 23566 api.py:1] failed (exitcode: 1) (pid: 2) of binary: /bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
====
meet.py FAILED
----
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_18:43:40
  rank      : 1 (local_rank: 0)
====

"""
    assert shown_machines.shortened(stderr).splitlines() == [
        "[rank0]: Traceback (most recent call last):",
        "...",
        "[rank0]: RuntimeError: [...] Timed out",
        "failed (exitcode: 1) (pid: ...) of binary: ...",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "====",
        "meet.py FAILED",
        "...",
        "Root Cause (first observed failure):",
        "...",
        "  rank      : 1 (local_rank: 0)",
        "====",
    ]


STACKS = """
import time
import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server

dist.init_process_group("gloo")
start_debug_server()
def read_images():
    time.sleep(3600)
if dist.get_rank() == 1:
    read_images()
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.release
def test_the_stacks_of_all_ranks_on_a_page(machines, tmp_path):
    """On a machine of its own, because it listens on all interfaces."""
    (tmp_path / "stuck.py").write_text(STACKS)
    command = ["torchrun", "--standalone", "--nproc-per-node=2", tmp_path / "stuck.py"]
    command = ["bash", SCRIPT, "on", 1, *command]
    page = ["on", 1, "curl", "--silent", "http://127.0.0.1:25999"]
    with commands.start(command, tmp_path / "out", TWO_MACHINES=PAIR):

        def stacks():
            text = machines(*page[:-1], f"{page[-1]}/stacks", code=None).stdout
            return text if "in read_images" in text and "in all_reduce" in text else ""

        commands.wait_until(stacks, commands.LIMIT)
        assert "Rank 1" in stacks()
        assert "500" in machines(*page[:-1], f"{page[-1]}/fr_trace", code=None).stdout
