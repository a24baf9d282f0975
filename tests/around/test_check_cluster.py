"""your_own_script/check_cluster.py finds each fault, names the ranks, and always ends.

No test waits for a time: a check that has to fail lasts for --timeout, and what has to
succeed may take far longer than it does.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import threading
from functools import partial

import pytest
import torch
from torch import distributed as dist

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from tests.slurm_cluster import Cluster
from tests.spy import call_after
from tests.training import load_program
from tests.training import missing_for_slurm

pytestmark = [pytest.mark.ci, pytest.mark.slow]
CHECK = ROOT / "your_own_script" / "check_cluster.py"
FAST = ("--device", "cpu", "--sizes", "4K")
LONG = ("--timeout", str(commands.LIMIT))  # for what has to succeed
SECONDS = 20  # far more than a check takes on a busy machine
SHORT = ("--timeout", str(SECONDS))  # for what has to fail after it
HOST = socket.gethostname()
LATE = f"did not arrive within {SECONDS} s"
commands.preloaded += ["tests.test_check_cluster"]
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
    assert last == f"{len(found)} problem{'s' * (len(found) > 1)}", done
    return found


def replace(name, act):
    """Have a function of torch or Python be another one, on this rank."""
    owner = next(each for each in (dist, torch, os) if hasattr(each, name))
    setattr(owner, name, act)


def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def block(*_, **__):
    threading.Event().wait()


def keep_the_gil(*_, **__):
    ctypes.PyDLL(None).pause()


# ---- nothing is wrong ----------------------------------------------------------------
def test_torchrun_with_two_ranks(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    command = ["torchrun", "--standalone", "--nproc-per-node=2", CHECK, *FAST, *LONG]
    done = commands.run([*command, "--folder", folder], tmp_path / "out")
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("2 processes, gloo, MASTER_ADDR=")
    assert last == "OK" and not done.stderr
    found = [re.fullmatch(r"ok     ([^:]*)(: .*)?", line)[1] for line in lines]
    names = ["versions", "devices", "network", "shared memory", f"folder {folder}"]
    names += ["DataLoader", "process group"]
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        names.append(f"{name} of 4K within the node")
    assert found == names
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("nodes", ["aabb", "abc"])
def test_collectives_within_and_between_nodes(nodes, tmp_path):
    names = {rank: {"SLURMD_NODENAME": node} for rank, node in enumerate(nodes)}
    done = run_ranks(tmp_path, len(nodes), variables=names)
    assert [one.returncode for one in done.values()] == [0] * len(nodes), done
    among = re.findall(r"^ok     all_reduce of 4K (.*):", done[0].stdout, re.MULTILINE)
    assert among == ["within each node"] * (nodes == "aabb") + ["between nodes"]
    assert f"devices: cpu, {len({*nodes})} nodes" in done[0].stdout
    assert not done[1].stdout + done[1].stderr


def test_bandwidths_are_those_of_nccl_tests():
    names = ("all_reduce", "all_gather", "reduce_scatter")
    found = [check_cluster.bus_bandwidth(name, 4096, 0.5, 4) for name in names]
    assert found == [8192 * 1.5, 8192 * 0.75, 8192 * 0.75]


# ---- a rank is missing, or stuck -----------------------------------------------------
def test_ranks_that_were_not_started(tmp_path):
    done = run_ranks(tmp_path, 4, SHORT, ranks=(0, 3))
    assert problems(done[0]) == [f"versions: ranks 1-2 {LATE}"]
    assert done[3].returncode == 1 and not done[3].stderr


ALL_REDUCE = "all_reduce of 4K within the node"
STUCK = "did not finish within 20 s: line N, expected = torch.full_like(output,"


@pytest.mark.parametrize(
    "name, act, what",
    [
        ("init_process_group", stop, f"process group: rank 1 ({HOST}) {LATE}"),
        ("all_reduce", stop, f"{ALL_REDUCE}: rank 1 ({HOST}) {LATE}"),
        ("full_like", block, f"{ALL_REDUCE}: rank 1 ({HOST}): {STUCK}"),
        ("zeros", keep_the_gil, f"DataLoader: rank 1 ({HOST}) {LATE}"),
    ],
)
def test_a_rank_for_which_the_others_wait(name, act, what, tmp_path):
    """Stopped, in a call of its own that never ends, or in one that keeps the GIL."""
    prepare, without = {1: partial(replace, name, act)}, [1] if act is stop else []
    done = run_ranks(tmp_path, 3, SHORT, prepare=prepare, without=without)
    assert {one.returncode for one in done.values()} == {1}
    found = [re.sub(r"line \d+", "line N", line) for line in problems(done[0])]
    assert any(line.startswith(what) for line in found)


@pytest.mark.parametrize("act", [stop, die])
def test_rank_0_is_the_one(act, tmp_path):
    """It holds the store."""
    prepare = {0: partial(replace, "zeros", act)}
    done = run_ranks(tmp_path, 2, SHORT, prepare=prepare, without=[0])[1]
    assert done.returncode == 1 and not done.stdout
    why = "its store hangs" if act is stop else "DistNetworkError"
    assert re.search(rf"rank 1 \(.*\): .*: no answer from rank 0: {why}", done.stderr)


def test_rank_0_cannot_be_joined(tmp_path):
    """It was not started, or its port belongs to another program."""
    done = run_ranks(tmp_path, 2, SHORT, ranks=(1,))[1]
    assert done.returncode == 1 and not done.stdout
    what = r"cannot join rank 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+: Connection"
    assert re.search(rf"^rank 1 \({HOST}\): {what}", done.stderr, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = {0: {"MASTER_PORT": other.getsockname()[1]}}
        done = run_ranks(tmp_path, 2, SHORT, ranks=[0], variables=port)[0]
    assert done.returncode == 1
    assert f"rank 0 ({HOST}): cannot join rank 0 at MASTER_ADDR=" in done.stderr
    assert "Address already in use" in done.stderr


def test_two_processes_with_the_same_rank(tmp_path):
    variables = {2: {"RANK": 1, "LOCAL_RANK": 1}}
    done = run_ranks(tmp_path, 3, SHORT, variables=variables)
    assert problems(done[0]) == [f"versions: rank 2 {LATE}"]
    assert {one.returncode for one in done.values()} == {1}
    assert "another process is rank 1, too" in done[1].stderr + done[2].stderr


# ---- versions and devices ------------------------------------------------------------
def rank_0(hosts):
    """What rank 0 knows after the first contact: no process is started."""
    return check_cluster.Run(*[None] * 9, hosts=dict(enumerate(hosts)))


def test_different_versions():
    versions = {rank: {"torch": "2.14.1", "CUDA": "13.0"} for rank in range(3)}
    versions[2] = {"torch": "2.11.0", "CUDA": "13.0"}
    found = check_cluster.compare_versions(rank_0("aab"), versions)
    shown = "torch 2.14.1 on ranks 0-1 (a), 2.11.0 on rank 2 (b)"
    assert found == ("CUDA 13.0", [shown])


@pytest.mark.parametrize(
    "hosts, change, what",
    [
        ("aa", {"gpu": "0"}, ["ranks 0-1 (a) have one GPU together"]),
        ("ab", {"gpu": "0", "local_rank": 0}, []),
        ("aa", {"local_rank": 0}, ["ranks 0-1 (a) have one LOCAL_RANK together"]),
        ("ab", {"name": "cpu"}, ["CPUs and GPUs: H on rank 0 (a), cpu on rank 1 (b)"]),
        (
            "ab",
            {"world_size": 1},
            ["WORLD_SIZE 2 on rank 0 (a), 1 on rank 1 (b)"],
        ),
    ],
)
def test_devices_that_do_not_fit(hosts, change, what):
    """No GPU is needed: only what rank 0 concludes is tested."""
    usual = {"world_size": 2, "name": "H"}
    devices = {r: {**usual, "local_rank": r, "gpu": str(r)} for r in range(2)}
    devices[1] |= change
    assert check_cluster.compare_devices(rank_0(hosts), devices)[1] == what


def test_two_ranks_on_one_device(tmp_path):
    done = run_ranks(tmp_path, 2, variables={1: {"LOCAL_RANK": 0}})
    what = f"devices: ranks 0-1 ({HOST}) have one LOCAL_RANK together"
    assert problems(done[0]) == [what]
    assert "process group" not in done[0].stdout and done[1].returncode == 1


def test_device_cuda_without_a_gpu(tmp_path):
    hidden = {rank: {"CUDA_VISIBLE_DEVICES": ""} for rank in range(2)}
    done = run_ranks(tmp_path, 2, [*LONG, "--device", "cuda"], variables=hidden)
    what = "local rank 0 has no GPU: its process sees 0 GPUs"
    assert problems(done[0]) == [f"devices: ranks 0-1 ({HOST}): {what}"]


# ---- shared memory, folders, sums ----------------------------------------------------
def test_a_small_shm():
    text, found = check_cluster.compare_shm(rank_0("ab"), {0: 2**30, 1: 2**26})
    assert text == "1G on rank 0 (a), 64M on rank 1 (b)"
    assert found == ["rank 1 (b): only 64M"]
    assert check_cluster.compare_shm(rank_0("ab"), {0: 2**30, 1: None})[1] == []


def limit_files():
    """Have no file of this process grow beyond 1 MiB: shared memory is files, too."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def test_shared_memory_that_is_full(tmp_path):
    done = run_ranks(tmp_path, 2, prepare={1: limit_files})
    (found,) = problems(done[0])
    assert found.startswith(f"DataLoader: rank 1 ({HOST}): RuntimeError: Caught ")
    assert " ... RuntimeError: unable to " in found and "</torch_" in found
    assert "reduce_scatter of 4K" in done[0].stdout  # the other checks are made


