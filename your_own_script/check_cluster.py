"""Check the machines of a cluster before a training: ranks, GPUs, folders, network.

Start it as you will start the training, with the folders that it will use:

    $ torchrun --standalone --nproc-per-node=8 check_cluster.py --folder /shared/runs

Rank 0 prints a line for each check: `ok`, or `WRONG` and what is wrong. A rank that
cannot reach rank 0 says so on standard error. Exit code 0: nothing is wrong; 1:
something is; 2: wrong flags or variables. (torchrun turns 2 into 1.)

Each rank does its part of a check, and writes the outcome to the TCPStore. If one is
missing after --timeout seconds, rank 0 names the ranks that did not arrive or did not
finish, and all processes end. Start reading at `main`.

Copy this file: it needs torch (2.11 or later) and Python 3.10 or later, nothing else.
"""

import argparse
import faulthandler
import functools
import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from dataclasses import field
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

GRACE = 5  # seconds more, for rank 0 to report
REPETITIONS = 5  # of each all-reduce, after a first one that is not timed


@dataclass
class Run:
    """What a process knows of itself and of the others."""

    args: argparse.Namespace
    rank: int
    local_rank: int
    world_size: int
    port: int
    # Two nodes of a test cluster can be one machine, with one host name.
    host: str = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    device: torch.device = torch.device("cpu")
    store: dist.Store = None
    token: str = ""  # the name of a file that rank 0 writes
    # {rank: host} of those that have answered
    hosts: dict = field(default_factory=dict)
    checks: int = 0  # so many have begun
    problems: int = 0  # that they have found

    def names(self, ranks):
        """Return ranks with their hosts: "ranks 0-3 (node1), rank 5 (node2)"."""
        nodes = ranks_by({rank: self.hosts.get(rank) for rank in ranks}).items()
        shown = [numbered(ones) + f" ({host})" * bool(host) for host, ones in nodes]
        return ", ".join(shown)


class Fault(Exception):  # noqa: N818 (it is a finding, not an error of this program)
    """What is wrong, in a sentence of ours."""


def ranks_by(values):
    """Return {value: [ranks]} for {rank: value}."""
    ranks = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def numbered(ranks):
    """Return ranks as text: "rank 3", "ranks 0-2" if none is left out, "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


# ---- flags and the launcher's variables ----------------------------------------------
def parse_args():
    """Return the Run of this process."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # errors are one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "auto (the default): GPUs with NCCL, or, without any, CPUs with gloo"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    text = "an existing folder that all ranks share; can be given several times"
    add("--folder", action="append", default=[], help=text)
    add("--timeout", type=float, default=30, help="seconds of each check (default: 30)")
    text = "MiB of the all-reduces (default: 1 32)"
    add("--mib", type=int, nargs="+", default=[1, 32], help=text)
    args = parser.parse_args()
    if not all(0 < number < 1e6 for number in (args.timeout, *args.mib)):
        parser.error("--timeout and --mib have to be above 0 and below 1e6")
    run = Run(args, *read_numbers(parser))
    if args.device == "cuda" or args.device == "auto" and torch.cuda.is_available():
        run.device = torch.device("cuda", run.local_rank)
    return run


def read_numbers(parser):
    """Return rank, local rank, world size and port, as torchrun or srun has set them.

    Ends the program with exit code 2 if one is missing or impossible.
    """
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"]
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        names[:3] = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
    how = "start with torchrun, or with srun in a job file that exports MASTER_ADDR and"
    for name in [*names, "MASTER_ADDR"]:
        value = os.environ.get(name, "")
        if not value or name in names and not value.isdecimal():
            parser.error(f"{name} is {value!r}: {how} MASTER_PORT")
    return [int(os.environ[name]) for name in names]


