"""Compare a script on one process with itself on more: python check_yours.py SCRIPT ...

    python check_yours.py after.py --noise=0

Runs SCRIPT, with the flags that follow it, on 1, 2 and 3 processes: on the CPU, in
float64, without dropout, and as torchrun would start it. Each run has to write its last
weights to the same file. If they are not equal, or the processes have not trained
together, it prints the first thing that differs: in which step, where, why, and what to
do. The exit code is then 1, and otherwise 0.

options, before SCRIPT:
    --weights=FILE    what it writes with torch.save or safetensors (default: model.pt);
                      a file of that name is moved aside and put back
    --processes=1,2   on how many processes
    --nodes=2         pretend that they are on two machines: each has a LOCAL_RANK 0
    --patience=60     it hangs if no process does anything for so many seconds
    --keep=FOLDER     keep what the runs have recorded; without SCRIPT, look at it again

It needs recorder.py, differences.py and diagnoses.py beside it.
"""

import argparse
import ast
import contextlib
import ctypes
import functools
import json
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from math import isnan
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # optimizers import it: here it is done once for all ranks
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
import diagnoses
from recorder import Recorder

OURS = "CHECK_YOURS"  # the variable that has the script and its flags, for a new Python
ROUNDING = 1e-9  # in float64; see the page for what was measured
PERHAPS = 1e-7  # between the two, rounding that the training has magnified is possible
IDLE = 0.02  # of a core: a rank that waits for another uses less
AFTER_FAILURE = 10  # seconds without activity, once a rank has failed
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")


