"""Check machines before a training: processes, network, disks. It needs only torch.

Start it exactly as you will start the training, with the folders that it will use:

    $ torchrun --standalone --nproc-per-node=8 check_cluster.py

    on each of two machines, with --node-rank=0 on the first and 1 on the second:
    $ torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=FIRST \\
        --master-port=29500 check_cluster.py --folder /shared/checkpoints

    with Slurm, in the training's job file, which exports MASTER_ADDR and MASTER_PORT:
    srun python check_cluster.py --folder /shared/checkpoints --data /shared/images

With GPUs, add --device cuda. Without it, all ranks use CPUs if none sees a GPU.

Rank 0 prints a report. A rank that cannot reach rank 0 prints its own lines on standard
error. Exit code 0: nothing is wrong; 1: the problems that the report lists; 2: wrong
flags or variables. (torchrun turns every failure into exit code 1 and adds a block of
its own; the report stands above it.)

Each step has --timeout seconds. Ranks that do not finish it are named, and the process
ends in any case. If nothing at all is printed on several machines, the torchruns are
still waiting for each other: one was not started, or cannot reach --master-addr.

How it works: in each step every rank does its part in a thread and writes the result to
the store. Rank 0 compares the results and lets the others go on. The steps are in
STEPS, at the end; start reading at `check`.

Copy this file: it imports nothing but torch and the standard library (torch 2.11 and
later, Python 3.10 and later).
"""

import argparse
import collections
import contextlib
import faulthandler
import fcntl
import functools
import ipaddress
import itertools
import json
import os
import platform
import queue
import re
import resource
import shutil
import signal
import socket
import statistics
import struct
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

GRACE = 5  # seconds in which a rank whose time is over can still say where it is
REPETITIONS = 5
PAIR_SIZE = 2**23  # bytes that each rank of a pair sends to the other
MOST_ROUNDS = 15  # so each node is paired with at most so many others
MOST_ENTRIES = 10_000  # of a folder are counted
CLOCK = 1  # second by which two machines' clocks may differ
OPEN_FILES = 4096  # below that, loaders with many workers run out of them
SHM = "/dev/shm"  # where loader workers put their batches
SAME = ("torch", "cuda", "nccl", "driver", "python")  # versions


@dataclass
class Shared:
    """What rank 0 sends to all ranks after each step."""

    present: list = field(default_factory=list)  # the ranks that still answer
    group: bool = False  # whether collectives can work; once false, it stays so
    nodes: dict = field(default_factory=dict)  # {host: [ranks]}
    listen: dict = field(default_factory=dict)  # {host: (address, port)}
    folders: list = field(default_factory=list)  # of --folder, without those that fail
    folder_name: str = ""  # of what is made in each of them
    stop: bool = False
    exit_code: int = 1


@dataclass
class Report:
    """What was found: on rank 0 everything, on another rank its own problems."""

    facts: dict = field(default_factory=dict)  # {rank: what get_facts returned}
    times: dict = field(default_factory=dict)  # {step: its times}
    problems: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    unchecked: list = field(default_factory=list)  # what was not checked, and why

    def add_problem(self, what, causes, command):
        """Add a problem: what is wrong, the likely causes, the next command to type."""
        self.problems.append({"what": what, "causes": causes, "next": command})


class Fault(Exception):  # noqa: N818 (it is a finding, not an error of this program)
    """What is wrong, with its causes and the next command."""

    def __init__(self, what, causes, command):
        super().__init__(what)
        self.problem = (what, causes, command)


@dataclass
class Run:
    """What a process knows of itself, and what it shares with the others."""

    args: argparse.Namespace
    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    host: str
    device: torch.device
    backend: str
    store: dist.Store = None  # through it ranks answer, even if no collective works
    step: str = "arrival"
    doing: list = field(default_factory=list)  # the calls that this step has begun
    awaited: set = field(default_factory=set)  # the ranks that rank 0 waits for
    ended: Fault = None  # by SIGTERM
    begun: float = 0  # by this machine's clock, when all had arrived
    since: float = 0  # by its monotonic clock, when the step began
    shared: Shared = field(default_factory=Shared)
    report: Report = field(default_factory=Report)

    def names(self, ranks):
        """Return ranks with their hosts: "ranks 0-3 (node1) and rank 5 (node2)"."""
        nodes = self.shared.nodes.items()
        hosts = dict.fromkeys(ranks)
        hosts |= {rank: host for host, ones in nodes for rank in ones if rank in hosts}
        return " and ".join(
            numbered(ones) + (f" ({host})" if host else "")
            for host, ones in ranks_by(hosts).items()
        )


def ranks_by(values):
    """Return {value: [ranks]} for {rank: value}."""
    ranks = collections.defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ranks


def numbered(ranks):
    """Return ranks as text: [0, 1, 2, 5] is "ranks 0-2, 5", and [3] is "rank 3"."""
    ranks, parts = sorted(ranks), []
    for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *_, last = [rank for _, rank in run] * 2
        parts.append(str(first) if first == last else f"{first}-{last}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def group_alike(texts):
    """Return [(ranks, text)] for {rank: text}; ranks whose texts are alike share one.

    Texts are alike if they differ only in numbers, such as pids or ports. Then the text
    is the first rank's, and says so.
    """
    groups = []
    alike = {rank: re.sub(r"\d+", "", text) for rank, text in texts.items()}
    for ranks in ranks_by(alike).values():
        text = texts[ranks[0]]
        if any(texts[rank] != text for rank in ranks):
            text += f" (on rank {ranks[0]})"
        groups.append((ranks, text))
    return groups


def first_line(error):
    """Return the first line of an error's text, without what is too long to read."""
    return str(error).strip().partition("\n")[0][:300]


def as_typed(size, decimals=3):
    """Return bytes in the units of --sizes, powers of 1024: 4096 is "4K"; None: "?"."""
    if size is None:
        return "?"
    for power, unit in ((3, "G"), (2, "M"), (1, "K")):
        if size >= 1024**power:
            return f"{round(size / 1024**power, decimals):g}{unit}"
    return str(size)


# ---- flags and environment -----------------------------------------------------------
class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"check_cluster.py: {message}\n")