@pytest.mark.parametrize(
    "made, what",
    [
        (False, "FileNotFoundError: [Errno 2] No such file or directory: 'runs'"),
        (True, "the file that rank 0 wrote is not there"),
    ],
)
def test_a_folder_that_one_rank_does_not_share(made, what, tmp_path):
    """The folder is in the current one, which is another one on rank 1."""
    own = [tmp_path / str(rank) for rank in range(2)]
    for rank in range(2):
        (own[rank] / "runs" if made or not rank else own[rank]).mkdir(parents=True)
    prepare = {rank: partial(os.chdir, own[rank]) for rank in range(2)}
    done = run_ranks(tmp_path, 2, [*SHORT, "--folder", "runs"], prepare=prepare)
    assert problems(done[0]) == [f"folder runs: rank 1 ({HOST}): {what}"]
    assert not [*(own[0] / "runs").iterdir()]


def spoil(name):
    """Have a collective give a wrong sum on this rank."""
    call_after(dist, name, lambda _, tensor, *__, **___: tensor.add_(1))


def test_a_wrong_sum(tmp_path):
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # new, and old
    prepare = {1: partial(spoil, next(name for name in names if hasattr(dist, name)))}
    done = run_ranks(tmp_path, 2, prepare=prepare)
    title = "reduce_scatter of 4K within the node"
    assert problems(done[0]) == [f"{title}: rank 1 ({HOST}) got 4, not 3"]


