"""your_own_script/check_cluster.py: each fault is found, named, and explained.

Several machines are network namespaces: each has a host name, an address on a common
bridge, and a /etc/hosts of its own. Without the right to make them (of root on Linux),
those tests are skipped. No test waits for a time: a step that has to fail lasts for
--timeout, and what has to succeed may take far longer than it does.
"""

import ast
import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from tests.slurm_cluster import Cluster
from tests.spy import call_after
from tests.training import load_program
from tests.training import missing_for_slurm
from tools import harness
from tools.stages import ROOT
from tools.stages import first_with

pytestmark = [pytest.mark.ci, pytest.mark.slow]
CHECK = ROOT / "your_own_script" / "check_cluster.py"
FAST = ("--device", "cpu", "--sizes", "4K")
LONG = ("--timeout", str(harness.LIMIT), "--slow-factor", "1e9")  # what has to succeed
SECONDS = 20  # far more than a step takes on a busy machine
SHORT = ("--timeout", str(SECONDS), "--slow-factor", "1e9")  # what has to fail after it
BRIDGE, PORT = "10.213.0", "29500"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000

harness.preloaded += ["tests.test_check_cluster"]

check_cluster = load_program(CHECK, "check_cluster")


# ---- starting ranks ------------------------------------------------------------------
def start_ranks(stack, folder, count, flags, ranks=None, prepare=None, variables=None):
    """Start a process per rank; return {rank: job}.

    ranks: those to start, all by default; prepare: {rank: function}; variables: {rank:
    dict} of environment variables, None for all ranks.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": harness.free_port()}
    shared |= {"WORLD_SIZE": count} | (variables or {}).get(None, {})
    jobs = {}
    for rank in range(count) if ranks is None else ranks:
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        own |= (variables or {}).get(rank, {})
        job = harness.start(
            ["python", CHECK, *FAST, *flags],
            folder / str(rank),
            forks=True,
            prepare=(prepare or {}).get(rank),
            **own,
        )
        jobs[rank] = stack.enter_context(job)
    return jobs


def run_ranks(folder, count, flags=LONG, wait_for=None, **options):
    """Run ranks to their end; return {rank: Done}. wait_for: the ranks that end."""
    with contextlib.ExitStack() as stack:
        jobs = start_ranks(stack, folder, count, flags, **options)
        waited = jobs if wait_for is None else wait_for
        return {rank: jobs[rank].wait() for rank in waited}


def problems(done, count=1):
    """Return the numbered problems of rank 0's report, as it prints them."""
    assert done.returncode == 1, done
    title = f"\n{count} problem{'s' * (count > 1)}:\n"
    assert title in done.stdout, done.stdout + done.stderr
    found = done.stdout.partition(title)[2]
    assert found.count("   next: ") == count
    assert "   perhaps " in found
    return found


