"""Run a script on so many processes as torchrun would, exactly, and watch them.

Each rank is a fork of this process. It computes on the CPU in float64, without dropout,
lower precision and compilation, and record.py writes down what it does. A limit runs
only while no rank does anything.
"""

import contextlib
import ctypes
import faulthandler
import functools
import inspect
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # optimizers import it: here it is done once for all ranks
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .record import Recorder
from .record import patch

OURS = "CHECK_YOURS"  # the variable that has the script and its flags, for a new Python
IDLE = 0.02  # of a core: a rank that waits for another uses less
AFTER_FAILURE = 10  # seconds without activity, once a rank has failed
LOW = (torch.float32, torch.float16, torch.bfloat16)
LOWER = ("float", "half", "bfloat16")
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.frombuffer)
OWN = Path(__file__).resolve().parent
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
OPEN = tuple(f"{TORCH}{each}{os.sep}" for each in ("nn", "utils/data"))
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")
HOOKS = re.compile("fp16|bf16|powersgd|quantization", re.IGNORECASE)


# ---- in each rank: exactly -----------------------------------------------------------
class KeepFloat64(TorchFunctionMode):
    """Let a script compute in float64 where it asks for float32 or less.

    Torch's own code gets what it asks for, except for modules and loaders, which pass
    on what a script says.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        lowers = getattr(function, "__name__", "") in LOWER
        asks = torch.dtype in map(type, (*args, *kwargs.values()))
        if (lowers or asks or function in MAKERS) and is_open(sys._getframe(1)):
            if lowers and isinstance(args[0], torch.Tensor):
                low = args[0].is_floating_point() and args[0].dtype != torch.float64
                return args[0] if args[0].is_complex() or low else args[0].double()
            args = [torch.float64 if is_low(each) else each for each in args]
            kwargs = {k: torch.float64 if is_low(v) else v for k, v in kwargs.items()}
            result = function(*args, **kwargs)
            return raised(result) if function in MAKERS else result
        return function(*args, **kwargs)


def is_low(x):
    return isinstance(x, torch.dtype) and x in LOW


def raised(x):
    """Return a tensor in float64, if it is one of lower precision."""
    lower = isinstance(x, torch.Tensor) and x.dtype in LOW
    return x.detach().double().requires_grad_(x.requires_grad) if lower else x


def is_open(frame):
    """Return whether a line is to be given float64 in the place of less."""
    file = frame.f_code.co_filename
    return not file.startswith(TORCH) or file.startswith(OPEN)


def compute_exactly():
    """Take out of torch what makes a comparison inexact, or slow."""
    for name in DROPOUTS:
        setattr(functional, name, lambda x, *_, **__: x)
    for owner, name, new in (
        (functional, "scaled_dot_product_attention", without_dropout),
        (nn.RNNBase, "__init__", without_dropout_between_layers),
        (torch.amp.GradScaler, "__init__", without_scaling),
        (fsdp, "fully_shard", without_a_policy),
        (DistributedDataParallel, "register_comm_hook", without_compression),
        (torch, "compile", lambda _, model=None, **__: model or (lambda x: x)),
        (nn.Module, "compile", lambda *_, **__: None),
        (torch, "from_numpy", lambda old, x: raised(old(x))),
        (torch, "load", lambda old, *a, **k: tree_map(raised, old(*a, **k))),
    ):
        patch(owner, name, new)
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda _: None


def without_dropout(attention, q, k, v, attn_mask=None, dropout_p=0, *args, **kwargs):  # noqa: ARG001
    return attention(q, k, v, attn_mask, 0.0, *args, **kwargs)


def without_dropout_between_layers(init, rnn, *args, **kwargs):
    init(rnn, *args, **kwargs)
    rnn.dropout = 0.0


def without_scaling(init, scaler, *args, **kwargs):
    given = inspect.signature(init).bind(scaler, *args, **kwargs)
    init(**given.arguments | {"enabled": False})


def without_a_policy(shard, module, *args, **kwargs):
    kwargs.pop("mp_policy", None)
    return shard(module, *args, **kwargs)


def without_compression(register, model, state, hook):
    function = getattr(hook, "func", hook)  # of a partial
    name = f"{function.__module__} {function.__qualname__}"
    if not (name.startswith("torch.") and HOOKS.search(name)):
        register(model, state, hook)


def run_exactly(script, flags, folder, stir=False):
    """Run a script in this process, in float64 and without dropout.

    What it prints goes to the files RANK.out and RANK.err in the folder, what it does
    to RANK.trace, and where it is, if it is asked, to RANK.stack.
    """
    rank = int(os.environ["RANK"])
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
    stack = Path(f"{folder}/{rank}.stack").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    # A fork has no pool of threads; otherwise, two threads can both notice it at once.
    torch.set_num_threads(1)
    # A script without a seed begins with the same weights in each run, rank 0's. What
    # else each rank draws for itself differs: a fork would have its parent's numbers.
    torch.manual_seed(rank)
    random.seed(rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)
    compute_exactly()
    recorder = Recorder(f"{folder}/{rank}.trace", script, stir)
    recorder.start()
    sys.path[0] = str(Path(script).resolve().parent)  # as if it had been started itself
    sys.argv = [script, *flags]
    try:
        with KeepFloat64():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    recorder.end()


# ---- starting the ranks --------------------------------------------------------------
def run(args, folder, processes=1, new_python=False, **options):
    """Run the script to its end, or until it hangs; return what run.json then has.

    args: script, flags, nodes and patience. options: of run_exactly. new_python: start
    a new Python, whose sets have another order, and do not fork.
    """
    folder.mkdir(parents=True)
    script, flags, ranks = str(args.script), args.flags, {}
    local = max(processes // args.nodes, 1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        for rank in range(processes):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank % local,
                "GROUP_RANK": rank // local,
                "WORLD_SIZE": processes,
                "LOCAL_WORLD_SIZE": local,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "check_yours",
            }
            variables = {name: str(value) for name, value in variables.items()}
            if new_python:
                pid = start_python(script, flags, str(folder), variables)
            else:
                function = functools.partial(run_exactly, script, flags, folder)
                pid = fork(function, options, variables)
            ranks[pid] = rank
        codes = watch(ranks, folder, args.patience)
    finally:
        for pid in ranks:  # with the workers of their loaders
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    err = [read_lines(folder / f"{rank}.err") for rank in range(processes)]
    facts = {"codes": codes, "local_ranks": [r % local for r in range(processes)]}
    ended = [code in (0, "waits") for code in codes]
    lost = [bool(lines) and bool(LOST.search(find_error(lines))) for lines in err]
    # no rank failed by itself: it ended well, waits, or has lost another one
    facts["hangs"] = any(codes) and all(map(max, ended, lost))
    facts["cause"] = find_cause(err)
    at = f"{Path(script).resolve().parent}{os.sep}"
    facts["stacks"] = [find_place(folder, *each, at) for each in enumerate(codes)]
    write_facts(folder, facts)
    return facts


def write_facts(folder, facts):
    (folder / "run.json").write_text(json.dumps(facts))


def read_lines(file):
    """Return the lines of a file that are not blank; none if there is no file."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def fork(function, options, variables):
    """Call a function in a fork, with these variables; return its process id."""
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become_a_rank(parent)
        os.environ.update(variables)
        function(**options)
        code = 0
    except SystemExit as ended:  # what Python does at its end
        code = ended.code if isinstance(ended.code, int) else 1
        if not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # not through the parent's stack