def sizes(text):
    """Return the bytes of a list such as "4K,1M"; K, M and G are powers of 1024."""
    found = [re.fullmatch(r"(\d+)([KMG]?)", one) for one in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 4K,1M,32M")
    return [int(one[1]) * 1024 ** " KMG".index(one[2] or " ") for one in found]


def positive(text):
    """Return a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def parse_args():
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add, several = parser.add_argument, {"action": "append", "default": []}
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--folder",
        **several,
        help="an existing folder for checkpoints, on a disk that all ranks share",
    )
    add("--data", **several, help="a folder that all ranks have to see")
    add(
        "--timeout",
        type=positive,
        default=30,
        help="time limit of each step, in seconds",
    )
    add(
        "--sizes",
        type=sizes,
        default=sizes("4K,1M,32M"),
        help="sizes to measure, in bytes: 4K,1M,32M",
    )
    add(
        "--slow-factor",
        type=positive,
        default=2,
        help="what takes this many times the median is slow",
    )
    add("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    variables = launch_variables()
    for name, value in variables.items():
        if not value:
            how = "torchrun sets it, and srun does"
            if name.startswith("MASTER"):
                how = "torchrun sets it; a Slurm job file has to export it"
            parser.error(f"{name} is not set; start as you start the training: {how}")
        if name != "MASTER_ADDR" and not value.isdecimal():
            parser.error(f"{name}={value} is not a number")
    rank, local_rank, world_size = (
        int(variables[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    if not local_rank <= rank < world_size:
        parser.error(
            f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={world_size} contradict"
            " each other: LOCAL_RANK <= RANK < WORLD_SIZE"
        )
    if not 0 < int(variables["MASTER_PORT"]) < 2**16:
        parser.error(f"MASTER_PORT={variables['MASTER_PORT']} is not a port")
    cuda = args.device == "cuda"
    if args.device == "auto":
        cuda = torch.cuda.is_available()
    return Run(
        args,
        rank,
        local_rank,
        world_size,
        variables["MASTER_ADDR"],
        int(variables["MASTER_PORT"]),
        # Two nodes of a test cluster can be one machine, with one host name.
        os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
        "nccl" if cuda else "gloo",
    )


def launch_variables():
    """Return the variables of a rank: a launcher's, or without RANK those of srun."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ.get(name, "") for name in names}
    if not found["RANK"] and "SLURM_STEP_ID" in os.environ:  # only srun sets that
        slurm = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        found |= zip(names, (os.environ.get(name, "") for name in slurm), strict=False)
    return found


# ---- a step, in its time -------------------------------------------------------------
def has_gpu(run):
    """Return whether this rank's GPU is there: there may be more ranks than GPUs."""
    return run.device.type == "cuda" and run.local_rank < torch.cuda.device_count()


def in_time(function, run):
    """Call `function(run)` in a thread, for at most --timeout seconds.

    Returns {"result": ...}, {"problem": ...}, {"error": text} or {"stuck": where}. A
    thread that is stuck in a native call cannot be ended, so the process has to be left
    with os._exit.
    """
    answers = queue.Queue()
    run.doing.clear()

    def body():
        try:
            if has_gpu(run):  # each thread has a current device
                torch.cuda.set_device(run.device)
            answers.put({"result": function(run)})
        except Fault as fault:
            answers.put({"problem": fault.problem})
        except Exception as error:
            line = f"{type(error).__name__}: {first_line(error)}"
            if first_line(error).startswith("Caught "):  # by a loader, in a worker
                line = str(error).strip().splitlines()[-1]
            answers.put({"error": line})

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        answer = answers.get(timeout=run.args.timeout)
    except queue.Empty:
        stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
        mine = [frame for frame in stack if frame.filename == __file__]
        at = mine[-1] if mine else stack[-1]
        answer = {"stuck": f"{at.name}, line {at.lineno}: {at.line}"}
    return answer | {"doing": list(run.doing)}


def never_hang(run):
    """Note when a step begins, and end this process if it is stuck much longer.

    That works even in a native call that keeps the GIL.
    """
    run.since = time.monotonic()
    faulthandler.dump_traceback_later(2 * run.args.timeout + 6 * GRACE, exit=True)


def print_problems(run):
    """Print the problems of a rank that cannot send them to rank 0."""
    for problem in run.report.problems:
        lines = [f"rank {run.rank} ({run.host}): {problem['what']}"]
        print("\n".join(lines + advice(problem)), file=sys.stderr, flush=True)


def advice(problem):
    """Return the lines below a problem."""
    causes = [f"   perhaps {cause}" for cause in problem["causes"]]
    return [*causes, f"   next: {problem['next']}"]


def run_step(run, name, work, compare):
    """Run a step on this rank; rank 0 compares the results and lets all go on."""
    run.step, run.awaited = name, {*run.shared.present}
    never_hang(run)
    answer = in_time(work, run)
    run.store.set(f"{name}/{run.rank}", json.dumps(answer))
    if run.rank:
        wait_to_go(run, name)
        return
    answers = collect(run, {rank: f"{name}/{rank}" for rank in run.shared.present})
    finished = explain(run, name, answers)
    if compare:
        compare(run, {rank: answers[rank]["result"] for rank in finished})
    # After an error a rank can run other steps, but not while it is in a call.
    run.shared.stop = any(one is None or "stuck" in one for one in answers.values())
    run.shared.stop |= name == "facts" and len(finished) < len(answers)
    run.shared.present = [rank for rank, one in answers.items() if one]
    let_go(run, name)


def let_go(run, name):
    """Let the other ranks run the next step, with what they have to know."""
    run.store.set(f"{name}/go", json.dumps(vars(run.shared)))


def wait_to_go(run, name):
    """Wait until rank 0 has compared a step's results; DistError if it does not."""
    key, seconds = f"{name}/go", run.args.timeout + 3 * GRACE
    run.store.wait([key], timedelta(seconds=seconds))
    run.shared = Shared(**json.loads(run.store.get(key)))


def collect(run, keys):
    """Return what ranks wrote to the store, None for each that is late; on rank 0.

    keys: {rank: key}; returns {rank: value}.
    """
    end = run.since + run.args.timeout + GRACE
    run.awaited = {*keys}
    answers = dict.fromkeys(keys)
    while run.awaited and time.monotonic() < end:
        if run.ended:  # Python ignores what a handler raises in a destructor
            raise run.ended
        for rank in [*run.awaited]:
            # Not store.wait: it would keep this process from handling a signal.
            if run.store.check([keys[rank]]):
                answers[rank] = json.loads(run.store.get(keys[rank]))
                run.awaited.remove(rank)
        time.sleep(0.02)
    return answers


def advice_for(run, name):
    """Return the likely causes of a failure in a step, and the next command."""
    if name in NEED_GROUP and run.backend == "nccl" and len(run.shared.nodes) == 1:
        return ON_ONE_NODE
    return ADVICE.get(name, MACHINE)


def on_each_node(command):
    """Return what to type so that a command runs on all nodes."""
    if "SLURM_JOB_ID" in os.environ:
        return f"srun bash -c '{command}'"
    return f"on each node: {command}"


def explain(run, name, answers):
    """Report the ranks that did not finish a step; return those that did."""
    finished, reported = (
        [rank for rank, answer in answers.items() if key in (answer or {})]
        for key in ("result", "problem")
    )
    whats = {rank: answers[rank]["problem"][0] for rank in reported}
    for ranks, what in group_alike(whats):
        _, *advice_of_first = answers[ranks[0]]["problem"]
        run.report.add_problem(f"{run.names(ranks)}: {what}", *advice_of_first)
    failed = [rank for rank in answers if rank not in finished + reported]
    if name in NEED_GROUP and failed:
        run.shared.group = False
    silent = [rank for rank in failed if answers[rank] is None]
    # A rank that has begun fewer calls than others keeps them waiting.
    begun = {rank: len(one["doing"]) for rank, one in answers.items() if one}
    behind = [rank for rank in failed if begun.get(rank, 0) < max(begun.values())]
    if silent or (behind and name in NEED_GROUP):
        explain_late(run, name, answers, silent or behind, failed)
        return finished
    texts = {}
    for rank in failed:
        at = answers[rank]["doing"][-1:] or [answers[rank].get("stuck")]
        late = f"not finished after {run.args.timeout:g} s: {at[0]}"
        texts[rank] = answers[rank].get("error", late)
    for ranks, text in group_alike(texts):
        what = f"{name}: {run.names(ranks)}: {text}"
        run.report.add_problem(what, *advice_for(run, name))
    return finished


def explain_late(run, name, answers, late, failed):
    """Report ranks that keep the others waiting, and where those wait."""
    what = f"{run.names(late)} did not arrive within {run.args.timeout:g} s"
    for rank in late:
        for key, verb in (("stuck", "is in"), ("error", "failed with")):
            if key in (answers[rank] or {}):
                what += f"; rank {rank} {verb} {answers[rank][key]}"
    waiting = [rank for rank in failed if rank not in late]
    for rank in waiting[:1]:
        call = (answers[rank]["doing"] or [name])[-1]
        what += f"; {run.names(waiting)} waited in {call}"
    hosts = [host for host, ranks in run.shared.nodes.items() if {*ranks} & {*late}]
    causes = ["its process was stopped, or died", "its machine hangs or is very slow"]
    run.report.add_problem(
        f"{name}: {what}", causes, f"on {', '.join(hosts)}: ps aux; dmesg -T | tail"
    )


# ---- the first contact ---------------------------------------------------------------
def connect(run):
    """Return the TCPStore of all ranks; Fault if it cannot be reached."""
    address, port = run.master_addr, run.master_port
    resolved = resolve(run)[0]
    # Under torchrun, the first node's torchrun may hold the store already.
    hosts = run.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if hosts:
        check_own(run, resolved)
    else:
        reach_master(run, resolved)
    try:
        limit = timedelta(seconds=run.args.timeout)
        store = dist.TCPStore(
            address, port, run.world_size, hosts, limit, wait_for_workers=False
        )
    except RuntimeError as error:
        what, where = f"cannot listen on port {port}", ""
        if not hosts:
            what, where = f"{master(run)} answers, but is not rank 0", f"on {address}: "
        raise Fault(
            f"{what}: {first_line(error)}",
            ["another program has this port, such as an earlier run"],
            f"{where}ss -ltnp | grep :{port}   (or choose another MASTER_PORT)",
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"check_cluster/{attempt}", store)


def master(run):
    """Return the variables that say where rank 0 is, as they are set."""
    return f"MASTER_ADDR={run.master_addr} MASTER_PORT={run.master_port}"


def resolve(run):
    """Return the IP addresses of MASTER_ADDR; Fault if it has none."""
    address = run.master_addr
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Fault(
            f"MASTER_ADDR={address} does not resolve on {run.host} ({error})",
            ["the name is mistyped", "this node's DNS or /etc/hosts does not have it"],
            f"on {run.host}: getent hosts {address}   (or set MASTER_ADDR to an"
            " IP address, which `hostname -I` prints on the first node)",
        ) from None
    return [info[4][0] for info in found]


def check_own(run, address):
    """Check that rank 0's machine has this address; Fault if it does not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as one:
        try:
            one.bind((address, 0))
        except OSError:
            raise Fault(
                f"MASTER_ADDR={run.master_addr} ({address}) is not an address of"
                f" {socket.gethostname()}, where rank 0 is",
                ["MASTER_ADDR is not the first node's", "rank 0 is on another node"],
                "hostname -I",
            ) from None


def reach_master(run, address):
    """Connect to rank 0's port once, in --timeout seconds; Fault if that fails."""
    place, port = master(run), run.master_port
    end = time.monotonic() + 0.9 * run.args.timeout
    error = None
    while time.monotonic() < end:
        try:
            left = end - time.monotonic()
            with socket.create_connection((run.master_addr, port), left):
                return
        except OSError as failed:
            # In the last moment of a refused connection, a timeout says nothing.
            error = error if error and isinstance(failed, TimeoutError) else failed
        time.sleep(0.2)  # rank 0 may still be importing torch
    interface, own = route_to(address, port)
    where = f"from {own} ({interface})" if own else "without a route to it"
    if isinstance(error, ConnectionRefusedError):
        causes = ["rank 0 was not started or has died", "the port is not rank 0's"]
        if is_loopback(address):
            causes = ["this address means each machine itself, not the first", *causes]
        raise Fault(
            f"{place}: connection refused, {where}",
            causes,
            f"on the first node: hostname -I; ss -ltn | grep :{port}",
        )
    if isinstance(error, TimeoutError) or error is None:
        raise Fault(
            f"{place}: no answer within {run.args.timeout:g} s, {where}",
            ["a firewall drops the packets", "the address is on another network"],
            f"on {run.host}: ping -c 1 {address}; nc -vz {address} {port}",
        )
    raise Fault(
        f"{place}: {error.strerror}, {where}",
        ["the address is on another network", "an interface is down"],
        f"on {run.host}: ip route get {address}; ip -br addr",
    )


def arrive(run):
    """Announce this rank; on rank 0, wait for the others and name the missing ones.

    This needs no process group: making one would only time out without a name.
    """
    never_hang(run)
    key = f"arrived/{run.rank}"
    if run.store.add(f"{key}/count", 1) > 1:
        raise Fault(
            f"another process has RANK={run.rank}, too",
            ["the launcher sets the same variables for several processes"],
            on_each_node('hostname; env | grep -E "^(RANK|SLURM_PROCID)="'),
        )
    run.store.set(key, json.dumps(run.host))
    if run.rank:
        wait_to_go(run, "arrived")
        return
    hosts = collect(run, {rank: f"arrived/{rank}" for rank in range(run.world_size)})
    run.shared.present = [rank for rank, host in hosts.items() if host is not None]
    for rank in run.shared.present:
        run.shared.nodes.setdefault(hosts[rank], []).append(rank)
    report_missing(run)
    run.begun = time.time()
    let_go(run, "arrived")


def report_missing(run):
    """Report the ranks that did not arrive; without them no collective can work."""
    missing = [rank for rank in range(run.world_size) if rank not in run.shared.present]
    run.shared.group = not missing
    if not missing:
        return
    text = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE"))
    nodes = {rank // int(text) for rank in missing} if text else ()
    which = ", ".join(str(node) for node in sorted(nodes))
    which = f" (of node {which}, counted from 0)" if which else ""
    place = f"{run.master_addr} {run.master_port}"
    run.report.add_problem(
        f"{numbered(missing)} of {run.world_size}{which} did not arrive within"
        f" {run.args.timeout:g} s",
        [
            "a process was not started, or died",
            "it cannot reach rank 0, and says so in its own output",
            "it is still importing torch: try a larger --timeout",
        ],
        "squeue --me; scontrol show hostnames; srun hostname"
        if "SLURM_JOB_ID" in os.environ
        else f"on the machine of {numbered(missing[:1])}: nc -vz {place}"
        "   (`refused` is expected: rank 0 has ended)",
    )


# ---- interfaces ----------------------------------------------------------------------
def interfaces():
    """Return {name: IPv4 address} of the interfaces that are up; on Linux."""
    found = {}
    if not sys.platform.startswith("linux"):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())  # an ifreq has 40 bytes
            with contextlib.suppress(OSError):  # it has no IPv4 address
                address = fcntl.ioctl(one, 0x8915, request)[20:24]  # SIOCGIFADDR
                flags = fcntl.ioctl(one, 0x8913, request)[16]  # SIOCGIFFLAGS
                if flags & 1:  # IFF_UP
                    found[name] = socket.inet_ntoa(address)
    return found


def route_to(address, port):
    """Return the interface and the own address that lead to another; "" without one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        try:
            one.connect((address, port))  # sends nothing
        except OSError:
            return "", ""
        own = one.getsockname()[0]
    return interface_of(own), own


def interface_of(address):
    """Return the name of the interface with an address; "?" if it is not found."""
    names = [name for name, each in interfaces().items() if each == address]
    if not names and is_loopback(address):
        names = ["lo"]
    return (names or ["?"])[0]


def is_loopback(address):
    return bool(address) and ipaddress.ip_address(address).is_loopback


def chosen_interface(run, route):
    """Return the interface and address that the backend would use, and why.

    The address is "" if there is none. gloo takes whole names, and fails if one of them
    is missing; without names, it takes the address of the machine's own name. NCCL
    takes prefixes, with = whole names and with ^ all others. route: the interface and
    address that lead to rank 0.
    """
    variable = f"{run.backend.upper()}_SOCKET_IFNAME"
    wanted, all_of_them = os.environ.get(variable, ""), interfaces()
    if wanted and run.backend == "gloo":
        names = wanted.split(",")
        name = next((one for one in names if one not in all_of_them), names[0])
        return name, all_of_them.get(name, ""), f"{variable}={wanted}"
    if wanted:
        words = tuple(wanted.lstrip("^=").split(","))
        found = [
            name
            for name in all_of_them
            if (name in words if "=" in wanted else name.startswith(words))
            != ("^" in wanted)
        ]
        name = found[0] if found else ""
        return name, all_of_them.get(name, ""), f"{variable}={wanted}"
    if run.backend == "nccl":
        found = [name for name in all_of_them if name.startswith("ib")]
        unusual = ("lo", "docker", "virbr")
        found += [name for name in all_of_them if not name.startswith(unusual)]
        if found:
            return found[0], all_of_them[found[0]], "NCCL's usual choice"
        return *route, "it leads to MASTER_ADDR"  # such as an IPv6 address
    name = socket.gethostname()
    try:
        own = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "", "", f"its host name {name} does not resolve"
    return interface_of(own), own, f"its host name {name} resolves to it"


def open_listener(run, address):
    """Answer each connection to `address` with this host's name; return the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=256)

    def serve():
        with contextlib.suppress(OSError):  # until the process ends
            while True:
                with listener.accept()[0] as connection:
                    connection.sendall(run.host.encode())

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def reach_nodes(run):
    """Connect to the other nodes, from the first rank of each; return what failed."""
    if run.rank not in [ranks[0] for ranks in run.shared.nodes.values()]:
        return {}

    def attempt(host):
        address, port = run.shared.listen[host]
        try:
            limit = run.args.timeout / 3
            with socket.create_connection((address, port), limit) as connection:
                connection.settimeout(limit)
                answer = connection.recv(1000).decode()
        except OSError as error:
            return error.strerror or "timed out"
        return "" if answer == host else f"reached {answer or 'nobody'} instead"

    others = [host for host in run.shared.listen if host != run.host]
    with ThreadPoolExecutor(32) as pool:
        failed = dict(zip(others, pool.map(attempt, others), strict=True))
    return {host: why for host, why in failed.items() if why}


def report_connections(run, results):
    """Report which nodes cannot reach which, and what could not be tried."""
    nodes, facts = run.shared.nodes, run.report.facts
    if len(nodes) < 2:
        run.report.unchecked.append(
            "connections between nodes: all ranks have one host name"
        )
    elif lost := [host for host in nodes if host not in run.shared.listen]:
        run.report.unchecked.append(
            f"connections to {', '.join(lost)}: the address to use is not known"
        )
    for rank, failed in sorted(results.items()):
        host = facts[rank]["host"]
        for other, why in failed.items():
            address, port = run.shared.listen[other]
            fact = facts[nodes[other][0]]
            causes = ["a firewall: all TCP ports must be open between the nodes"]
            command = f"on {other}: nc -l 40000; on {host}: nc -vz {address} 40000"
            if fact["interface"] != fact["route"][0]:
                wrong = f"{fact['interface']} ({fact['reason']})"
                causes = [f"{other} would use the wrong interface, {wrong}"]
                command = f"on {other}: ip -br addr; {export_interface(run, fact)}"
            run.report.add_problem(
                f"{host} cannot connect to {other} at {address} port {port}: {why}",
                causes,
                command,
            )
            run.shared.group = False


def export_interface(run, fact):
    """Return the command that has a node use the interface that leads to rank 0."""
    name = fact["route"][0].strip("?") or "NAME"
    return f"export {run.backend.upper()}_SOCKET_IFNAME={name}"


# ---- facts ---------------------------------------------------------------------------
def get_facts(run):
    """Return what rank 0 has to know of this rank to compare it with the others."""
    route = route_to(resolve(run)[0], run.master_port)
    interface, address, reason = chosen_interface(run, route)
    facts = {
        "host": run.host,
        "pid": os.getpid(),
        "local_rank": run.local_rank,
        "device": str(run.device),
        "device_name": platform.machine(),
        "device_id": None,
        "visible_gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "nccl": None,
        "interface": interface,
        "address": address,
        "reason": reason,
        "route": route,
        "interfaces": interfaces(),
        "infiniband": Path("/sys/class/infiniband").is_dir(),
        "port": None,
        "cannot_listen": "",
        "memory_free": available_ram(),
        "shm_free": shutil.disk_usage(SHM).free if Path(SHM).is_dir() else None,
        "cores": sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count())),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "limits": limits(),
        "slurm": slurm_contradictions(run),
        "folder": {path: seen(path, True) for path in run.args.folder},
        "data": {path: seen(path, False) for path in run.args.data},
    }
    if run.local_rank == 0 and address:
        try:
            facts["port"] = open_listener(run, address)
        except OSError as error:  # such as an old address in DNS
            facts["cannot_listen"] = os.strerror(error.errno)
    if torch.version.cuda and dist.is_nccl_available():
        version = torch.cuda.nccl.version()
        facts["nccl"] = ".".join(str(number) for number in version)
    if has_gpu(run):
        found = torch.cuda.get_device_properties(run.device)
        facts |= {"device_name": found.name, "device_id": str(found.uuid)}
        facts["memory_free"] = torch.cuda.mem_get_info(run.device)[0]
    facts["clock"] = time.time()  # last: the answer is on its way to rank 0 then
    return facts