# ---- a check on all ranks, in its time -----------------------------------------------
def check(run, name, work, compare=None):
    """Run a check on all ranks; return on all of them whether nothing is wrong.

    work(run): what a rank does; its result has to be JSON. compare(run, results): what
    follows from {rank: result}, as a text to print and a list of problems. Ends the
    processes if a rank is missing or stuck.
    """
    run.checks += 1
    end = time.monotonic() + run.args.timeout + GRACE
    keys = [f"{run.checks}/{rank}" for rank in range(run.world_size)]
    # If rank 0 is stuck, so is its store: then print where, and exit with code 1.
    faulthandler.dump_traceback_later(run.args.timeout + 4 * GRACE, exit=True)
    run.store.set(keys[run.rank], json.dumps([run.host, *attempt(run, work)]))
    wait_for(run.store, keys, end)
    outcomes = {"done": {}, "failed": {}, "late": {}}
    for rank, key in enumerate(keys):
        if run.store.check([key]):
            run.hosts[rank], kind, value = json.loads(run.store.get(key))
            outcomes[kind][rank] = value
        else:
            outcomes["late"][rank] = f"did not arrive within {run.args.timeout:g} s"
    text, problems = "all ranks", []
    if compare and outcomes["done"]:
        text, problems = compare(run, outcomes["done"])
    for what, ranks in ranks_by(outcomes["failed"] | outcomes["late"]).items():
        problems.append(f"{run.names(ranks)}: {what}")
    run.problems += len(problems)
    lines = [f"WRONG  {name}: {problem}" for problem in problems]
    if run.rank == 0:
        print(*lines or [f"ok     {name}: {text}"], sep="\n", flush=True)
    if outcomes["late"]:
        finish(run)
    return not problems


def attempt(run, work):
    """Do a rank's part of a check in another thread, which this one can give up.

    Returns what became of it, "done", "failed" or "late", and the result or a text.
    """
    outcome = []

    def do():
        try:
            outcome[:] = "done", work(run)
        except Exception as error:
            outcome[:] = "failed", text_of(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(run.args.timeout)
    return outcome or ("late", f"did not finish within {run.args.timeout:g} s")


def wait_for(store, keys, end):
    """Wait until the store has all keys, or the time is over."""
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(0.02)


def text_of(error):
    """Return the first and the last line of an error: NCCL says why in the last."""
    lines = str(error).partition("\nException raised from")[0].strip().splitlines()
    text = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return text if isinstance(error, Fault) else f"{type(error).__name__}: {text}"


def finish(run):
    """End this process; rank 0 prints the last line before the others end."""
    if run.rank == 0:
        for folder in run.args.folder:
            Path(folder, run.token).unlink(missing_ok=True)
        print(f"problems: {run.problems}" if run.problems else "OK", flush=True)
        run.store.set("end", "")
    # Rank 0 may hold the store, which the others have to read.
    keys = [f"end/{rank}" for rank in range(1, run.world_size)] if not run.rank else []
    wait_for(run.store, ["end", *keys], time.monotonic() + 2 * GRACE)
    run.store.set(f"end/{run.rank}", "")
    os._exit(int(run.problems > 0))  # a thread that is stuck would keep the process


def fail(run, what):
    """End a process that rank 0 does not hear from."""
    print(f"rank {run.rank} ({run.host}): {what}", file=sys.stderr, flush=True)
    if run.rank:  # a launcher ends rank 0 when this process ends: let it report first
        time.sleep(2 * GRACE)
    os._exit(1)


# ---- who joins, with what ------------------------------------------------------------
def connect(run):
    """Connect to the TCPStore of rank 0, as init_process_group does."""
    # The torchrun of the first machine may hold the store already.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, limit = os.environ["MASTER_ADDR"], timedelta(seconds=run.args.timeout)
    given = address, run.port, run.world_size, run.rank == 0 and not agents, limit
    place = f"MASTER_ADDR={address} MASTER_PORT={run.port}"
    try:
        store = dist.TCPStore(*given, wait_for_workers=False)
        run.store = dist.PrefixStore("check_cluster", store)
        if run.rank == 0:
            run.store.set("token", f".check_cluster-{uuid.uuid4().hex}")
        run.token = run.store.get("token").decode()  # no rank begins before rank 0
    except dist.DistError as error:
        fail(run, f"cannot join rank 0 at {place}: {text_of(error)}")
    if run.rank == 0:
        backend = dist.get_default_backend_for_device(run.device)
        print(f"processes: {run.world_size}, {backend}, {place}", flush=True)


def get_facts(run):
    """Return what has to be the same on all ranks."""
    same = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "WORLD_SIZE": run.world_size,
        "device": "cpu",
    }
    if run.device.type == "cuda":
        if run.local_rank >= (count := torch.cuda.device_count()):
            raise Fault(f"local rank {run.local_rank} has no GPU: it sees {count}")
        same["device"] = torch.cuda.get_device_name(run.device)
    return same


