"""your_own_script/check_cluster.py finds each fault, names the ranks, and always ends.

What your_own_script/before_a_cluster.md says. No test waits for a time: a check that
has to fail lasts for --timeout, and what has to succeed may take far longer.
"""

import contextlib
import os
import re
import signal
import socket
from functools import partial

import pytest
import torch
from torch import distributed as dist

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from tests.conftest import only_in_release
from tests.slurm_cluster import Cluster
from tests.training import load_program
from tests.training import missing_for_slurm

pytestmark = [pytest.mark.ci, pytest.mark.slow]
CHECK = ROOT / "your_own_script" / "check_cluster.py"
FAST = ("--device", "cpu", "--mib", "1")
LONG = ("--timeout", str(commands.LIMIT))  # for what has to succeed
SHORT = ("--timeout", "20")  # for what has to fail after it
HOST = socket.gethostname()
check_cluster = load_program(CHECK, "check_cluster")


def run_ranks(
    folder, count, flags=LONG, ranks=None, prepare=None, variables=None, without=()
):
    """Run a process per rank, without a launcher, to their ends; return {rank: Done}.

    ranks: those to start, all by default; prepare: {rank: function}; variables: {rank:
    dict} of environment variables; without: ranks that are stopped, and do not end.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": commands.free_port()}
    jobs, prepare, variables = {}, prepare or {}, variables or {}
    with contextlib.ExitStack() as stack:
        for rank in range(count) if ranks is None else ranks:
            own = {**shared, "WORLD_SIZE": count, "RANK": rank, "LOCAL_RANK": rank}
            own |= variables.get(rank, {})
            options = {"forks": True, "prepare": prepare.get(rank), **own}
            words = ["python", CHECK, *FAST, *flags]
            job = commands.start(words, folder / f"rank-{rank}", **options)
            jobs[rank] = stack.enter_context(job)
        return {rank: job.wait() for rank, job in jobs.items() if rank not in without}


def problems(done):
    """Return what rank 0 says is wrong, a line each; the exit code has to be 1."""
    assert done.returncode == 1, done
    *_, last = done.stdout.splitlines()
    found = re.findall(r"^WRONG  (.*)$", done.stdout, re.MULTILINE)
    assert last == f"problems: {len(found)}", done
    return found


def test_torchrun_with_two_ranks(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    command = ["torchrun", "--standalone", "--nproc-per-node=2", CHECK, *FAST, *LONG]
    done = commands.run([*command, "--folder", folder], tmp_path / "out")
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("processes: 2, gloo, MASTER_ADDR=")
    assert last == "OK" and not done.stderr
    names = ["ranks", f"folder {folder}", "process group"]
    names.append("all_reduce of 1 MiB")
    assert [re.match("ok     (.*?): ", line)[1] for line in lines] == names
    assert not [*folder.iterdir()]


# ---- a rank is missing, or stuck -----------------------------------------------------
@pytest.mark.release
def test_ranks_that_were_not_started(tmp_path):
    done = run_ranks(tmp_path, 4, SHORT, ranks=(0, 3))
    assert problems(done[0]) == ["ranks: ranks 1-2: did not arrive within 20 s"]
    assert done[3].returncode == 1


def act_in(name, number, *_, **__):
    """Have a function of torch send this process a signal."""
    owner = dist if hasattr(dist, name) else torch
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), number))


@pytest.mark.release
@pytest.mark.parametrize("name", [only_in_release("init_process_group"), "all_reduce"])
def test_a_rank_for_which_the_others_wait(name, tmp_path):
    prepare = {1: partial(act_in, name, signal.SIGSTOP)}
    done = run_ranks(tmp_path, 3, SHORT, prepare=prepare, without=[1])
    assert {one.returncode for one in done.values()} == {1}
    title = {"all_reduce": "all_reduce of 1 MiB"}.get(name, "process group")
    assert f"{title}: rank 1 ({HOST}): did not arrive within 20 s" in problems(done[0])


def hang():
    """Have an all-reduce never end, as nccl's does if another rank is missing."""
    dist.all_reduce = lambda *_, **__: signal.pause()


@pytest.mark.release
def test_ranks_that_are_stuck_say_so(tmp_path):
    done = run_ranks(tmp_path, 2, SHORT, prepare=dict.fromkeys(range(2), hang))
    what = f"ranks 0-1 ({HOST}): did not finish within 20 s"
    assert problems(done[0]) == [f"all_reduce of 1 MiB: {what}"]


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_rank_0_is_the_one(number, tmp_path):
    """It holds the store."""
    prepare = {0: partial(act_in, "zeros", number)}
    done = run_ranks(tmp_path, 2, SHORT, prepare=prepare, without=[0])[1]
    assert done.returncode == 1 and not done.stdout and done.stderr


