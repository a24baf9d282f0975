"""Check the machines of a cluster before a training: processes, network, folders.

Start it as you will start the training, with the folders that it will use:

    $ torchrun --standalone --nproc-per-node=8 check_cluster.py

    on each of two machines, with --node-rank=0 on the first and 1 on the second:
    $ torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=FIRST \\
        --master-port=29500 check_cluster.py --folder /shared/checkpoints

    with Slurm, in the training's job file, which exports MASTER_ADDR and MASTER_PORT:
    srun python check_cluster.py --folder /shared/checkpoints

Rank 0 prints a line for each check: `ok`, or `WRONG` and what is wrong. A rank that
cannot reach rank 0 says so on standard error. Exit code 0: nothing is wrong; 1:
something is; 2: wrong flags or variables. (torchrun turns 2 into 1.)

Each check has --timeout seconds. Ranks that do not finish it are named, and then all
processes end. If nothing at all is printed, the torchruns are still waiting for each
other.

How it works: in each check every rank does its part, in a thread that it does not wait
for longer than that, and writes the outcome to the TCPStore. Rank 0 reads and compares
the outcomes, and writes whether the others go on. Start reading at `main`.

Copy this file: it needs torch (2.11 or later) and Python 3.10 or later, nothing else.
"""

import argparse
import collections
import faulthandler
import functools
import ipaddress
import itertools
import json
import os
import platform
import queue
import re
import shutil
import socket
import statistics
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from dataclasses import field
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

GRACE = 5  # seconds in which a rank whose time is over can still say where it is
REPETITIONS = 5  # of each collective, after a first one that is not timed
SHM = "/dev/shm"  # where the workers of a DataLoader put their batches
DOCKERS = 64 * 2**20  # bytes of it in a container, unless one asks for more
UNITS = {"G": 2**30, "M": 2**20, "K": 2**10}


@dataclass
class Run:
    """What a process knows of itself, and on rank 0 of the others."""

    args: argparse.Namespace
    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    host: str
    device: torch.device
    backend: str
    store: dist.Store = None
    groups: dict = field(default_factory=dict)  # {what they connect: process group}
    checks: int = 0  # so many have begun
    problems: int = 0  # that they have found
    hosts: dict = field(default_factory=dict)  # {rank: host}, on rank 0
    files: list = field(default_factory=list)  # that rank 0 has to remove

    def names(self, ranks):
        """Return ranks with their hosts: "ranks 0-3 (node1), rank 5 (node2)"."""
        nodes = ranks_by({rank: self.hosts.get(rank) for rank in ranks}).items()
        shown = [numbered(ones) + f" ({host})" * bool(host) for host, ones in nodes]
        return ", ".join(shown)

    def describe(self, values):
        """Return {rank: value} as text, a value alone if it is the same on all."""
        ranks = ranks_by(values)
        if len(ranks) == 1:
            return str(min(ranks))
        return ", ".join(f"{one} on {self.names(ranks[one])}" for one in ranks)


class Fault(Exception):  # noqa: N818 (it is a finding, not an error of this program)
    """What is wrong, in a sentence of ours."""


def ranks_by(values):
    """Return {value: [ranks]} for {rank: value}."""
    ranks = collections.defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ranks


def numbered(ranks):
    """Return ranks as text: [0, 1, 2, 5] is "ranks 0-2, 5", and [3] is "rank 3"."""
    parts = []
    for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *_, last = [rank for _, rank in run] * 2
        parts.append(str(first) if first == last else f"{first}-{last}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def in_units(size):
    """Return bytes in powers of 1024: 4096 is "4K"."""
    for unit, number in UNITS.items():
        if size >= number:
            return f"{size / number:.3g}{unit}"
    return str(size)


# ---- flags and the launcher's variables ----------------------------------------------
class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"check_cluster.py: error: {message}\n")