# ---- flags, copies, Slurm ------------------------------------------------------------
@pytest.mark.parametrize(
    "flags, variables, what",
    [
        ([], {"RANK": None}, "RANK is not set: start with torchrun, or with srun"),
        ([], {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        ([], {"RANK": 2}, "RANK=2 is not below WORLD_SIZE=1"),
        ([], {"MASTER_PORT": 70000}, "MASTER_PORT=70000 is not a port"),
        (["--sizes", "big"], {}, "argument --sizes: 'big' is not a list"),
        (["--timeout", "0"], {}, "--timeout 0 has to be above 0"),
        (["--fold"], {}, "unrecognized arguments: --fold"),
    ],
)
def test_wrong_flags_and_variables(flags, variables, what, tmp_path):
    done = run_ranks(tmp_path, 1, flags, variables={0: variables})[0]
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"check_cluster.py: error: {what}")
    assert done.stderr.count("\n") == 1


def test_ranks_and_sizes_as_text():
    assert check_cluster.numbered([3]) == "rank 3"
    assert check_cluster.numbered([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert check_cluster.sizes("4K,1M,2G,7") == [2**12, 2**20, 2**31, 7]
    texts = [check_cluster.in_units(size) for size in (12, 2**12, 2**20, 2**31)]
    assert texts == ["12", "4K", "1M", "2G"]


@pytest.mark.parametrize("torchrun", [False, True])
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
        assert "ok     devices: cpu, 2 nodes" in lines and "OK" in lines
        assert not [line for line in lines if "WRONG" in line]
    finally:
        cluster.script("stop")