def compare_facts(run, facts):
    """Find facts that are not the same on all ranks."""
    shown, problems = [], []
    for name in facts[min(facts)]:
        values = ranks_by({rank: same[name] for rank, same in facts.items()})
        if len(values) == 1:
            shown.append(f"{name} {min(values)}")
            continue
        texts = [f"{value} on {run.names(ranks)}" for value, ranks in values.items()]
        problems.append(f"{name} {', '.join(texts)}")
    shown.append(f"nodes: {len({*run.hosts.values()})}")
    return ", ".join(shown), problems


# ---- folders and all-reduces ---------------------------------------------------------
def share_file(folder, run):
    """Have rank 0 write a file into a folder, and wait until this rank can read it.

    A shared disk may show a new file to other machines only after some seconds.
    """
    path, end = Path(folder, run.token), time.monotonic() + run.args.timeout / 2
    if run.rank == 0:
        path.write_text(run.token)
    while path not in Path(folder).iterdir():  # has NFS look again
        if time.monotonic() > end:
            raise Fault("the file that rank 0 wrote is not there")
        time.sleep(0.1)


def join_group(run):
    """Make the process group of all ranks."""
    # gloo says what failed when its own time is over. NCCL would end the process.
    cuda = run.device.type == "cuda"
    limit = timedelta(seconds=run.args.timeout * (20 if cuda else 0.8))
    dist.init_process_group(
        dist.get_default_backend_for_device(run.device),
        # A connection of its own: a call that waits in the store keeps its connection.
        store=dist.PrefixStore("group", run.store.clone()),
        rank=run.rank,
        world_size=run.world_size,
        timeout=limit,
        device_id=run.device if cuda else None,
    )


def time_all_reduce(mib, run):
    """Return the median of an all-reduce's seconds, and its bandwidth.

    mib: of the tensor, in float32. The bandwidth, in bytes per second, is the bus
    bandwidth of nccl-tests: each of n ranks sends 2 (n - 1) / n of the tensor, around a
    ring.
    """
    seconds, ranks = [], run.world_size
    # A call on a GPU returns before it is finished.
    synchronize = getattr(torch, run.device.type).synchronize
    tensor = torch.zeros(mib * 2**18, device=run.device)
    for _ in range(REPETITIONS + 1):
        dist.all_reduce(torch.ones(1, device=run.device))  # begin together
        synchronize(run.device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(run.device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    return median, tensor.nbytes / median * 2 * (ranks - 1) / ranks


def show_slowest(_run, results):
    """Return the time and the bandwidth of the slowest rank, and no problem."""
    seconds, bandwidth = max(results.values())
    return f"{seconds * 1e3:.3f} ms, bus {bandwidth / 1e9:.3f} GB/s", []


def main():
    run = parse_args()
    connect(run)
    try:
        good = check(run, "ranks", get_facts, compare_facts)
        for folder in run.args.folder:
            check(run, f"folder {folder}", functools.partial(share_file, folder))
        # After a problem, all-reduces would only fail in a way that is harder to read.
        good = good and check(run, "process group", join_group)
        for mib in run.args.mib:
            work = functools.partial(time_all_reduce, mib)
            title = f"all_reduce of {mib} MiB"
            good = good and check(run, title, work, show_slowest)
        finish(run)
    except dist.DistError as error:
        fail(run, f"no answer from rank 0: {text_of(error)}")


if __name__ == "__main__":
    main()