def sizes(text):
    """Return the bytes of a list such as "4K,1M"."""
    found = [re.fullmatch(r"(\d+)([KMG]?)", one) for one in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 4K,1M,32M")
    return [int(one[1]) * UNITS.get(one[2], 1) for one in found]


def parse_args():
    """Return the Run of this process."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    text = (
        "auto (the default): GPUs with NCCL if there are any, otherwise CPUs with gloo"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    text = (
        "an existing folder on a disk that all ranks share; can be given several times"
    )
    add("--folder", action="append", default=[], help=text)
    text = "seconds that each check may take (default: 30)"
    add("--timeout", type=float, default=30, help=text)
    text = "bytes of the collectives' tensors (default: 4K,1M,32M)"
    add("--sizes", type=sizes, default="4K,1M,32M", help=text)
    args = parser.parse_args()
    if not 0 < args.timeout < 1e6:
        parser.error(f"--timeout {args.timeout:g} has to be above 0 and below 1e6")
    rank, local_rank, world_size, port = read_numbers(parser)
    cuda = args.device == "cuda" or args.device == "auto" and torch.cuda.is_available()
    return Run(
        args,
        rank,
        local_rank,
        world_size,
        os.environ["MASTER_ADDR"],
        port,
        # Two nodes of a test cluster can be one machine, with one host name.
        os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
        "nccl" if cuda else "gloo",
    )


def read_numbers(parser):
    """Return rank, local rank, world size and port, as torchrun or srun has set them.

    Ends the program with exit code 2 if one is missing or impossible.
    """
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"]
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        names[:3] = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
    for name in [*names, "MASTER_ADDR"]:
        value = os.environ.get(name)
        if not value:
            how = "start with torchrun, or with srun in a job file that exports it"
            parser.error(f"{name} is not set: {how}")
        if name != "MASTER_ADDR" and not value.isdecimal():
            parser.error(f"{name}={value} is not a number")
    rank, local_rank, world_size, port = (int(os.environ[name]) for name in names)
    if not rank < world_size:
        parser.error(f"{names[0]}={rank} is not below {names[2]}={world_size}")
    if not 0 < port < 2**16:
        parser.error(f"MASTER_PORT={port} is not a port")
    return rank, local_rank, world_size, port


# ---- a check on all ranks, in its time -----------------------------------------------
def call(function, seconds):
    """Call a function in a thread, and wait for it no longer than so many seconds.

    Returns ("done", result), ("failed", the error's text) or ("late", where it is). A
    thread that is stuck cannot be ended, so the process has to leave by os._exit.
    """
    outcomes = queue.Queue()

    def body():
        try:
            outcomes.put(("done", function()))
        except Exception as error:
            outcomes.put(("failed", text_of(error)))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        return outcomes.get(timeout=seconds)
    except queue.Empty:
        stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
        mine = call.__code__.co_filename
        at = [frame for frame in stack if frame.filename == mine][-1]
        return "late", f"line {at.lineno}, {at.line}"


def text_of(error):
    """Return an error's first line, and its last, where NCCL and loaders say why."""
    if isinstance(error, Fault):
        return str(error)
    lines = str(error).partition("\nException raised from")[0].strip().splitlines()
    ends = dict.fromkeys([*lines[:1], *lines[-1:]])
    return f"{type(error).__name__}: {' ... '.join(ends)}"


def check(run, name, work, compare=None, hint=""):
    """Run a check on all ranks; return on all of them whether nothing is wrong.

    work(run): what a rank does; its result has to be JSON. compare(run, results): what
    rank 0 concludes from {rank: result}, as a text to print and a list of problems.
    hint: is printed below problems. Ends the processes if a rank is missing or stuck.
    """
    # If no thread can run, because a call keeps the GIL: print stacks, exit code 1.
    faulthandler.dump_traceback_later(run.args.timeout + 6 * GRACE, exit=True)
    end = time.monotonic() + run.args.timeout + GRACE  # for the answers of all
    run.checks += 1
    outcome = call(lambda: work(run), run.args.timeout)

    def exchange():
        run.store.set(f"{run.checks}/{run.rank}", json.dumps([run.host, *outcome]))
        key = f"{run.checks}/found"
        if run.rank == 0:
            found = conclude(run, name, collect(run, end), compare, hint)
            run.store.set(key, json.dumps(found))
        run.store.wait([key], timedelta(seconds=end + GRACE - time.monotonic()))
        return json.loads(run.store.get(key))

    kind, found = call(exchange, end + 2 * GRACE - time.monotonic())
    if kind != "done":
        why = found if kind == "failed" else "its store hangs"
        fail(run, f"{name}: no answer from rank 0: {why}")
    problems, go_on = found
    run.problems += problems
    if not go_on:
        finish(run)
    return not problems


def wait_for(store, keys, end):
    """Wait on rank 0 until the store has all keys, or the time is over; return whether.

    store.wait would print warnings of its own when the time is over.
    """
    while not (there := store.check(keys)) and time.monotonic() < end:
        time.sleep(0.02)
    return there


def collect(run, end):
    """Return {rank: (kind, value)} of those that answer before the time is over."""
    keys = [f"{run.checks}/{rank}" for rank in range(run.world_size)]
    answers = {}
    arrived = wait_for(run.store, keys, end)
    for rank, key in enumerate(keys):
        if arrived or run.store.check([key]):
            run.hosts[rank], *answers[rank] = json.loads(run.store.get(key))
    return answers


def conclude(run, name, answers, compare, hint):
    """Print what a check found; return the number of problems, and whether to go on.

    answers: {rank: (kind, value)}, as `collect` returns them.
    """
    late, text, problems = f"within {run.args.timeout:g} s", "", []
    results = {rank: value for rank, (kind, value) in answers.items() if kind == "done"}
    if compare and results:
        text, problems = compare(run, results)
    if missing := [rank for rank in range(run.world_size) if rank not in answers]:
        problems.append(f"{run.names(missing)} did not arrive {late}")
    others = {rank: tuple(answers[rank]) for rank in answers if rank not in results}
    # Texts that differ only in numbers, such as those of processes, share a line.
    alike = {rank: re.sub(r"\d+", "", " ".join(each)) for rank, each in others.items()}
    for ranks in ranks_by(alike).values():
        kind, what = others[ranks[0]]
        what = f"did not finish {late}: {what}" if kind == "late" else what
        problems.append(f"{run.names(ranks)}: {what}")
    for problem in problems:
        print(f"WRONG  {name}: {problem}", flush=True)
    if problems and hint:
        print(f"       {hint}", flush=True)
    if not problems:
        print(f"ok     {name}{': ' * bool(text)}{text}", flush=True)
    stuck = any(kind == "late" for kind, _ in answers.values())
    return len(problems), not missing and not stuck


def fail(run, what):
    """End a process that rank 0 does not hear from."""
    print(f"rank {run.rank} ({run.host}): {what}", file=sys.stderr, flush=True)
    if run.rank:  # a launcher ends rank 0 when this process ends: let it report first
        time.sleep(2 * GRACE)
    os._exit(1)


def finish(run):
    """End the processes together; rank 0 prints the last line before the others end."""
    if run.rank == 0:
        several = "s" * (run.problems > 1)
        print(f"{run.problems} problem{several}" if run.problems else "OK", flush=True)

    def leave():
        for path in run.files:
            path.unlink(missing_ok=True)
        if run.rank:
            run.store.wait(["end"], timedelta(seconds=GRACE))
            run.store.set(f"end/{run.rank}", "")
        else:  # it may hold the store, which the others have to read
            run.store.set("end", "")
            keys = [f"end/{rank}" for rank in range(1, run.world_size)]
            wait_for(run.store, keys, time.monotonic() + GRACE)

    call(leave, 2 * GRACE)
    os._exit(int(run.problems > 0))  # a thread that is stuck would keep the process


# ---- the first contact ---------------------------------------------------------------
def connect(run):
    """Connect to the TCPStore of rank 0, as init_process_group does."""
    # The torchrun of the first machine may hold the store already.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = run.rank == 0 and not agents
    address, port = run.master_addr, run.master_port

    def join():
        # First without torch, whose messages about this are long.
        if serves:  # fails if the port is in use, or the address another machine's
            kind, *_, place = socket.getaddrinfo(address, port)[0]
            socket.create_server(place[:2], family=kind).close()
        else:
            reach(address, port, time.monotonic() + run.args.timeout)
        limit = timedelta(seconds=run.args.timeout)
        ranks = run.world_size
        store = dist.TCPStore(
            address, port, ranks, serves, limit, wait_for_workers=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        run.store = dist.PrefixStore(f"check_cluster/{attempt}", store)
        if run.store.add(f"rank/{run.rank}", 1) > 1:
            raise Fault(f"another process is rank {run.rank}, too")
        if run.rank == 0:
            run.store.set("token", uuid.uuid4().hex)

    kind, what = call(join, run.args.timeout + 2 * GRACE)
    place = f"MASTER_ADDR={address} MASTER_PORT={port}"
    if kind != "done":
        fail(run, f"cannot join rank 0 at {place}: {what}")
    if run.rank == 0:
        several = "es" * (run.world_size > 1)
        print(f"{run.world_size} process{several}, {run.backend}, {place}", flush=True)


def reach(address, port, end):
    """Wait until a port answers; OSError if it does not before the time is over."""
    while True:
        try:
            return socket.create_connection((address, port), GRACE).close()
        except OSError:  # rank 0 may still be importing torch
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


# ---- versions and devices ------------------------------------------------------------
def get_versions(_):
    """Return {name: version}; NCCL's is the one for which torch was built."""
    nccl = torch.version.cuda and dist.is_nccl_available() and torch.cuda.nccl.version()
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": nccl and ".".join(map(str, nccl)),
    }


def compare_versions(run, versions):
    """Find versions that are not the same on all ranks."""
    same, problems = [], []
    for name in versions[min(versions)]:
        values = {rank: found[name] for rank, found in versions.items()}
        equal = len({*values.values()}) == 1
        (same if equal else problems).append(f"{name} {run.describe(values)}")
    return ", ".join(same), problems


def get_device(run):
    """Return this rank's device, and what it has to agree on with the others."""
    found = {"world_size": run.world_size, "local_rank": run.local_rank}
    if run.device.type == "cpu":
        return found | {"name": "cpu", "gpu": None}
    count = torch.cuda.device_count()
    if run.local_rank >= count:
        seen = f"{count} GPU{'s' * (count != 1)}"
        raise Fault(f"local rank {run.local_rank} has no GPU: its process sees {seen}")
    properties = torch.cuda.get_device_properties(run.device)
    return found | {"name": properties.name, "gpu": str(properties.uuid)}


def compare_devices(run, devices):
    """Find ranks that share a GPU or a local rank, and CPUs among GPUs."""
    problems = []
    sizes = {rank: found["world_size"] for rank, found in devices.items()}
    if len({*sizes.values()}) > 1:
        problems.append(f"WORLD_SIZE {run.describe(sizes)}")
    for what, shown in (("local_rank", "one LOCAL_RANK"), ("gpu", "one GPU")):
        uses = {rank: (run.hosts[rank], found[what]) for rank, found in devices.items()}
        for (_, value), ranks in ranks_by(uses).items():
            if value is not None and len(ranks) > 1:
                problems.append(f"{run.names(ranks)} have {shown} together")
    names = {rank: found["name"] for rank, found in devices.items()}
    if "cpu" in names.values() and len({*names.values()}) > 1:
        problems.append(f"CPUs and GPUs: {run.describe(names)}")
    nodes = len({*run.hosts.values()})
    return f"{run.describe(names)}, {nodes} node{'s' * (nodes > 1)}", problems


# ---- addresses -----------------------------------------------------------------------
def get_address(run):
    """Return which interface the backend will use, as far as that is configured.

    Returns the text, and whether it and MASTER_ADDR mean this machine alone. Without a
    variable, gloo listens on the address of the machine's own name.
    """
    variable = f"{run.backend.upper()}_SOCKET_IFNAME"
    master = is_loopback(socket.getaddrinfo(run.master_addr, 0)[0][4][0])
    if variable in os.environ:
        return f"{variable}={os.environ[variable]}", False, master
    if run.backend == "nccl":
        return "NCCL chooses the interface; NCCL_DEBUG=INFO prints which", False, master
    try:
        kind, *_, place = socket.getaddrinfo(socket.gethostname(), 0)[0]
        with socket.socket(kind) as one:
            one.bind(place)  # fails if it is an old address of this machine
        address = place[0]
    except OSError:
        address = "127.0.0.1"  # gloo falls back to it
    return f"gloo at {address}", is_loopback(address), master


def is_loopback(address):
    return ipaddress.ip_address(address).is_loopback


def compare_addresses(run, addresses):
    """Find nodes that gloo cannot reach from the others; one machine needs no address.

    Two nodes of a test cluster can be one machine. Then MASTER_ADDR is loopback, too.
    """
    texts = {rank: text for rank, (text, *_) in addresses.items()}
    several = not all(master for *_, master in addresses.values())
    several &= len({*run.hosts.values()}) > 1
    wrong = {rank: texts[rank] for rank in texts if several and addresses[rank][1]}
    why = "because the host's own name means that, or nothing, on this host"
    groups = ranks_by(wrong).items()
    problems = [f"{run.names(ranks)}: {text}, {why}" for text, ranks in groups]
    return run.describe(texts), problems


# ---- shared memory and folders -------------------------------------------------------
def get_shm(_):
    """Return the bytes of /dev/shm, None where there is none."""
    return shutil.disk_usage(SHM).total if Path(SHM).is_dir() else None


def compare_shm(run, shm):
    """Find machines where it is as small as a container's."""
    sizes = {rank: in_units(size or 0) for rank, size in shm.items()}
    small = {rank: sizes[rank] for rank in shm if shm[rank] and shm[rank] <= DOCKERS}
    problems = [
        f"{run.names(ranks)}: only {size}" for size, ranks in ranks_by(small).items()
    ]
    return run.describe(sizes), problems


def share_file(folder, run):
    """Have rank 0 write a file into a folder, and wait until this rank can read it.

    A shared disk may show a new file to other machines only after some seconds.
    """
    token = run.store.get("token").decode()
    path, end = Path(folder, f".check_cluster-{token}"), run.args.timeout / 2
    end += time.monotonic()
    if run.rank == 0:
        run.files.append(path)
        path.write_text(token)
    while True:
        with os.scandir(folder):  # has NFS look again
            pass
        if path.exists() and path.read_text() == token:
            break
        if time.monotonic() > end:
            raise Fault("the file that rank 0 wrote is not there")
        time.sleep(0.1)
    if not os.access(folder, os.W_OK):
        raise Fault("it cannot write there")


def load_batches(_):
    """Get batches of 8 MiB from the workers of a DataLoader, through shared memory."""
    samples = [torch.zeros(2**21)] * 8
    for _ in DataLoader(samples, num_workers=2):
        pass


# ---- collectives ---------------------------------------------------------------------
def join_groups(run):
    """Make the process group of all ranks, and one of the ranks of each node."""
    # gloo says what failed when its own time is over. NCCL would end the process.
    limit = timedelta(seconds=run.args.timeout * (0.8 if run.backend == "gloo" else 20))
    cuda = run.device.type == "cuda"
    if cuda:  # each thread has a current device
        torch.cuda.set_device(run.device)
    dist.init_process_group(
        run.backend,
        # A connection of its own: a call that waits in the store keeps its connection.
        store=dist.PrefixStore("group", run.store.clone()),
        rank=run.rank,
        world_size=run.world_size,
        timeout=limit,
        device_id=run.device if cuda else None,
    )
    hosts = [None] * run.world_size
    dist.all_gather_object(hosts, run.host)
    nodes = [*ranks_by(dict(enumerate(hosts))).values()]
    everything = "within the node" if len(nodes) == 1 else "between nodes"
    if 1 < len(nodes) < run.world_size:
        own, _ = dist.new_subgroups_by_enumeration(nodes, timeout=limit)
        run.groups["within each node"] = own
    run.groups[everything] = dist.group.WORLD


# torch 2.14 has new names for two of them, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COLLECTIVES = {
    "all_reduce": lambda whole, _, group: dist.all_reduce(whole, group=group),
    "all_gather": lambda whole, part, group: all_gather(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: scatter(part, whole, group=group),
}


def bus_bandwidth(name, size, seconds, ranks):
    """Return bytes per second, as nccl-tests define them: size / seconds * factor.

    size: bytes of an all-reduce's tensor, an all-gather's output, a reduce-scatter's
    input. factor: 2(n-1)/n for an all-reduce of n ranks, (n-1)/n for the others.
    """
    factor = (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks
    return size / seconds * factor


def time_collective(name, size, among, run):
    """Return the median of a collective's seconds, its bandwidth, and what is wrong.

    size: as in `bus_bandwidth`, but it is rounded down so that ranks have equal parts.
    """
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    group = run.groups[among]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    count = max(size // 4 // ranks, 1)  # floats of a rank's part
    whole = torch.empty(count * ranks, device=run.device)
    part = torch.empty(count, device=run.device)
    output = part if name == "reduce_scatter" else whole
    expected = torch.full_like(output, ranks * (ranks + 1) / 2)
    if name == "all_gather":  # part i is rank i's
        numbers = torch.arange(1.0, ranks + 1, device=run.device)
        expected = numbers.repeat_interleave(count)
    seconds, wrong = [], ""
    for _ in range(REPETITIONS + 1):
        whole.fill_(rank + 1)
        part.fill_(rank + 1)
        dist.all_reduce(torch.ones(1, device=run.device), group=group)  # begin together
        synchronize(run)
        start = time.perf_counter()
        COLLECTIVES[name](whole, part, group)
        synchronize(run)
        seconds.append(time.perf_counter() - start)
        different = (output != expected).nonzero()
        if len(different) and not wrong:
            place = different[0]
            wrong = f"{output[place].item():g}, not {expected[place].item():g}"
    median = statistics.median(seconds[1:])
    return median, bus_bandwidth(name, whole.nbytes, median, ranks), wrong


def synchronize(run):
    if run.device.type == "cuda":  # its calls return before the work is done
        torch.cuda.synchronize(run.device)


def compare_collective(run, results):
    """Find wrong results, and show the time and the bandwidth of the slowest rank."""
    wrong = {rank: text for rank, (*_, text) in results.items() if text}
    problems = [
        f"{run.names(ranks)} got {text}" for text, ranks in ranks_by(wrong).items()
    ]
    seconds, bandwidth, _ = max(results.values())
    return f"{seconds * 1e3:.3f} ms, bus {bandwidth / 1e9:.3f} GB/s", problems


def main():
    run = parse_args()
    connect(run)
    check(run, "versions", get_versions, compare_versions)
    devices = check(run, "devices", get_device, compare_devices)
    interface = f"{run.backend.upper()}_SOCKET_IFNAME"
    hint = f"set {interface} to an interface that `ip -br addr` shows"
    network = check(run, "network", get_address, compare_addresses, hint)
    hint = "in a container: docker run --shm-size=16g, or --ipc=host"
    check(run, "shared memory", get_shm, compare_shm, hint)
    for folder in run.args.folder:
        work = functools.partial(share_file, folder)
        check(run, f"folder {folder}", work, hint=f"on each node: df {folder}")
    check(run, "DataLoader", load_batches, hint=f"on each node: df -h {SHM}")
    if not (devices and network):
        finish(run)  # collectives would only fail in a way that is harder to read
    hint = f"open all TCP ports between the nodes; {interface} chooses the interface"
    if check(run, "process group", join_groups, hint=hint):
        cases = itertools.product(run.groups, COLLECTIVES, run.args.sizes)
        for among, name, size in cases:
            work = functools.partial(time_collective, name, size, among)
            title = f"{name} of {in_units(size)} {among}"
            if not check(run, title, work, compare_collective):
                break
    finish(run)


if __name__ == "__main__":
    main()