def driver_version():
    """Return the version of NVIDIA's driver, None if this machine has none."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
        return found and found[1]
    return None


def available_ram():
    """Return the free bytes of the machine's memory; None if that is not known."""
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        return int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) * 1024
    return None


def limits():
    """Return the soft limits that trainings run into, None for unlimited."""
    found = {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    infinite = resource.RLIM_INFINITY
    return {key: None if each == infinite else each for key, each in found.items()}


def slurm_contradictions(run):
    """Return where the launcher's variables contradict Slurm's."""
    slurm = {
        name: int(os.environ[name])
        for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        if os.environ.get(name, "").isdecimal()
    }
    if "SLURM_STEP_ID" not in os.environ or len(slurm) < 3:
        return []
    equal = [
        ("RANK", run.rank, "SLURM_PROCID"),
        ("LOCAL_RANK", run.local_rank, "SLURM_LOCALID"),
        ("WORLD_SIZE", run.world_size, "SLURM_NTASKS"),
    ]
    nodes = os.environ.get("GROUP_WORLD_SIZE")
    if nodes:  # torchrun, which ought to be one task per node
        equal = [("GROUP_WORLD_SIZE", int(nodes), "SLURM_NTASKS")]
    return [
        f"{ours}={value}, but {theirs}={slurm[theirs]}"
        for ours, value, theirs in equal
        if value != slurm[theirs]
    ]


def seen(path, writable):
    """Return how this rank sees a folder: an error's text, or "" and its entries."""
    try:
        with os.scandir(path) as entries:
            count = len([*itertools.islice(entries, MOST_ENTRIES)])
    except OSError as error:
        return error.strerror, 0
    if writable and not os.access(path, os.W_OK):
        return "Permission denied (it cannot be written to)", count
    return "", count


def compare_facts(run, facts):
    """Compare the facts of all ranks; set the nodes, and where each listens."""
    now = time.time()
    run.report.facts = facts
    run.shared.folder_name = f".check_cluster-{os.getpid()}-{now:.0f}"
    run.shared.nodes = ranks_by({rank: fact["host"] for rank, fact in facts.items()})
    compare_versions(run, facts)
    report_slurm_variables(run, facts)
    report_missing_gpus(run, facts)
    report_shared_gpus(run, facts)
    report_host_names(run, facts)
    report_addresses(run, facts)
    compare_clocks(run, facts, now)
    compare_folders(run, facts, "folder")
    compare_folders(run, facts, "data")
    note_threads(run, facts)
    note_limits(run, facts)


def compare_versions(run, facts):
    """Report versions that are not the same on all ranks."""
    for name in SAME:
        ranks = ranks_by({rank: fact[name] for rank, fact in facts.items()})
        if len(ranks) > 1:
            run.report.add_problem(
                f"different versions of {name}: {by_value(run, ranks)}",
                ["a node has another environment, image or driver"],
                on_each_node("hostname; which python")
                if name != "driver"
                else "nvidia-smi --query-gpu=driver_version --format=csv,noheader",
            )


def by_value(run, ranks):
    """Return {value: [ranks]} as text: "1 on rank 0 (node1); 2 on rank 1 (node2)"."""
    return "; ".join(f"{value} on {run.names(ones)}" for value, ones in ranks.items())


def report_slurm_variables(run, facts):
    """Report ranks that contradict Slurm's variables."""
    texts = {rank: "; ".join(fact["slurm"]) for rank, fact in facts.items()}
    for ranks, text in group_alike(texts):
        if text:
            run.report.add_problem(
                f"{run.names(ranks)}: {text}",
                [
                    "a variable of an earlier job or shell was exported",
                    "torchrun was started once per GPU, not once per node",
                    "each node's torchrun was started without the others (--nnodes)",
                ],
                "srun env | grep -E '^(RANK|WORLD_SIZE|LOCAL_RANK|SLURM_)'",
            )


def report_missing_gpus(run, facts):
    """Report the ranks without a GPU, unless all ranks are on CPUs."""
    devices = {rank: fact["device"] for rank, fact in facts.items()}
    if {*devices.values()} == {"cpu"}:
        run.report.unchecked.append(
            "GPUs, their driver and NCCL: the ranks are on CPUs"
        )
        return
    visible = {
        rank: fact["visible_gpus"]
        for rank, fact in facts.items()
        if fact["device"] == "cpu" or fact["local_rank"] >= fact["visible_gpus"]
    }
    for count, ranks in ranks_by(visible).items():
        local_ranks = numbered({facts[rank]["local_rank"] for rank in ranks})
        causes = ["more processes than GPUs"]
        if count == 0:
            causes = [
                "the driver is not loaded, or torch is built without CUDA",
                "Slurm or the container gives the process no GPU",
            ]
        elif count == 1:
            causes += ["Slurm gives each task one GPU (--gpus-per-task), named cuda:0"]
        run.report.add_problem(
            f"{run.names(ranks)}: no GPU for local {local_ranks} (visible: {count})",
            causes,
            f"on {facts[ranks[0]]['host']}: nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES;"
            " python -c 'import torch; print(torch.version.cuda)'",
        )
        run.shared.group = False


def report_shared_gpus(run, facts):
    """Report ranks that have the same GPU."""
    gpus = {rank: fact["device_id"] for rank, fact in facts.items()}
    for gpu, ranks in ranks_by(gpus).items():
        if gpu and len(ranks) > 1:
            run.report.add_problem(
                f"{run.names(ranks)} have the same GPU",
                ["LOCAL_RANK is the same for several", "CUDA_VISIBLE_DEVICES differs"],
                f"on {facts[ranks[0]]['host']}: nvidia-smi -L;"
                " env | grep -E 'LOCAL_RANK|CUDA_VISIBLE'",
            )
            run.shared.group = False


def report_host_names(run, facts):
    """Report machines that have the same host name: they repeat local ranks."""
    places = {rank: (fact["host"], fact["local_rank"]) for rank, fact in facts.items()}
    for (host, local_rank), ranks in ranks_by(places).items():
        if len(ranks) > 1:
            run.report.add_problem(
                f"{numbered(ranks)}: all are local rank {local_rank} of {host}",
                ["two machines have the same host name", "LOCAL_RANK is set wrongly"],
                on_each_node("hostname; hostname -I"),
            )


def report_addresses(run, facts):
    """Report a host name or an interface that other nodes cannot use.

    Sets where each of the other nodes listens.
    """
    # The nodes of a test cluster can be one machine, where loopback is enough.
    loopback = [is_loopback(fact["route"][1]) for fact in facts.values()]
    several = len(run.shared.nodes) > 1
    remote = several and not all(loopback)
    for host, ranks in run.shared.nodes.items():
        ones = [facts[rank] for rank in ranks]
        fact = next((one for one in ones if one["local_rank"] == 0), ones[0])
        listeners = sum(bool(one["port"]) for one in ones)
        if wrong := wrong_address(run, fact, remote):
            what, cause, command = wrong
            run.report.add_problem(f"{host}: {what}", [cause], command)
            run.shared.group = False
        elif several and listeners == 1:  # more if two machines have one host name
            run.shared.listen[host] = fact["address"], fact["port"]


def wrong_address(run, fact, remote):
    """Return what is wrong with a node's address, a cause and a command, or None.

    remote: whether other nodes have to use it.
    """
    address, reason, failure = fact["address"], fact["reason"], fact["cannot_listen"]
    named = "SOCKET_IFNAME" in reason
    if not remote and (address or not named):
        return None
    if address and not is_loopback(address) and not failure:
        return None
    command = export_interface(run, fact)
    if named or is_loopback(address):
        shown = ", ".join(f"{k} {v}" for k, v in fact["interfaces"].items())
        what = f"the address for the other nodes is {address or 'missing'}"
        cause = "/etc/hosts gives the machine's own name a loopback address"
        if named:
            cause = "the variable names the wrong interface, or one that is down"
        return f"{what} ({reason}); it has {shown}", cause, command
    what, cause = reason, "neither DNS nor /etc/hosts has it"
    if address:
        what = f"cannot listen on {address} ({reason}): {failure}"
        cause = "DNS or /etc/hosts has an old address of this machine"
    if run.backend == "gloo":
        what += ", so gloo would listen on the loopback address"
    command += f"   (or on {fact['host']}: getent hosts $(hostname); ip -br addr)"
    return what, cause, command


def compare_clocks(run, facts, now):
    """Report clocks that differ for certain.

    A rank read its clock after rank 0 had let it go on (`run.begun`), and before rank 0
    had its answer (`now`). So a clock outside that interval is wrong, however busy the
    machines are. A smaller difference can stay unseen.
    """
    for host, ranks in run.shared.nodes.items():
        clocks = [facts[rank]["clock"] for rank in ranks]
        ahead, behind = max(clocks) - now, run.begun - min(clocks)
        seconds = max(ahead, behind)
        if seconds > CLOCK:
            way = "ahead of" if ahead > behind else "behind"
            run.report.add_problem(
                f"{host}: its clock is at least {seconds:.0f} s {way} rank 0's",
                ["the machine does not synchronize its clock"],
                f"on {host}: timedatectl",
            )


def compare_folders(run, facts, kind):
    """Report folders that ranks do not see, or data that they see differently.

    kind: "folder" or "data", a flag. A --folder that all ranks see is used from now on.
    """
    for path in getattr(run.args, kind):
        errors = ranks_by({rank: fact[kind][path][0] for rank, fact in facts.items()})
        counts = ranks_by({rank: fact[kind][path][1] for rank, fact in facts.items()})
        if [*errors] != [""]:
            errors.pop("", None)
            run.report.add_problem(
                f"--{kind} {path}: {by_value(run, errors)}",
                ["it was not made", "its disk is not mounted there"],
                f"on that node: ls -ld {path}; df {path}; mount | grep -w nfs",
            )
        elif kind == "folder":
            run.shared.folders.append(path)
        elif len(counts) > 1:
            run.report.add_problem(
                f"--data {path}: different numbers of entries: {by_value(run, counts)}",
                ["a copy is incomplete"],
                f"on each node: ls {path} | wc -l",
            )
    if not getattr(run.args, kind):
        run.report.unchecked.append(f"{kind}: no --{kind} is given")


def note_threads(run, facts):
    """Note nodes with more threads than cores."""
    for host, ranks in run.shared.nodes.items():
        cores = {core for rank in ranks for core in facts[rank]["cores"]}
        threads = sum(facts[rank]["threads"] for rank in ranks)
        if threads > len(cores):
            run.report.notes.append(
                f"{host}: {len(ranks)} processes have {threads} threads together, but"
                f" only {len(cores)} cores; set OMP_NUM_THREADS"
            )


def note_limits(run, facts):
    """Note low limits of open files, and of the memory that InfiniBand has to lock."""
    for host, ranks in run.shared.nodes.items():
        files = [facts[rank]["limits"]["open_files"] for rank in ranks]
        fewest = min((each for each in files if each is not None), default=OPEN_FILES)
        if fewest < OPEN_FILES:
            run.report.notes.append(
                f"{host}: a process may open only {fewest} files; loaders with many"
                f" workers need more: ulimit -n {2**16}"
            )
        first = facts[ranks[0]]
        memory = first["limits"]["locked_memory"]
        if memory is not None and first["infiniband"]:
            run.report.notes.append(
                f"{host}: a process may lock only {as_typed(memory)} bytes; InfiniBand"
                " needs ulimit -l unlimited"
            )


# ---- a save that all ranks see -------------------------------------------------------
def content_of(rank):
    return f"rank {rank}\n" * 1000


def in_each_folder(work, run):
    """Call `work(run, place)` for a place in each --folder; return {folder: error}."""
    errors = {}
    for folder in run.shared.folders:
        run.doing.append(folder)
        try:
            work(run, Path(folder, run.shared.folder_name))
        except OSError as error:
            errors[folder] = error.strerror
    return errors


def save(run, place):
    """Save rank 0's file."""
    if run.rank == 0:
        place.mkdir()
        save_file(run, place)


def load(run, place):
    """Check rank 0's file on this rank, and save its own."""
    check_file(run, place, 0)
    if run.rank:
        save_file(run, place)


def load_all(run, place):
    """Check the files of all ranks on rank 0."""
    for rank in run.shared.present if run.rank == 0 else ():
        check_file(run, place, rank)


def save_file(run, place):
    (place / f"rank-{run.rank}").write_text(content_of(run.rank))


def check_file(run, place, rank):
    """Check a rank's file: a shared disk may show it to other machines after seconds.

    Raises OSError if it is not seen in half the time, or has another content.
    """
    path, end = place / f"rank-{rank}", time.monotonic() + run.args.timeout / 2
    while not path.exists():
        if time.monotonic() > end:
            raise OSError(0, f"the file {path.name} was saved, but is not seen")
        with contextlib.suppress(OSError):
            [*place.parent.iterdir()]  # has NFS look again
        time.sleep(0.1)
    if path.read_text(errors="replace") != content_of(rank):
        raise OSError(0, f"{path.name} does not have the content that was saved")


def report_saves(run, results):
    """Report folders in which a save or a load failed, and leave them out from now."""
    for folder in [*run.shared.folders]:
        errors = {
            rank: each[folder] for rank, each in results.items() if folder in each
        }
        for error, ranks in ranks_by(errors).items():
            run.report.add_problem(
                f"--folder {folder}: {error} on {run.names(ranks)}",
                ["each machine has its own folder of that name, on its own disk"]
                if "not seen" in error
                else ["the disk or a quota is full", "the file server has a fault"],
                f"on each node: df {folder}; stat -f -c %T {folder}",
            )
        if errors:
            run.shared.folders.remove(folder)


# ---- loader workers, and the speed of each rank --------------------------------------
def load_batches(run):
    """Get batches of 8 MiB from workers, through shared memory."""
    run.doing.append("a DataLoader with workers")
    samples = [torch.zeros(2**21)] * 8
    for _ in DataLoader(samples, num_workers=2):
        pass


def compute(run):
    """Return the seconds of each repetition of a matrix product."""
    if run.device.type == "cuda" and not has_gpu(run):
        return []  # reported with the facts
    cuda = run.device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if cuda else (512, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=run.device)
    return [*timed(run, lambda: torch.mm(matrix, matrix))]


def timed(run, function, prepare=None):
    """Yield the seconds of each repetition of a call, without a first one."""
    for repetition in range(REPETITIONS + 1):
        if prepare:
            prepare()
        synchronize(run)
        start = time.perf_counter()
        function()
        synchronize(run)
        seconds = time.perf_counter() - start
        if repetition:
            yield seconds


def synchronize(run):
    if run.device.type == "cuda":  # its calls return before the work is done
        torch.cuda.synchronize()


def compare_speeds(run, results):
    """Report ranks that are slower than the others with the same device."""
    fastest = {rank: min(seconds) for rank, seconds in results.items() if seconds}
    run.report.times["compute"] = fastest
    devices = {rank: run.report.facts[rank]["device_name"] for rank in fastest}
    for device, ranks in ranks_by(devices).items():
        if len(ranks) == 1:
            run.report.unchecked.append(
                f"the speed of {run.names(ranks)}: no other {device}"
            )
        own = {rank: fastest[rank] for rank in ranks}
        for rank, others in find_slow(own, run.args.slow_factor).items():
            fact = run.report.facts[rank]
            causes = ["other programs use its cores"]
            command = f"on {fact['host']}: top; taskset -p {fact['pid']}"
            if run.device.type == "cuda":
                causes = ["the GPU is hot or throttled", "other programs use it"]
                command = f"on {fact['host']}: nvidia-smi -q -d PERFORMANCE,CLOCK; top"
            run.report.add_problem(
                f"{run.names([rank])} is slow: a matrix product takes"
                f" {fastest[rank] * 1e3:.3f} ms, on the other ranks"
                f" {others * 1e3:.3f} ms (median)",
                causes,
                command,
            )


def find_slow(seconds, factor):
    """Return {one: median of the others} for what takes `factor` times that median."""
    slow = {}
    for one, own in seconds.items():
        others = [each for other, each in seconds.items() if other != one]
        if others and own > factor * statistics.median(others):
            slow[one] = statistics.median(others)
    return slow


# ---- collectives ---------------------------------------------------------------------
def join_group(run):
    """Make the process group; return a wrong sum of the first all-reduce, or None."""
    run.doing.append("init_process_group")
    # gloo waits for the other ranks here, and keeps the GIL: it has to give up itself.
    # NCCL would end the process when its time is over. Without a device_id it connects
    # in the first all-reduce, which does not keep the GIL.
    seconds = run.args.timeout * (0.8 if run.backend == "gloo" else 20)
    dist.init_process_group(
        run.backend,
        store=dist.PrefixStore("group", run.store),
        rank=run.rank,
        world_size=run.world_size,
        timeout=timedelta(seconds=seconds),
    )
    run.doing.append("the first all_reduce")
    total = torch.tensor([run.rank + 1.0], device=run.device)
    dist.all_reduce(total)
    expected = run.world_size * (run.world_size + 1) / 2
    return None if total.item() == expected else [total.item(), expected]


def report_wrong(run, results, size=""):
    """Report ranks with a wrong result; results: {rank: [result, expected] or None}."""
    wrong = {rank: tuple(both) for rank, both in results.items() if both}
    for (value, expected), ranks in ranks_by(wrong).items():
        what = f"wrong sum on {run.names(ranks)}: {value:g}, not {expected:g}"
        run.report.add_problem(
            f"{run.step}{size}: {what}",
            ["a GPU, its memory or a link is faulty", "NCCL or its plugin is broken"],
            "NCCL_P2P_DISABLE=1 and the same command; nvidia-smi -q -d ECC"
            if run.backend == "nccl"
            else "the same command with fewer nodes, to find the one that matters",
        )


# torch 2.14 has new names for two of them, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COLLECTIVES = {
    "all_reduce": lambda whole, _: dist.all_reduce(whole),
    "all_gather": all_gather,
    "reduce_scatter": lambda whole, part: scatter(part, whole),
}