# ---- in each rank --------------------------------------------------------------------
class KeepFloat64(TorchFunctionMode):
    """Leave a tensor in float64 that a script makes float32, as many norms do.

    An integer that it makes float32 becomes float64, too. recorder: is told the random
    generators that are used.
    """

    def __init__(self, recorder=None):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.recorder and kwargs.get("generator") is not None:
            generator = kwargs["generator"]
            self.recorder.generators[id(generator)] = generator
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and is_exact(first):
            if function is torch.Tensor.float:
                return first.double()
            args = [torch.float64 if each is torch.float32 else each for each in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def is_exact(x):
    return x.dtype == torch.float64 or not (x.is_floating_point() or x.is_complex())


def turn_dropout_off():
    for name in DROPOUTS:
        setattr(functional, name, lambda x, *_, **__: x)
    attention = functional.scaled_dot_product_attention

    def without_dropout(q, k, v, attn_mask=None, dropout_p=0.0, *others, **options):
        dropout_p = 0.0
        return attention(q, k, v, attn_mask, dropout_p, *others, **options)

    functional.scaled_dot_product_attention = without_dropout
    make_rnn = nn.RNNBase.__init__

    def without_dropout_between_layers(rnn, *arguments, **options):
        make_rnn(rnn, *arguments, **options)
        rnn.dropout = 0.0

    nn.RNNBase.__init__ = without_dropout_between_layers


def run_exactly(script, flags, folder, stir=False, operations=False):
    """Run a script in this process, in float64 and without dropout.

    What it prints goes to the files RANK.out and RANK.err in the folder, and what it
    does to RANK.trace.
    """
    rank = int(os.environ["RANK"])
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
    # A fork has no pool of threads; otherwise, two threads can both notice it at once.
    torch.set_num_threads(1)
    # A script without a seed begins with the same weights in each run, rank 0's. What
    # else each rank draws for itself differs: a fork would have its parent's numbers.
    torch.manual_seed(rank)
    random.seed(rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)
    recorder = Recorder(f"{folder}/{rank}.trace", script, stir, operations)
    recorder.start()
    torch.set_default_dtype(torch.float64)
    turn_dropout_off()
    sys.path[0] = str(Path(script).resolve().parent)  # as if it had been started itself
    sys.argv = [script, *flags]
    try:
        with KeepFloat64(recorder):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    recorder.end()


# ---- starting and watching the ranks -------------------------------------------------
class Launcher:
    """Starts runs, each in a folder of its own in `folder`."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder

    def run(self, name, processes=1, new_python=False, **options):
        """Run the script to its end, or until it hangs; return what run.json then has.

        options: of run_exactly. new_python: start a new Python, whose sets have another
        order, and do not fork.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        script, flags = str(self.args.script), self.args.flags
        local = max(processes // self.args.nodes, 1)
        port, ranks = find_port(), {}
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
                    run = functools.partial(run_exactly, script, flags, folder)
                    pid = fork(run, options, variables)
                ranks[pid] = rank
            codes = watch(ranks, folder, self.args.patience)
        finally:
            for pid in ranks:  # with the workers of their loaders
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        err = [diagnoses.read_lines(folder / f"{r}.err") for r in range(processes)]
        facts = {"codes": codes, "local_ranks": [r % local for r in range(processes)]}
        effects = [is_effect(*each) for each in zip(codes, err, strict=True)]
        facts["hangs"] = any(codes) and all(effects)  # no rank failed by itself
        facts["cause"] = find_cause(err)
        write_facts(folder, facts)
        return facts


def write_facts(folder, facts):
    (folder / "run.json").write_text(json.dumps(facts))


def find_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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
    """Start this file in a new Python, where it calls run_exactly."""
    variables = os.environ | variables | {OURS: json.dumps([script, flags, folder])}
    variables["PYTHONHASHSEED"] = "12345"
    quiet = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    started = subprocess.Popen([sys.executable, __file__], env=variables, **quiet)
    started.returncode = 0  # `watch` waits for it
    return started.pid


def watch(ranks, folder, patience):
    """Wait for the ranks, {pid: rank}; return their exit codes.

    Once none of them has done anything for `patience` seconds, those that are still
    there are killed, and their code is "waits".
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
            for pid, rank in ranks.items():
                if rank not in codes:
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


EFFECTS = re.compile("connection|timed out|timeout|peer|socket", re.IGNORECASE)


def find_cause(err):
    """Return the error of the rank that is the cause, as far as one can say.

    err: the lines that each rank has printed to standard error. A rank whose connection
    broke, or that waited, is there because of another one.
    """
    last = [(rank, find_error(lines)) for rank, lines in enumerate(err) if lines]
    last.sort(key=lambda each: bool(EFFECTS.search(each[1])))
    return f"rank {last[0][0]}: {last[0][1]}" if last else "it printed nothing"


def find_error(lines):
    """Return the last line that begins with an error's name; otherwise the last one."""
    pattern = re.compile(r"(\w+\.)*\w*(Error|Exception)\b")
    errors = [line for line in lines if pattern.match(line)]
    return (errors or lines)[-1].strip()


def is_effect(code, lines):
    """Return whether a rank ended well, waits, or has lost another one."""
    lost = re.compile(f"{EFFECTS.pattern}|collective mismatch", re.IGNORECASE)
    return code in (0, "waits") or bool(lines) and bool(lost.search(find_error(lines)))


def uses_sets(files):
    """Return whether a file of the script has a set, or calls hash()."""
    for file in files:
        with contextlib.suppress(SyntaxError, OSError, ValueError):
            for node in ast.walk(ast.parse(Path(file).read_text())):
                name = getattr(node, "id", "")
                if isinstance(node, (ast.Set, ast.SetComp)) or name in (
                    "set",
                    "frozenset",
                    "hash",
                ):
                    return True
    return False


# ---- the proof by weights ------------------------------------------------------------
def read_weights(weights):
    """Return the weights of a run, {name: tensor}, or why there are none."""
    if not weights.exists():
        return f"it wrote no {weights}"
    if weights.is_dir():
        return f"{weights} is a directory; write model.state_dict() to a file"
    try:
        state = flatten(load(weights))
    except pickle.UnpicklingError:
        return f"{weights} has more than weights; write model.state_dict()"
    return state or f"{weights} has no weights; write model.state_dict()"


def load(file):
    """Return the state dict in a file of torch.save or of safetensors."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def flatten(state, prefix=""):
    """Return the tensors of nested dicts as {"name.name": tensor}, in float64."""
    if isinstance(state, torch.Tensor):
        return {prefix.removesuffix("."): state.double()}
    items = state.items() if isinstance(state, dict) else ()
    return {
        k: v
        for key, value in items
        for k, v in flatten(value, f"{prefix}{key}.").items()
    }


def compare(one, other):
    """Print how far two sets of weights are apart; return whether by rounding alone."""
    if shapes(one) != shapes(other):
        print("different names or shapes of weights")
        if {name.removeprefix("module.") for name in other} == set(one):
            print("           module. is the wrapper's: save the model inside of it")
        return False
    differences = {name: (one[name] - other[name]).abs().max().item() for name in one}
    # one that is not a number is the largest, and is no rounding
    name = max(
        differences, key=lambda name: (isnan(differences[name]), differences[name])
    )
    largest = differences[name]
    print(f"largest difference {largest:.1e}, in {name}")
    if largest == 0:
        print("           bit for bit: has anything been trained?")
    if ROUNDING < largest <= PERHAPS:
        print("           perhaps rounding that grew: compare after fewer steps")
    return largest <= ROUNDING


def shapes(weights):
    return {name: weight.shape for name, weight in weights.items()}


@contextlib.contextmanager
def put_aside(file):
    """Move a file aside, and put it back at the end; remove one that is made."""
    aside = file.with_name(f"{file.name}.aside")
    if file.is_dir():
        print(f"{file} is a directory; move it, or name a file", file=sys.stderr)
        sys.exit(2)
    if aside.exists():
        says = "a check was killed, or runs. Move it back, or remove it"
        print(f"{aside}: {says}", file=sys.stderr)
        sys.exit(2)
    if file.exists():
        file.rename(aside)
    try:
        yield
    finally:
        remove(file)
        if aside.exists():
            aside.replace(file)


def remove(path):
    """Remove a file, or a directory that a script has made in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


# ---- the check -----------------------------------------------------------------------
class Check:
    """The runs of a script, and what was said of them."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.launcher = Launcher(args, folder)
        self.weights, self.lines, self.told = None, [], set()

    def run(self, processes):
        """Run on so many processes, print a few lines; return whether all is well."""
        print(f"{processes} process{'es' * (processes > 1):4}", end="", flush=True)
        remove(self.args.weights)
        facts = self.launcher.run(str(processes), processes)
        equal = self.prove(processes, facts)
        if processes == 1:
            self.run_in_new_python()
        differences, notes = self.diagnose(processes, equal)
        told = {d.because for d in differences}
        lines = diagnoses.tell(differences, notes)
        for line in ["  as above"] if told and told <= self.told else lines:
            print(line)
        self.told |= told
        return equal and not any(map(diagnoses.is_fault, differences))

    def prove(self, processes, facts):
        """Print how far the weights are from the first run's; return if equal."""
        if any(facts["codes"]):
            hangs = "waits" in facts["codes"] and facts["hangs"]
            print("failed: it hangs" if hangs else f"failed: {facts['cause']}")
            return False
        state = read_weights(self.args.weights)
        if isinstance(state, str):
            print(f"failed: {state}")
            return False
        out = diagnoses.read_lines(self.folder / str(processes) / "0.out")
        self.lines.append(out[-1] if out else "")
        equal = True
        if self.weights is None:
            print("trained")
            self.weights = state
        else:
            equal = compare(self.weights, state)
        write_facts(self.folder / str(processes), facts | {"equal": equal})
        if not diagnoses.has_trained_together(self.read(processes)):
            print(
                "           no model was trained in DistributedDataParallel or ", end=""
            )
            print("fully_shard, and no step of torch.optim was seen")
            return False
        return equal

    def read(self, processes):
        return diagnoses.read_runs(self.folder, processes)

    def run_in_new_python(self):
        """Run on one process again if the order of a set can matter."""
        one = self.read(1)
        if not any(one.codes) and uses_sets(
            [self.args.script, *one.ranks[0].end.get("files", [])]
        ):
            self.launcher.run("rehashed", new_python=True)

    def diagnose(self, processes, equal):
        """Return the differences and notes, after another run of one process if needed.

        With other random numbers, if the inputs or what the model computes differ: are
        they random? As it is, if what is printed differs: is it a time? With each
        operation of step 1, if the cause is not sure, on as many processes, too.
        """
        c = self.read(processes)
        differences = diagnoses.diagnose(c)
        kinds = {d.kind for d in differences}
        if not equal and kinds & {"samples", "inputs", "outputs", "gradients"}:
            name = "stirred"
        elif "printed" in kinds or "evaluation" in kinds:
            name = "again"
        else:
            name = None
        if c.one and name and not any(c.codes):
            self.run_again(name, stir=name == "stirred")
            c = self.read(processes)
            differences = diagnoses.diagnose(c)
        if any(d.because.unsure for d in differences[:1]) and not any(c.codes):
            for many in (1, processes):
                self.run_again(f"operations-{many}", processes=many, operations=True)
            c = self.read(processes)
            differences = diagnoses.diagnose(c)
        return differences, diagnoses.find_notes(c)

    def run_again(self, name, **options):
        if not (self.folder / name).exists():
            self.launcher.run(name, **options)


def numbers(text):
    """Return the numbers of a list such as 1,2,3."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", text):
        says = "is not a list such as 1,2: two runs at least are compared"
        raise argparse.ArgumentTypeError(f"{text!r} {says}")
    return [int(number) for number in text.split(",")]


def parse_args():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, default=Path("model.pt"))
    parser.add_argument("--processes", type=numbers)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("script", nargs="?")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.script is None:
        if args.keep is None or not args.keep.is_dir():
            parser.exit(2, "name a SCRIPT, or a folder that --keep has made\n")
        sys.exit(diagnoses.diagnose_folder(args.keep))
    if not Path(args.script).is_file():
        parser.exit(2, f"there is no file {args.script}\n")
    if args.processes is None:
        args.processes = (
            [1, 2, 3] if args.nodes == 1 else [1, args.nodes, 2 * args.nodes]
        )
    if any(each % args.nodes for each in args.processes if each > 1):
        parser.exit(2, f"{args.nodes} nodes do not divide --processes evenly\n")
    if not hasattr(os, "fork"):
        parser.exit(2, "this system has no fork: run the check on Linux, or in WSL\n")
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        parser.exit(2, f"--keep: {args.keep} is not empty\n")
    return args


def main():
    args = parse_args()
    torch.set_num_threads(1)  # a fork of several threads has only one of them
    # as at Ctrl-C, so that what was moved is put back
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder, put_aside(args.weights):
        check = Check(args, args.keep or Path(folder))
        equal = all([check.run(processes) for processes in args.processes])
    print("equal except for rounding" if equal else "not shown to be equal")
    lines = check.lines
    if len(lines) == len(args.processes) and len(set(lines)) == 1:
        print(f"the last line of each run: {lines[0]}")
    elif len(lines) > 1:
        print("the last lines of the runs:", *lines, sep="\n")
    sys.exit(not equal)


if __name__ == "__main__":
    if OURS in os.environ:
        run_exactly(*json.loads(os.environ.pop(OURS)))
    else:
        main()