# ---- machines ------------------------------------------------------------------------
def sh(command):
    subprocess.run(command, shell=True, check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines():
    """Network namespaces {host name: namespace}, linked by a bridge: node1 to node3."""
    name = f"cc{os.getpid()}"
    if os.geteuid() or not sys.platform.startswith("linux"):
        pytest.skip("network namespaces: not root on Linux")
    hub = f"{name}-hub"
    made = {f"node{number}": f"{name}-{number}" for number in (1, 2, 3)}
    try:
        sh(f"ip netns add {hub} && ip -n {hub} link add hub type bridge")
        sh(f"ip -n {hub} link set hub up")
        for number, space in enumerate(made.values(), 1):
            sh(f"ip netns add {space} && ip -n {space} link set lo up")
            sh(f"ip -n {space} link add eth0 type veth peer v{number} netns {hub}")
            sh(f"ip -n {hub} link set v{number} master hub up")
            sh(f"ip -n {space} addr add {BRIDGE}.{number}/24 dev eth0")
            sh(f"ip -n {space} link set eth0 up")
            sh(f"ip -n {space} link add wrong0 type veth peer w{number} netns {hub}")
            sh(f"ip -n {space} addr add 10.214.{number}.1/24 dev wrong0")
            sh(f"ip -n {space} link set wrong0 up")
            sh(f"ip -n {space} link add down0 type veth peer d{number} netns {hub}")
            sh(f"ip -n {space} addr add 10.215.{number}.1/24 dev down0")
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
    finally:
        for space in (hub, *made.values()):
            subprocess.run(f"ip netns del {space}", shell=True, capture_output=True)


def be_node(space, host, hosts, *more):
    """Be a process of a machine: a `prepare`.

    hosts: the content of its /etc/hosts; more: shell commands in a mount namespace of
    its own, which change what this machine sees.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY)
    assert libc.setns(descriptor, CLONE_NEWNET) == 0
    assert libc.unshare(CLONE_NEWUTS | CLONE_NEWNS) == 0
    socket.sethostname(host)
    sh("mount --make-rprivate /")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(hosts)
        file.flush()
        sh(f"mount --bind {file.name} /etc/hosts")
    for command in more:
        sh(command)


HOSTS = "127.0.0.1 localhost\n" + "".join(
    f"{BRIDGE}.{number} node{number}\n" for number in (1, 2, 3)
)


def run_nodes(machines, folder, flags=LONG, count=2, more=None, hosts=None, **options):
    """Run a rank on each machine; return {rank: Done}.

    more: {rank: shell commands}, hosts: {rank: /etc/hosts}, for `be_node`.
    """
    variables = {None: {"MASTER_ADDR": f"{BRIDGE}.1", "MASTER_PORT": PORT}}
    given, prepare = options.pop("variables", {}), {}
    for rank in range(count):
        host, space = [*machines.items()][rank]
        own_hosts = (hosts or {}).get(rank, HOSTS)
        commands = (more or {}).get(rank, ())
        prepare[rank] = functools.partial(be_node, space, host, own_hosts, *commands)
        variables[rank] = {
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            **given.get(rank, {}),
        }
    with contextlib.ExitStack() as stack:
        work = {"prepare": prepare, "variables": variables}
        jobs = start_ranks(stack, folder, count, flags, **work, **options)
        return {rank: job.wait() for rank, job in jobs.items()}


# ---- nothing is wrong ----------------------------------------------------------------
def test_torchrun_with_two_ranks(tmp_path):
    command = ["torchrun", "--standalone", "--nproc-per-node=2", CHECK, *FAST, *LONG]
    data = tmp_path / "data"
    data.mkdir()
    command += ["--folder", tmp_path, "--data", data]
    done = harness.run(command, tmp_path / "out")
    assert done.stdout.endswith("\nOK\n")
    assert not done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out"}


@pytest.fixture(scope="module")
def healthy(machines, tmp_path_factory):
    """What three ranks report as JSON, each on a machine of its own."""
    folder = tmp_path_factory.mktemp("healthy")
    flags = [*LONG, "--json", "--folder", folder, "--data", folder]
    done = run_nodes(machines, folder / "out", flags, 3)
    assert [one.returncode for one in done.values()] == [0, 0, 0], done
    assert not done[1].stdout + done[2].stdout
    return json.loads(done[0].stdout)


def test_three_machines_are_healthy(healthy):
    assert healthy["ok"] and not healthy["problems"]
    assert healthy["nodes"] == {"node1": [0], "node2": [1], "node3": [2]}
    assert len(healthy["unchecked"]) == 1 and "GPUs" in healthy["unchecked"][0]


def test_the_facts_are_those_of_each_rank(healthy):
    for rank, fact in healthy["facts"].items():
        assert fact["address"] == f"{BRIDGE}.{int(rank) + 1}"
        assert fact["interface"] == fact["route"][0] == "eth0"
        assert fact["torch"] == torch.__version__
        assert fact["cores"] == sorted(os.sched_getaffinity(0))
        assert (fact["omp"], fact["threads"]) == ("1", 1)
        assert set(fact["limits"]) == {"open_files", "locked_memory"}


def test_bandwidths_are_those_of_nccl_tests(healthy):
    factors = {"all_reduce": 2 * 2 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3}
    for name, factor in factors.items():
        (one,) = healthy["times"][name]
        assert one["bytes"] == 4092  # 4K cannot be divided by three ranks
        expected = 4092 / (one["median_ms"] / 1e3) / 1e9
        assert one["algorithm_gb_per_s"] == pytest.approx(expected)
        assert one["bus_gb_per_s"] == pytest.approx(expected * factor)
        assert 0 < one["min_ms"] <= one["median_ms"]
    pairs = {tuple(sorted(one["pair"])) for one in healthy["times"]["pairs"]}
    assert pairs == {*itertools.combinations(["node1", "node2", "node3"], 2)}


# ---- a rank is missing ---------------------------------------------------------------
def test_a_rank_that_was_not_started(tmp_path):
    done = run_ranks(tmp_path, 3, SHORT, ranks=(0, 2))
    assert f"rank 1 of 3 did not arrive within {SECONDS} s" in problems(done[0])
    assert "not checked: process group" in done[0].stdout
    assert done[2].returncode == 1 and not done[2].stderr


@pytest.mark.release
def test_rank_0_was_not_started(tmp_path):
    done = run_ranks(tmp_path, 2, SHORT, ranks=(1,))[1]
    assert done.returncode == 1 and not done.stdout
    assert "MASTER_ADDR=127.0.0.1 MASTER_PORT=" in done.stderr
    assert "connection refused, from 127.0.0.1 (lo)" in done.stderr
    assert "next: on the first node: hostname -I; ss -ltn" in done.stderr


def block_forever(name):
    """Have a function of torch never return, on this rank."""
    setattr(torch, name, lambda *_, **__: threading.Event().wait())


def test_a_rank_that_does_not_come_to_a_collective(tmp_path):
    prepare = {1: functools.partial(block_forever, "full_like")}
    done = run_ranks(tmp_path, 3, SHORT, prepare=prepare)
    assert [one.returncode for one in done.values()] == [1, 1, 1]
    found, host = problems(done[0]), socket.gethostname()
    what = f"1. all_reduce: rank 1 ({host}) did not arrive within {SECONDS} s; "
    assert found.startswith(f"{what}rank 1 is in")
    assert "expected = torch.full_like(output, total); " in found
    assert f"ranks 0, 2 ({host}) waited in all_reduce of 4K\n" in found


def stop_in(name):
    """Have this process be stopped, as by SIGSTOP, in a function of torch."""
    setattr(dist, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP))


def test_a_rank_that_gives_no_sign_of_life(tmp_path):
    prepare = {1: functools.partial(stop_in, "init_process_group")}
    done = run_ranks(tmp_path, 3, SHORT, prepare=prepare, wait_for=(0, 2))
    assert done[2].returncode == 1
    found, host = problems(done[0]), socket.gethostname()
    what = f"1. process group: rank 1 ({host}) did not arrive within {SECONDS} s; "
    assert found.startswith(f"{what}ranks 0, 2")
    assert f"next: on {host}: ps aux" in found


def killed_after(name, begun):
    """Have this process be killed in a function of torch, once a file is there."""

    def die(*_, **__):
        harness.wait_until(begun.exists, harness.LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(torch, name, die)


def note_call(name, begun):
    call_after(torch, name, lambda *_: begun.touch())


def test_rank_0_dies(tmp_path):
    """In a step that rank 1 has begun, too."""
    begun = tmp_path / "begun"
    prepare = {
        0: functools.partial(killed_after, "mm", begun),
        1: functools.partial(note_call, "mm", begun),
    }
    done = run_ranks(tmp_path, 2, prepare=prepare)
    assert done[0].returncode == -signal.SIGKILL
    assert done[1].returncode == 1 and not done[1].stdout
    what = "no answer from rank 0 or its launcher in step 'compute': "
    assert what in done[1].stderr


def keep_the_gil(name):
    """Have a function of torch never return, nor let another thread run."""
    setattr(torch, name, lambda *_, **__: ctypes.PyDLL(None).pause())


@pytest.mark.release
def test_a_call_that_keeps_the_gil(tmp_path):
    prepare = {1: functools.partial(keep_the_gil, "mm")}
    done = run_ranks(tmp_path, 2, SHORT, prepare=prepare)
    host = socket.gethostname()
    what = f"1. compute: rank 1 ({host}) did not arrive within {SECONDS} s\n"
    assert problems(done[0]).startswith(what)
    assert done[1].returncode == 1
    assert done[1].stderr.startswith("Timeout (0:")


def test_a_launcher_that_ends_rank_0(tmp_path):
    """As torchrun and Slurm do when another rank has died."""
    port = harness.free_port()
    with contextlib.ExitStack() as stack:
        variables = {None: {"MASTER_PORT": port}}
        jobs = start_ranks(stack, tmp_path, 2, LONG, ranks=[0], variables=variables)
        harness.wait_until(lambda: harness.port_answers(int(port)), harness.LIMIT)
        os.kill(jobs[0].pid, signal.SIGTERM)
        found = problems(jobs[0].wait())
    assert "(SIGTERM) in step 'arrival'; no answer from rank 1" in found


def rank_0(**more):
    """What rank 0 of two knows of itself: no process is started."""
    device = torch.device("cuda:0")
    run = {"args": None, "rank": 0, "local_rank": 0, "world_size": 2, "device": device}
    run |= {"master_addr": "a", "master_port": 29500, "host": "a", "backend": "nccl"}
    return check_cluster.Run(**{**run, **more})


def test_a_signal_in_a_destructor():
    """Python ignores what is raised there."""
    run = rank_0(args=types.SimpleNamespace(timeout=SECONDS), store=dist.HashStore())
    run.since = time.monotonic()
    with pytest.raises(check_cluster.Fault):
        check_cluster.on_sigterm(run)
    with pytest.raises(check_cluster.Fault, match="SIGTERM"):
        check_cluster.collect(run, {1: "never set"})


# ---- the network ---------------------------------------------------------------------
@pytest.fixture
def rules(machines):
    """A function that adds a rule to a machine's routes; they go after the test."""
    added = []

    def add(host, rule):
        space = machines[host]
        sh(f"ip -n {space} rule add {rule}")
        added.append((space, rule))

    yield add
    for space, rule in added:
        sh(f"ip -n {space} rule del {rule}")


def test_the_port_of_rank_0_is_blocked(machines, rules, tmp_path):
    """As by a firewall that drops packets: node1's answers never leave it."""
    rules("node1", f"ipproto tcp sport {PORT} to {BRIDGE}.2 blackhole")
    done = run_nodes(machines, tmp_path, SHORT)
    assert "rank 1 of 2 (of node 1, counted from 0) did not arrive" in problems(done[0])
    assert done[1].returncode == 1
    place = f"MASTER_ADDR={BRIDGE}.1 MASTER_PORT={PORT}: no answer within {SECONDS} s"
    assert f"rank 1 (node2): {place}, from {BRIDGE}.2 (eth0)" in done[1].stderr
    assert "perhaps a firewall drops the packets" in done[1].stderr
    assert f"next: on node2: ping -c 1 {BRIDGE}.1; nc -vz" in done[1].stderr


def test_only_the_port_of_rank_0_is_open(machines, rules, tmp_path):
    other = f"ipproto tcp to {BRIDGE}.2 sport"
    rules("node1", f"{other} {PORT} pref 10 lookup main")
    rules("node1", f"{other} 1024-65534 pref 11 blackhole")
    done = run_nodes(machines, tmp_path, SHORT)
    found = problems(done[0], 2)
    assert f"node2 cannot connect to node1 at {BRIDGE}.1 port " in found
    assert "perhaps a firewall: all TCP ports must be open between the nodes" in found
    assert done[1].returncode == 1


def test_master_addr_does_not_resolve_on_one_node(machines, tmp_path):
    hosts = {1: HOSTS.replace("node1", "other")}
    variables = {rank: {"MASTER_ADDR": "node1"} for rank in range(2)}
    done = run_nodes(machines, tmp_path, SHORT, hosts=hosts, variables=variables)
    assert "rank 1 of 2 (of node 1, counted from 0) did not arrive" in problems(done[0])
    assert done[1].returncode == 1
    assert "MASTER_ADDR=node1 does not resolve on node2" in done[1].stderr
    assert "next: on node2: getent hosts node1" in done[1].stderr


def test_a_node_whose_own_name_does_not_resolve(machines, tmp_path):
    hosts = {1: HOSTS.replace("node2", "other")}
    done = run_nodes(machines, tmp_path, hosts=hosts)
    found = problems(done[0])
    assert "1. node2: its host name node2 does not resolve" in found
    assert "next: export GLOO_SOCKET_IFNAME=eth0" in found


OLD_ADDRESS = HOSTS.replace(f"{BRIDGE}.3 node3", f"{BRIDGE}.99 node3")


def test_a_node_whose_own_name_has_an_old_address(machines, tmp_path):
    """The other two nodes can connect to each other, and nothing is said of them."""
    done = run_nodes(machines, tmp_path, count=3, hosts={2: OLD_ADDRESS})
    found = problems(done[0])
    what = f"cannot listen on {BRIDGE}.99 (its host name node3 resolves to it): Cannot"
    assert found.startswith(f"1. node3: {what} assign requested address, so gloo")
    assert "next: export GLOO_SOCKET_IFNAME=eth0" in found
    lines = [
        line for line in done[0].stdout.splitlines() if "not checked: conn" in line
    ]
    assert lines == [
        "not checked: connections to node3: the address to use is not known"
    ]


def test_an_old_address_does_not_matter_on_one_machine(machines, tmp_path):
    be_node3 = functools.partial(be_node, machines["node3"], "node3", OLD_ADDRESS)
    done = run_ranks(tmp_path, 2, prepare=dict.fromkeys(range(2), be_node3))
    assert [one.returncode for one in done.values()] == [0, 0], done
    assert done[0].stdout.endswith("\nOK\n")


def choose_for_nccl(space, route, expected):
    """Check which interface NCCL would use on a machine; None: one without IPv4."""
    if space:
        be_node(space, "node", HOSTS)
    else:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    run = types.SimpleNamespace(backend="nccl")
    assert check_cluster.chosen_interface(run, route) == expected


def test_the_interface_of_nccl(machines):
    ipv6, eth0 = ("?", "fd00::1"), ("eth0", f"{BRIDGE}.1")
    calls = [
        (machines["node1"], ipv6, (*eth0, "NCCL's usual choice")),
        (None, ipv6, (*ipv6, "it leads to MASTER_ADDR")),
    ]
    harness.call_in_forks(choose_for_nccl, calls)


@pytest.mark.parametrize(
    "interface, what",
    [
        ("eth9", "1. node2: the address for the other nodes is missing (GLOO_"),
        ("down0", "1. node2: the address for the other nodes is missing (GLOO_"),
        ("^lo", "1. node2: the address for the other nodes is missing (GLOO_"),
        ("lo", "1. node2: the address for the other nodes is 127.0.0.1 (GLOO_"),
        ("wrong0", "1. node1 cannot connect to node2 at 10.214.2.1 port "),
    ],
)
def test_a_wrong_interface(interface, what, machines, tmp_path):
    """gloo takes whole names only, and not NCCL's ^."""
    variables = {1: {"GLOO_SOCKET_IFNAME": interface}}
    done = run_nodes(machines, tmp_path, variables=variables)
    found = problems(done[0])
    assert found.startswith(what)
    assert "next: " in found and "export GLOO_SOCKET_IFNAME=eth0" in found
    assert done[1].returncode == 1


def test_a_port_in_use(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        variables = {None: {"MASTER_PORT": port}}
        done = run_ranks(tmp_path, 2, LONG, ranks=[0], variables=variables)[0]
    assert f"cannot listen on port {port}" in problems(done)
    assert f"next: ss -ltnp | grep :{port}" in done.stdout


@pytest.mark.release
def test_master_addr_is_another_machine(machines, tmp_path):
    variables = {0: {"MASTER_ADDR": f"{BRIDGE}.2"}}
    done = run_nodes(machines, tmp_path, SHORT, variables=variables)
    assert "is not an address of node1, where rank 0 is" in problems(done[0])


# ---- facts that differ ---------------------------------------------------------------
def set_torch_version(version):
    torch.__version__ = version


def test_different_versions(tmp_path):
    prepare = {1: functools.partial(set_torch_version, "2.11.0")}
    done = run_ranks(tmp_path, 2, prepare=prepare)
    host = socket.gethostname()
    shown = f"{torch.__version__} on rank 0 ({host}); 2.11.0 on rank 1 ({host})"
    assert f"different versions of torch: {shown}" in problems(done[0])


def shift_clock(seconds):
    now = time.time
    time.time = lambda: now() + seconds


@pytest.mark.parametrize("seconds, way", [(7200, "ahead of"), (-7200, "behind")])
def test_a_wrong_clock(seconds, way, tmp_path):
    prepare = {1: functools.partial(shift_clock, seconds)}
    done = run_ranks(tmp_path, 2, prepare=prepare)
    found = re.search(rf"its clock is at least (\d+) s {way} ", problems(done[0]))
    assert 7200 - harness.LIMIT < int(found[1]) <= 7200


def test_variables_that_contradict_slurms(tmp_path):
    slurm = {"SLURM_STEP_ID": 0, "SLURM_NTASKS": 2}
    variables = {
        rank: {**slurm, "SLURM_PROCID": 1 - rank, "SLURM_LOCALID": rank}
        for rank in range(2)
    }
    done = run_ranks(tmp_path, 2, variables=variables)
    what = f"ranks 0-1 ({socket.gethostname()}): RANK=0, but SLURM_PROCID=1 (on rank 0)"
    assert problems(done[0]).startswith(f"1. {what}\n")


def test_a_torchrun_that_does_not_know_of_the_other_node(tmp_path):
    """Slurm started one on each of two nodes, and this one is alone."""
    slurm = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    variables = {None: {**slurm, "SLURM_NTASKS": 2, "GROUP_WORLD_SIZE": 1}}
    done = run_ranks(tmp_path, 2, variables=variables)
    what = f"ranks 0-1 ({socket.gethostname()}): GROUP_WORLD_SIZE=1, but SLURM_NTASKS=2"
    assert problems(done[0]).startswith(f"1. {what}\n")


def test_two_machines_with_one_host_name(tmp_path):
    done = run_ranks(tmp_path, 2, variables={1: {"LOCAL_RANK": 0}})
    host = socket.gethostname()
    what = f"1. ranks 0-1: all are local rank 0 of {host}"
    assert problems(done[0]).startswith(what)
    assert "perhaps two machines have the same host name" in done[0].stdout


@pytest.mark.parametrize(
    "facts, what",
    [
        (
            {1: {"device": "cpu", "visible_gpus": 0}},
            "rank 1 (b): no GPU for local rank 0 (visible: 0)",
        ),
        ({1: {"local_rank": 1}}, "rank 1 (b): no GPU for local rank 1 (visible: 1)"),
        (
            {0: {"visible_gpus": 0}, 1: {"visible_gpus": 0}},
            "rank 0 (a) and rank 1 (b): no GPU for local rank 0 (visible: 0)",
        ),
        ({1: {"device_id": "0"}}, "rank 0 (a) and rank 1 (b) have the same GPU"),
    ],
)
def test_gpus_that_are_missing_or_shared(facts, what):
    """No GPU is needed: only what rank 0 concludes from the facts is tested."""
    run = rank_0()
    run.shared.nodes, run.shared.group = {"a": [0], "b": [1]}, True
    usual = {"device": "cuda:0", "visible_gpus": 1, "local_rank": 0}
    both = {
        rank: {**usual, "host": host, "device_id": str(rank), **facts.get(rank, {})}
        for rank, host in enumerate("ab")
    }
    check_cluster.report_missing_gpus(run, both)
    check_cluster.report_shared_gpus(run, both)
    (problem,) = run.report.problems
    assert problem["what"] == what
    assert not run.shared.group


def test_device_cuda_without_a_gpu(tmp_path):
    """Every rank arrives, so that rank 0 can report it."""
    flags = [*LONG, "--device", "cuda"]
    done = run_ranks(tmp_path, 2, flags, variables={None: {"CUDA_VISIBLE_DEVICES": ""}})
    what = (
        f"ranks 0-1 ({socket.gethostname()}): no GPU for local ranks 0-1 (visible: 0)"
    )
    assert problems(done[0]).startswith(f"1. {what}\n")
    assert "not checked: process group" in done[0].stdout
    assert done[1].returncode == 1 and not done[1].stderr


def test_limits_of_one_node_are_notes(machines, tmp_path):
    """Only node2 has InfiniBand, which needs more memory than may be locked."""
    limit = ["prlimit --pid $PPID --memlock=65536 --nofile=1024"]
    infiniband = ["mount -t tmpfs tmpfs /sys/class", "mkdir /sys/class/infiniband"]
    done = run_nodes(machines, tmp_path, more={0: limit, 1: limit + infiniband})
    assert done[0].returncode == 0, done
    notes = [line for line in done[0].stdout.splitlines() if line.startswith("note: ")]
    assert [note[:43] for note in notes] == [
        "note: node1: a process may open only 1024 f",
        "note: node2: a process may open only 1024 f",
        "note: node2: a process may lock only 64K by",
    ]


@pytest.mark.release
def test_two_processes_with_the_same_rank(tmp_path):
    variables = {2: {"RANK": 1, "LOCAL_RANK": 1}}
    done = run_ranks(tmp_path, 3, SHORT, variables=variables)
    assert "rank 2 of 3 did not arrive" in problems(done[0])
    assert [one.returncode for one in done.values()] == [1, 1, 1]
    assert "another process has RANK=1, too" in done[1].stderr + done[2].stderr


# ---- disks and shared memory ---------------------------------------------------------
def test_a_folder_that_one_node_does_not_see(machines, tmp_path):
    folder = tmp_path / "shared" / "checkpoints"
    folder.mkdir(parents=True)
    more = {1: [f"mount -t tmpfs tmpfs {folder.parent}"]}
    flags = [*LONG, "--folder", folder]
    done = run_nodes(machines, tmp_path / "out", flags, more=more)
    what = f"--folder {folder}: No such file or directory on rank 1 (node2)"
    assert what in problems(done[0])
    assert not [*folder.iterdir()]


def test_a_folder_that_is_not_shared(machines, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    more = {1: [f"mount -t tmpfs tmpfs {folder}"]}
    done = run_nodes(
        machines, tmp_path / "out", [*SHORT, "--folder", folder], more=more
    )
    what = "the file rank-0 was saved, but is not seen on rank 1 (node2)"
    assert f"--folder {folder}: {what}" in problems(done[0])
    assert not [*folder.iterdir()]


@pytest.mark.release
def test_data_that_is_incomplete_on_one_node(machines, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "1.txt").write_text("")
    more = {1: [f"mount -t tmpfs tmpfs {data}"]}
    flags = [*LONG, "--data", data]
    done = run_nodes(machines, tmp_path / "out", flags, more=more)
    what = "different numbers of entries: 1 on rank 0 (node1); 0 on rank 1 (node2)"
    assert what in problems(done[0])


def test_a_full_dev_shm(machines, tmp_path):
    more = {1: ["mount -t tmpfs -o size=1m tmpfs /dev/shm"]}
    done = run_nodes(machines, tmp_path, more=more)
    found = problems(done[0])
    assert found.startswith("1. loader: rank 1 (node2): RuntimeError: ")
    assert "No space left on device" in found
    assert "perhaps /dev/shm is full or too small" in found
    assert "next: df -h /dev/shm" in found


# ---- slow ranks and wrong sums -------------------------------------------------------
def slow_calls(owner, name, matters=None):
    """Have calls of a function take 1000 s by this process's clock, and no time.

    So the test does not depend on how fast the machine is. matters: a function of the
    call's arguments that says whether the call is slow.
    """
    clock, passed = time.perf_counter, [0]

    def add(_, *arguments):
        if matters is None or matters(*arguments):
            passed[0] += 1000

    time.perf_counter = lambda: clock() + passed[0]
    call_after(owner, name, add)


def slow_products():
    slow_calls(torch, "mm")


def test_one_slow_rank(tmp_path):
    flags = ["--timeout", str(harness.LIMIT), "--slow-factor", "50"]
    done = run_ranks(tmp_path, 3, flags, prepare={1: slow_products})
    host = socket.gethostname()
    what = rf"1\. rank 1 \({re.escape(host)}\) is slow: a matrix product takes "
    assert re.match(what + r"1000\d{3}\.", problems(done[0]))


def slow_links(*ranks):
    """Have exchanges with these ranks be slow on this rank."""
    slow_calls(dist, "batch_isend_irecv", lambda works: works[0].peer in ranks)


@pytest.mark.parametrize(
    "slow, what",
    [
        ({0: [2], 1: [2], 2: [0, 1]}, "rank 2 is slow: even its fastest exchange"),
        ({0: [1], 1: [0], 2: []}, "the link rank 0 - rank 1 is slow: an exchange"),
    ],
    ids=["a node", "a link"],
)
def test_a_slow_link_is_named(slow, what, tmp_path):
    prepare = {rank: functools.partial(slow_links, *of) for rank, of in slow.items()}
    flags = ["--timeout", str(harness.LIMIT), "--slow-factor", "50"]
    done = run_ranks(tmp_path, 3, flags, prepare=prepare)
    assert what in problems(done[0])


def spoil(name):
    """Have a collective give a wrong sum on this rank."""
    call_after(dist, name, lambda _, tensor, *__, **___: tensor.add_(1))


def test_a_wrong_sum(tmp_path):
    prepare = {1: functools.partial(spoil, "reduce_scatter_single")}
    done = run_ranks(tmp_path, 2, prepare=prepare)
    host = socket.gethostname()
    what = f"reduce_scatter of 4K: wrong sum on rank 1 ({host}): 4, not 3"
    assert what in problems(done[0])


# ---- flags and environment -----------------------------------------------------------
@pytest.mark.parametrize(
    "flags, variables, what",
    [
        ([], {"RANK": None}, "RANK is not set; start as you start the training: torch"),
        ([], {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        ([], {"RANK": 2}, "RANK=2 LOCAL_RANK=0 WORLD_SIZE=1 contradict"),
        ([], {"MASTER_PORT": 70000}, "MASTER_PORT=70000 is not a port"),
        (["--sizes", "big"], {}, "argument --sizes: 'big' is not a list"),
        (["--timeout", "0"], {}, "argument --timeout: '0' is not a number above 0"),
        (["--fold"], {}, "unrecognized arguments: --fold"),
    ],
)
def test_wrong_flags_and_variables(flags, variables, what, tmp_path):
    done = run_ranks(tmp_path, 1, flags, variables={0: variables})[0]
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"check_cluster.py: {what}")
    assert done.stderr.count("\n") == 1


# ---- its parts -----------------------------------------------------------------------
@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_each_is_paired_with_each_other_once(count):
    rounds = [*check_cluster.rounds(range(count))]
    pairs = [tuple(sorted(pair)) for one in rounds for pair in one]
    assert sorted(pairs) == [*itertools.combinations(range(count), 2)]
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len({*ranks}) == len(ranks)


@pytest.mark.parametrize("count, said", [(16, False), (17, True)])
def test_pairs_that_are_not_tried_are_named(count, said):
    run = rank_0(args=SimpleNamespace(slow_factor=2))
    run.shared.nodes = {f"node{number}": [number] for number in range(count)}
    check_cluster.compare_pairs(run, {})
    line = f"some pairs: each of {count} met only 15 others"
    assert (line in run.report.unchecked) == said


def test_what_is_slow_if_two_of_three_pairs_are_known():
    best = {("a", "b"): 1, ("a", "c"): 3}
    assert check_cluster.slow_units(best, 2) == [(None, ("a", "c"), 3, 1)]


def test_sizes_are_as_typed():
    assert check_cluster.sizes("4K,1M,2G") == [2**12, 2**20, 2**31]
    shown = [check_cluster.as_typed(size) for size in (12, 4092, 2**12, 2**20, 2**31)]
    assert shown == ["12", "3.996K", "4K", "1M", "2G"]
    assert check_cluster.as_typed(100.4 * 2**30, 0) == "100G"
    assert check_cluster.as_typed(None) == "?"


def test_numbered():
    assert check_cluster.numbered([3]) == "rank 3"
    assert check_cluster.numbered([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_it_needs_torch_alone():
    tree = ast.parse(CHECK.read_text(), feature_version=(3, 10))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
    names = {name.split(".")[0] for name in modules}
    assert names <= {*sys.stdlib_module_names, "torch"}


# ---- Slurm ---------------------------------------------------------------------------
@pytest.fixture
def cluster():
    if missing_for_slurm():
        assert "REQUIRE_SLURM" not in os.environ, missing_for_slurm()
        pytest.skip(missing_for_slurm())
    cluster = Cluster(f"/run/local_cluster_of_check_cluster_{os.getpid()}")
    try:
        cluster.script("start")
        yield cluster
    finally:
        cluster.script("stop")


def test_the_job_file_of_a_training_on_two_nodes(cluster, tmp_path):
    """The stage's job file starts it with srun, in place of the stage's script."""
    words = [*FAST, *LONG, "--json", "--folder", tmp_path]
    job_file = ROOT / first_with("slurm") / "job.sbatch"
    options = ["--ntasks-per-node=1", job_file, *words]
    job = cluster.sbatch(*options, cwd=tmp_path, SCRIPT=CHECK)
    job.wait("COMPLETED")
    (line,) = [line for line in job.log().splitlines() if line.startswith("{")]
    seen = json.loads(line)
    assert seen["ok"]
    assert [*seen["nodes"].values()] == [[0], [1]]
    assert [fact["slurm"] for fact in seen["facts"].values()] == [[], []]


def test_the_advice_depends_on_the_number_of_nodes(monkeypatch):
    program = load_program(CHECK)
    run = SimpleNamespace(backend="nccl", shared=SimpleNamespace())
    run.shared.nodes = {"node1": [0, 1]}
    causes, command = program.advice_for(run, "process group")
    assert "NCCL_P2P_DISABLE=1" in command and "firewall" not in " ".join(causes)
    run.shared.nodes["node2"] = [2, 3]
    assert "firewall" in " ".join(program.advice_for(run, "process group")[0])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert program.on_each_node("hostname") == "on each node: hostname"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert program.on_each_node("hostname") == "srun bash -c 'hostname'"