def time_collective(run):
    """Return what `time_size` does for each size; the step is the collective."""
    return [time_size(run, run.step, size) for size in run.args.sizes]


def time_size(run, name, size):
    """Return the bytes, the seconds of each repetition, and what is wrong or None.

    The bytes differ from `size` if they cannot be divided by the number of ranks. What
    is wrong is the first wrong value, with the expected one.
    """
    count = max(size // 4 // run.world_size, 1)  # floats of a rank's part
    whole = torch.empty(count * run.world_size, device=run.device)
    part = torch.empty(count, device=run.device)
    total = run.world_size * (run.world_size + 1) / 2
    output = part if name == "reduce_scatter" else whole
    expected = torch.full_like(output, total)
    if name == "all_gather":  # part i comes from rank i
        expected = torch.arange(1.0, run.world_size + 1, device=run.device)
        expected = expected.repeat_interleave(count)

    def prepare():
        whole.fill_(run.rank + 1)
        part.fill_(run.rank + 1)
        run.doing.append(f"{name} of {as_typed(size)}")
        dist.all_reduce(torch.ones(1, device=run.device))  # have all begin together

    seconds, wrong = [], None
    for each in timed(run, lambda: COLLECTIVES[name](whole, part), prepare):
        seconds.append(each)
        places = (output != expected).nonzero()
        if len(places) and wrong is None:
            place = places[0]
            wrong = [output[place].item(), expected[place].item()]
    return [whole.nbytes, seconds, wrong]


def report_collective(run, results):
    """Report wrong results, and compute the bandwidths as nccl-tests defines them.

    For n ranks and a size of S bytes, which is all of an all-reduce's tensor, an
    all-gather's output and a reduce-scatter's input:
        algorithm bandwidth = S / time
        bus bandwidth = that * 2(n-1)/n for an all-reduce, * (n-1)/n for the others
    A repetition takes as long as on its slowest rank.
    """
    if len(results) < run.world_size:
        return
    name, times = run.step, []
    factor = (2 if name == "all_reduce" else 1) * (1 - 1 / run.world_size)
    for index, size in enumerate(run.args.sizes):
        of_ranks = {rank: result[index] for rank, result in results.items()}
        repetitions = zip(*(each for _, each, _ in of_ranks.values()), strict=True)
        slowest = [max(each) for each in repetitions]
        total = of_ranks[0][0]
        bandwidth = total / statistics.median(slowest) / 1e9
        times.append(
            {
                "bytes": total,
                "min_ms": min(slowest) * 1e3,
                "median_ms": statistics.median(slowest) * 1e3,
                "algorithm_gb_per_s": bandwidth,
                "bus_gb_per_s": bandwidth * factor,
            }
        )
        wrong = {rank: both for rank, (_, _, both) in of_ranks.items()}
        report_wrong(run, wrong, f" of {as_typed(size)}")
    run.report.times[name] = times


# ---- pairs of nodes ------------------------------------------------------------------
def units(run):
    """Return {name: ranks} of what is compared in pairs: nodes, or the ranks of one."""
    if len(run.shared.nodes) > 1:
        return run.shared.nodes
    return {numbered([rank]): [rank] for rank in range(run.world_size)}


def rounds(ones):
    """Yield lists of disjoint pairs, until each was paired with each other one."""
    ones = [*ones] + [None] * (len(ones) % 2)
    for _ in range(len(ones) - 1):
        half = len(ones) // 2
        pairs = zip(ones[:half], reversed(ones[half:]), strict=True)
        yield [pair for pair in pairs if None not in pair]
        ones = [ones[0], ones[-1], *ones[1:-1]]


def time_pairs(run):
    """Exchange data with a rank of each other node; return [[pair], [seconds]] lists.

    The pairs of a round run at the same time, and each rank has its partner.
    """
    found, ranks_of = [], units(run)
    for pairs in itertools.islice(rounds(ranks_of), MOST_ROUNDS):
        for pair in pairs:
            for ranks in zip(*(ranks_of[one] for one in pair), strict=False):
                if run.rank in ranks:
                    partner = sum(ranks) - run.rank
                    found.append([pair, exchange(run, partner)])
    return found


def exchange(run, partner):
    """Return the seconds in which this rank and its partner send each other data."""
    sent = torch.full((PAIR_SIZE // 4,), run.rank + 1.0, device=run.device)
    received = torch.empty_like(sent)

    def both():
        run.doing.append(f"an exchange with rank {partner}")
        works = [
            dist.P2POp(dist.isend, sent, partner),
            dist.P2POp(dist.irecv, received, partner),
        ]
        for work in dist.batch_isend_irecv(works):
            work.wait()

    seconds = [*timed(run, both)]
    if not bool((received == partner + 1).all()):
        raise RuntimeError(f"wrong data from rank {partner}")
    return seconds


def compare_pairs(run, results):
    """Report slow nodes and links; `slow_units` has the rule."""
    repetitions = collections.defaultdict(list)
    for found in results.values():
        for pair, seconds in found:
            repetitions[tuple(pair)].append(seconds)
    best = {
        pair: min(max(one) for one in zip(*ranks, strict=True))
        for pair, ranks in repetitions.items()
    }
    run.report.times["pairs"] = [
        {"pair": pair, "min_ms": seconds * 1e3} for pair, seconds in best.items()
    ]
    if len(best) < 2:
        run.report.unchecked.append(
            "whether a link is slow: that takes three nodes, or three ranks of one"
        )
    if len(units(run)) > MOST_ROUNDS + 1:
        run.report.unchecked.append(
            f"some pairs: each of {len(units(run))} met only {MOST_ROUNDS} others"
        )
    for unit, pair, seconds, others in slow_units(best, run.args.slow_factor):
        if pair:
            what = f"the link {' - '.join(pair)} is slow: an exchange"
        else:
            what = f"{unit} is slow: even its fastest exchange"
        run.report.add_problem(
            f"{what} of {as_typed(PAIR_SIZE)} takes {seconds * 1e3:.3f} ms, the others"
            f" {others * 1e3:.3f} ms (median)",
            ["a cable, a port or an adapter is faulty", "it falls back to TCP"],
            "NCCL_DEBUG=INFO and the same command: look for 'Using network'; ibstat"
            if run.backend == "nccl"
            else "ip -s link; ethtool NAME | grep Speed",
        )


def slow_units(best, factor):
    """Return [(unit, None or pair, seconds, median of the others)] for what is slow.

    best: {pair: its fastest repetition}. A unit is slow if the fastest of its pairs
    takes `factor` times the median of the pairs without it. Of a unit with one pair
    only the pair can be slow: without the slow units, a pair is slow if it takes
    `factor` times the median of the other pairs.
    """
    slow = []
    for unit in dict.fromkeys(unit for pair in best for unit in pair):
        own = [seconds for pair, seconds in best.items() if unit in pair]
        others = [seconds for pair, seconds in best.items() if unit not in pair]
        if len(own) > 1 and others and min(own) > factor * statistics.median(others):
            slow.append((unit, None, min(own), statistics.median(others)))
    gone = {unit for unit, *_ in slow}
    rest = {pair: each for pair, each in best.items() if not gone & {*pair}}
    for pair, others in find_slow(rest, factor).items():
        slow.append((None, pair, rest[pair], others))
    return slow


# ---- the steps, in order -------------------------------------------------------------
NEED_FOLDER = {"save": save, "load": load, "load all": load_all}
# A step: what each rank does, and what rank 0 concludes from {rank: result}. First come
# those for which ranks need not reach each other.
STEPS = {
    "facts": (get_facts, compare_facts),
    **{
        name: (functools.partial(in_each_folder, work), report_saves)
        for name, work in NEED_FOLDER.items()
    },
    "loader": (load_batches, None),
    "compute": (compute, compare_speeds),
    "connections": (reach_nodes, report_connections),
    "process group": (join_group, report_wrong),
    **dict.fromkeys(COLLECTIVES, (time_collective, report_collective)),
    "pairs": (time_pairs, compare_pairs),
}
NEED_GROUP = ("process group", *COLLECTIVES, "pairs")  # the last ones
# step: likely causes of a failure, and the next command
MACHINE = (["the machine is busy or faulty"], "top; dmesg -T | tail")
NETWORK = (
    ["a firewall: all TCP ports must be open between the nodes", "a wrong interface"],
    "the same command with NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO for gloo)",
)
ON_ONE_NODE = (
    ["the GPUs cannot reach each other directly", "/dev/shm is too small"],
    "the same command with NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1 as a test",
)
DISK = (
    ["the file server does not answer", "the disk is full"],
    "timeout 5 df; dmesg | tail",
)
ADVICE = {
    **dict.fromkeys((*NEED_GROUP, "connections"), NETWORK),
    **dict.fromkeys((*NEED_FOLDER, "facts"), DISK),
    "loader": (
        ["/dev/shm is full or too small: it is 64 MB in a Docker container"],
        "df -h /dev/shm; ls -l /dev/shm   (docker run --shm-size=16g, or --ipc=host)",
    ),
}


def check(run):
    """Run the steps; return the exit code."""
    left, run.awaited = [*STEPS], {*range(1, run.world_size)}
    try:
        connected = in_time(connect, run)
        if "result" not in connected:
            where = connected.get("stuck", connected.get("error"))
            failed = f"the first contact failed: {where}", *NETWORK
            raise Fault(*connected.get("problem", failed))
        run.store = connected["result"]
        arrive(run)
        while left and not run.shared.stop:
            if left[0] in NEED_GROUP and not run.shared.group:
                break
            name = left.pop(0)
            if name not in NEED_FOLDER or run.shared.folders:
                run_step(run, name, *STEPS[name])
        run.step = "report"
        if run.rank:
            wait_to_go(run, "report")
    except Fault as fault:
        run.report.add_problem(*fault.problem)
    except dist.DistError as error:
        run.report.add_problem(
            f"no answer from rank 0 or its launcher in step {run.step!r}:"
            f" {first_line(error)}",
            ["one of them ended, or hangs", "the network failed"],
            "read what they printed",
        )
    if run.rank == 0:
        return finish(run, left)
    if run.report.problems:  # this rank cannot send them to rank 0
        print_problems(run)
        time.sleep(GRACE)  # a launcher may end rank 0 as soon as this process ends
        return 1
    with contextlib.suppress(dist.DistError):
        run.store.set(f"bye/{run.rank}", "")
    return run.shared.exit_code


def on_sigterm(run):
    """What rank 0 does when its launcher ends it, because another rank died: report."""
    late = [rank for rank in run.awaited if rank]
    late = f"; no answer from {run.names(late)}" if late else ""
    run.ended = Fault(
        f"a launcher ended rank 0 (SIGTERM) in step {run.step!r}{late}",
        ["another rank died", "the job was cancelled, or its time is over"],
        "read what the launcher printed about its exit code or signal",
    )
    raise run.ended


def finish(run, left):
    """Print the report, send the others the exit code, and return it; on rank 0.

    left: the steps that were not run.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    never_hang(run)
    for folder in run.args.folder if run.shared.folder_name else ():
        shutil.rmtree(Path(folder, run.shared.folder_name), ignore_errors=True)
    if left:
        why = "the check ended before"
        if left[0] in NEED_GROUP and not run.shared.group:
            why = "skipped because of a problem below"
        run.report.unchecked.append(f"{', '.join(left)}: {why}")
    print(as_json(run) if run.args.json else as_text(run), flush=True)
    run.shared.exit_code = int(bool(run.report.problems))
    with contextlib.suppress(dist.DistError):
        if run.store:
            let_go(run, "report")
            # The store may be in this process, and the others have to read it.
            byes = [f"bye/{rank}" for rank in run.shared.present if rank]
            end = time.monotonic() + GRACE
            while byes and not run.store.check(byes) and time.monotonic() < end:
                time.sleep(0.02)
    return run.shared.exit_code


def as_json(run):
    found = {"ok": not run.report.problems, "nodes": run.shared.nodes}
    return json.dumps(found | vars(run.report))


def as_text(run):
    nodes = len(run.shared.nodes)
    lines = [f"{run.world_size} processes, {run.backend}, nodes: {nodes}"]
    lines += rank_lines(run) + time_lines(run)
    lines += [f"note: {note}" for note in run.report.notes]
    lines += [f"not checked: {one}" for one in run.report.unchecked]
    if not run.report.problems:
        return "\n".join([*lines, "OK"])
    count = len(run.report.problems)
    lines += ["", f"{count} problem{'s' * (count > 1)}:"]
    for number, problem in enumerate(run.report.problems, 1):
        lines += [f"{number}. {problem['what']}"]
        lines += advice(problem)
    return "\n".join(lines)


def rank_lines(run):
    """Return a line for the ranks of a node whose facts look the same."""
    facts = run.report.facts
    if not facts:
        return []
    rows = {
        rank: (
            fact["host"],
            f"{fact['device'].split(':')[0]} {fact['device_name']}",
            f"{fact['interface']} {fact['address']}",
            as_typed(fact["memory_free"], 0),
            as_typed(fact["shm_free"], 0),
            f"{len(fact['cores'])}",
            f"{fact['threads']} ({fact['omp'] or 'unset'})",
            f"{fact['limits']['open_files'] or 'unlimited'}",
        )
        for rank, fact in facts.items()
    }
    titles = ("ranks", "host", "device", "interface", "free memory", "free /dev/shm")
    table = [(*titles, "cores", "threads (OMP)", "open files")]
    for row, ranks in ranks_by(rows).items():
        table.append((numbered(ranks).partition(" ")[2], *row))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    same = []
    for name in SAME:
        values = {fact[name] for fact in facts.values()}
        if len(values) == 1 and (value := values.pop()):
            same.append(f"{name} {value}")
    return [*lines, f"on all ranks: {', '.join(same)}"]


def time_lines(run):
    """Return a line for each collective and size, and those of the slowest pairs."""
    lines = []
    for name in COLLECTIVES:
        for one in run.report.times.get(name, ()):
            lines.append(
                f"{name:14} {as_typed(one['bytes']):>6}"
                f" {one['min_ms']:10.3f} {one['median_ms']:10.3f}"
                f" {one['algorithm_gb_per_s']:10.3f} {one['bus_gb_per_s']:8.3f}"
            )
    if lines:
        title = f"{'collective':14} {'size':>6} {'min ms':>10} {'median ms':>10}"
        lines.insert(0, f"{title} {'algo GB/s':>10} {'bus GB/s':>8}")
    pairs = sorted(run.report.times.get("pairs", []), key=lambda one: -one["min_ms"])
    shown = [f"{' - '.join(one['pair'])} {one['min_ms']:.3f} ms" for one in pairs[:3]]
    if shown:
        few = " (the slowest)" if len(pairs) > len(shown) else ""
        lines.append(f"exchanges of {as_typed(PAIR_SIZE)}{few}: {', '.join(shown)}")
    return lines


def main():
    run = parse_args()
    never_hang(run)
    if run.rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: on_sigterm(run))
    code = check(run)
    sys.stdout.flush()
    os._exit(code)  # not sys.exit: a thread that is stuck would keep the process


if __name__ == "__main__":
    main()