@pytest.mark.release
def test_rank_0_cannot_be_joined(tmp_path):
    """It was not started, or its port belongs to another program."""
    done = run_ranks(tmp_path, 2, SHORT, ranks=(1,))[1]
    assert done.returncode == 1 and not done.stdout
    what = r"cannot join rank 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+: Dist"
    assert re.search(rf"^rank 1 \({HOST}\): {what}", done.stderr, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = {0: {"MASTER_PORT": other.getsockname()[1]}}
        done = run_ranks(tmp_path, 2, SHORT, ranks=[0], variables=port)[0]
    assert done.returncode == 1
    assert f"rank 0 ({HOST}): cannot join rank 0 at MASTER_ADDR=" in done.stderr


# ---- versions, devices and folders ---------------------------------------------------
@pytest.mark.parametrize(
    "hosts, change, what",
    [
        ("aa", {"torch": "2.11"}, ["torch 2.15 on rank 0 (a), 2.11 on rank 1 (a)"]),
        ("ab", {"device": "cpu"}, ["device H on rank 0 (a), cpu on rank 1 (b)"]),
    ],
)
def test_ranks_that_do_not_fit(hosts, change, what):
    """No GPU is needed: only what follows from the facts is tested."""
    same = {"torch": "2.15", "device": "H"}
    facts = {0: same, 1: same | change}
    run = check_cluster.Run(*[None] * 5, hosts=dict(enumerate(hosts)))
    assert check_cluster.compare_facts(run, facts)[1] == what


def test_device_cuda_without_a_gpu(tmp_path):
    hidden = {rank: {"CUDA_VISIBLE_DEVICES": ""} for rank in range(2)}
    done = run_ranks(tmp_path, 2, [*LONG, "--device", "cuda"], variables=hidden)
    what = [f"rank {r} ({HOST}): local rank {r} has no GPU: it sees 0" for r in (0, 1)]
    assert problems(done[0]) == [f"ranks: {each}" for each in what]
    assert "process group" not in done[0].stdout and done[1].returncode == 1


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_one_rank_does_not_share(made, tmp_path):
    """The folder is in the current one, which is another one on rank 1."""
    own = [tmp_path / str(rank) for rank in range(2)]
    for rank in range(2):
        (own[rank] / "runs" if made or not rank else own[rank]).mkdir(parents=True)
    prepare = {rank: partial(os.chdir, own[rank]) for rank in range(2)}
    done = run_ranks(tmp_path, 2, [*SHORT, "--folder", "runs"], prepare=prepare)
    what = "FileNotFoundError: [Errno 2] No such file or directory: 'runs'"
    what = "the file that rank 0 wrote is not there" if made else what
    assert problems(done[0]) == [f"folder runs: rank 1 ({HOST}): {what}"]
    assert not [*(own[0] / "runs").iterdir()]
    assert "all_reduce" in done[0].stdout  # the other checks are made


# ---- flags and Slurm -----------------------------------------------------------------
@pytest.mark.parametrize(
    "flags, variables, what",
    [
        ([], {"RANK": None}, "RANK is '': start with torchrun, or with srun"),
        ([], {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two': start with"),
        (["--mib", "0"], {}, "--timeout and --mib have to be above 0"),
        (["--fold"], {}, "unrecognized arguments: --fold"),
    ],
)
def test_wrong_flags_and_variables(flags, variables, what, tmp_path):
    done = run_ranks(tmp_path, 1, flags, variables={0: variables})[0]
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"check_cluster.py: error: {what}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("torchrun", [False, only_in_release(True)])
def test_the_job_file_of_a_training_on_two_nodes(torchrun, tmp_path):
    """It starts it in place of the script, by srun or by a torchrun on each node."""
    if missing := missing_for_slurm():
        assert "REQUIRE_SLURM" not in os.environ, missing
        pytest.skip(missing)
    cluster = Cluster(f"/run/local_cluster_of_check_cluster_{os.getpid()}")
    try:
        cluster.script("start")
        flags = [*FAST, *LONG, "--folder", tmp_path]
        where = {"cwd": tmp_path, "SCRIPT": CHECK, "torchrun": torchrun}
        job = cluster.submit(first_with("slurm"), *flags, **where)
        job.wait("COMPLETED")
        lines = job.log().splitlines()
        assert "OK" in lines and not [line for line in lines if "WRONG" in line]
        assert any(line.endswith("device cpu, nodes: 2") for line in lines)
    finally:
        cluster.script("stop")