def become_a_rank(parent):
    """Lead a group, which can be killed as a whole, and end if the check is killed."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # too late
            os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def start_python(script, flags, folder, variables):
    """Start the check in a new Python, where it calls run_exactly."""
    variables = os.environ | variables | {OURS: json.dumps([script, flags, folder])}
    variables["PYTHONHASHSEED"] = "12345"
    quiet = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    started = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent)], env=variables, **quiet
    )
    started.returncode = 0  # `watch` waits for it
    return started.pid


# ---- watching them -------------------------------------------------------------------
def watch(ranks, folder, patience):
    """Wait for the ranks, {pid: rank}; return their exit codes.

    Once none of them has done anything for `patience` seconds, those that are still
    there write where they are, and are killed. Their code is "waits".
    """
    codes, active, seen = {}, time.monotonic(), None
    while len(codes) < len(ranks):
        time.sleep(0.02)
        for pid, rank in ranks.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    active = time.monotonic()
        now = time.monotonic()
        size = sum(file.stat().st_size for file in folder.iterdir())
        if seen is None or now - seen[0] > 1:
            used = processor_time(ranks)
            elapsed = now - seen[0] if seen else 1
            if seen is None or size != seen[1] or used - seen[2] > IDLE * elapsed:
                active = now
            seen = now, size, used
        failed = any(codes.values())
        if now - active > (min(AFTER_FAILURE, patience) if failed else patience):
            left = {pid: rank for pid, rank in ranks.items() if rank not in codes}
            for pid in left:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
            for pid, rank in left.items():
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = "waits"
    return [codes[rank] for rank in range(len(ranks))]


def processor_time(groups):
    """Return the seconds of CPU time of process groups, where Linux says it."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


EFFECTS = re.compile(r"connection|timed out|timeout|\bpeer|socket", re.IGNORECASE)
LOST = re.compile(f"{EFFECTS.pattern}|collective mismatch", re.IGNORECASE)
OTHER_DTYPE = re.compile("same dtype|scalar type|match weight dtype")


def find_cause(err):
    """Return the error of the rank that is the cause, as far as one can say.

    err: the lines that each rank has printed to standard error. A rank whose connection
    broke, or that waited, is there because of another one.
    """
    last = [(rank, find_error(lines)) for rank, lines in enumerate(err) if lines]
    last.sort(key=lambda each: bool(EFFECTS.search(each[1])))
    if not last:
        return "it printed nothing"
    text = f"rank {last[0][0]}: {last[0][1]}"
    if OTHER_DTYPE.search(text):
        text += "\n           the check computes in float64, and this is made in less: "
        text += "use\n           .to(torch.get_default_dtype())"
    return text


def find_error(lines):
    """Return the last line that begins with an error's name; otherwise the last one."""
    pattern = re.compile(r"(\w+\.)*\w*(Error|Exception)\b")
    errors = [line for line in lines if pattern.match(line)]
    return (errors or lines)[-1].strip()


FRAME = re.compile(r'File "(.*)", line (\d+),? in (.*)')


def find_place(folder, rank, code, script):
    """Return at which line of the script a rank is, and what it calls there.

    Of the stack of one that waits, or the traceback of one that failed.
    """
    stack, err = (read_lines(folder / f"{rank}.{name}") for name in ("stack", "err"))
    frames = FRAME.findall("\n".join(stack)) or FRAME.findall("\n".join(err))[::-1]
    called = ""
    for file, line, function in frames:  # the innermost first
        path = Path(file).resolve()
        if OWN in path.parents or function in ("wrapper", "decorate_context"):
            continue
        if str(path).startswith(script):
            where = f"is in {called}" if called else "waits"
            return f"{where} ({path.name}:{line})"
        called = function
    return {0: "has ended", "waits": "has not begun"}.get(code, "has failed")
