"""Compare a script on one process with itself on more: python check_yours SCRIPT ...

    python check_yours after.py --noise=0

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
"""

import argparse
import ast
import contextlib
import functools
import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import types
from math import inf
from math import isnan
from math import nan
from pathlib import Path

import torch

if not __package__:  # python FOLDER: its modules have names that a script's can have
    __package__ = "check_yours"  # whatever a copy of the folder is called
    sys.modules[__package__] = types.ModuleType(__package__)
    sys.modules[__package__].__path__ = [str(Path(__file__).resolve().parent)]
from . import causes
from . import run
from .compare import Runs
from .compare import Trace

# What is called rounding in a file of lower precision; otherwise it is up to 1e-9.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}
GROWN = 100  # times as far it can be rounding, too, if the runs part in no step


# ---- the proof by weights ------------------------------------------------------------
def read_weights(weights):
    """Return the weights of a run, {name: tensor}, or why there are none."""
    if not weights.exists():
        return f"it wrote no {weights}"
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    if weights.suffix == ".safetensors":
        from safetensors.torch import load_file as load
    if weights.is_dir():
        return f"{weights} is a directory; write model.state_dict() to a file"
    try:
        state = load(weights)
        if isinstance(state, (list, tuple)):  # of several models
            state = dict(enumerate(state))
        state = flatten(state)
    except pickle.UnpicklingError:
        return f"{weights} has more than weights; write model.state_dict()"
    return state or f"{weights} has no weights; write model.state_dict()"


def flatten(state, prefix=""):
    """Return the tensors of nested dicts as {"name.name": tensor}."""
    if isinstance(state, torch.Tensor):
        return {prefix.removesuffix("."): state}
    items = state.items() if isinstance(state, dict) else ()
    return {
        k: v
        for key, value in items
        for k, v in flatten(value, f"{prefix}{key}.").items()
    }


def compare(one, other):
    """Print how far two sets of weights are apart; return it, in units of rounding."""
    if {n: x.shape for n, x in one.items()} != {n: x.shape for n, x in other.items()}:
        print("different names or shapes of weights")
        if {name.removeprefix("module.") for name in other} == set(one):
            print("           module. is the wrapper's: save the model inside of it")
        return inf
    off = {n: (one[n].double() - other[n].double()).abs().max().item() for n in one}
    limits = {name: ROUNDING.get(x.dtype, 1e-9) for name, x in one.items()}
    # one that is not a number is the largest, and is no rounding
    name = max(off, key=lambda name: (isnan(off[name]), off[name] / limits[name]))
    far = off[name] / limits[name]
    says = "equal" if far <= 1 else "differ"
    print(f"weights {says}: largest difference {off[name]:.1e}, in {name}")
    if limits[name] > 1e-9:
        print(
            f"           saved in {one[name].dtype}: up to {limits[name]:g} is rounding"
        )
    elif far == 0:
        print("           bit for bit: has anything been trained?")
    # in a file of lower precision nobody could tell what has grown
    return inf if isnan(far) or far > 1 and limits[name] > 1e-9 else far


@contextlib.contextmanager
def put_aside(file):
    """Move a file aside, and put it back at the end; remove one that is made."""
    aside = file.with_name(f"{file.name}.aside")
    if file.is_dir() or aside.exists():
        says = "a check was killed, or runs: move it back, or remove it"
        says = f"{file}: a directory" if file.is_dir() else f"{aside}: {says}"
        print(says, file=sys.stderr)
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


# ---- what the runs have left ---------------------------------------------------------
def read_run(folder):
    """Return what a run has left: Runs knows what it is."""
    facts = json.loads((folder / "run.json").read_text())
    for name, key in (("trace", "ranks"), ("out", "out")):
        files = (folder / f"{rank}.{name}" for rank in range(len(facts["codes"])))
        facts[key] = [run.read_lines(file) for file in files]
    facts["ranks"] = [*map(Trace, facts["ranks"])]
    return facts


def read_runs(folder, processes):
    """Return the Runs of so many processes, beside those of one process."""
    facts = read_run(folder / str(processes))
    for name in ("one", "again", "stirred", "rehashed"):
        other = folder / name.replace("one", "1")
        if processes != 1 or name in ("again", "rehashed"):
            found = read_run(other) if (other / "run.json").exists() else {}
            if found and not any(found["codes"]):
                facts[name], facts[f"{name}_out"] = found["ranks"][0], found["out"][0]
    return Runs(**facts)


def uses_sets(files):
    """Return whether a script's files seem to make a set, or call hash()."""
    trees = [ast.parse(Path(file).read_bytes()) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    called = {getattr(x.func, "id", "") for x in nodes if isinstance(x, ast.Call)}
    sets = any(isinstance(x, (ast.Set, ast.SetComp)) for x in nodes)
    return sets or bool(called & {"set", "frozenset", "hash"})


# ---- the check -----------------------------------------------------------------------
class Check:
    """The runs of a script, and what was said of them."""

    def __init__(self, args, folder):
        self.args, self.folder, self.weights = args, folder, None
        self.lines, self.told, self.faults, self.equal = [], set(), set(), True

    def run(self, processes):
        """Run on so many processes, and print a few lines."""
        print(f"{processes} process{'es' * (processes > 1):4}", end="", flush=True)
        remove(self.args.weights)
        facts = self.start(str(processes), processes=processes)
        far = self.prove(processes, facts)
        facts |= {"equal": far <= 1, "grew": 1 < far <= GROWN, "unread": isnan(far)}
        run.write_facts(self.folder / str(processes), facts)
        c = self.diagnose(processes)
        found = causes.diagnose(c)
        lines = causes.tell(found, causes.find_notes(c))
        told = {d.row for d in found}
        for line in ["  as above"] if told and told <= self.told else lines:
            print(line)
        self.told |= told
        grew = c.grew and c.common and not found
        if grew:
            print("           no step parts from one process: it is rounding that grew")
        self.equal = self.equal and (c.equal or grew)
        self.faults |= {d.kind for d in found if not d.row.note}

    def start(self, name, **options):
        if (self.folder / name).exists():
            return None
        return run.run(self.args, self.folder / name, **options)

    def prove(self, processes, facts):
        """Print how far the weights are from the first run's; return it, or nan."""
        if any(facts["codes"]):
            hangs = "waits" in facts["codes"] and facts["hangs"]
            print("failed: it hangs" if hangs else f"failed: {facts['cause']}")
            return inf
        state = read_weights(self.args.weights)
        if isinstance(state, str):
            print(f"failed: {state}")
            return nan
        out = run.read_lines(self.folder / str(processes) / "0.out")
        self.lines.append(out[-1] if out else "")
        if self.weights is not None:
            return compare(self.weights, state)
        print("trained")
        self.weights = state
        return 0

    def diagnose(self, processes):
        """Return the Runs, after more of one process if they are needed.

        With other random numbers, and as it is, if the weights differ: is it random?
        As it is, if what is printed differs: is it a time?
        """
        c = read_runs(self.folder, processes)
        kinds = {d.kind for d in causes.diagnose(c)}
        if any(c.codes):
            return c
        if c.n == 1 and uses_sets(
            [self.args.script, *c.ranks[0].all["end"][0]["files"]]
        ):
            self.start("rehashed", new_python=True)
            c = read_runs(self.folder, processes)
            kinds = {d.kind for d in causes.diagnose(c)}
        if not c.equal and c.one:
            self.start("stirred", stir=True)
        if not c.equal and c.one or kinds & {"printed", "set order"}:
            self.start("again")
        if not causes.has_trained_together(c):
            says = "no model was trained in DistributedDataParallel or fully_shard, "
            print(f"           {says}and no step of torch.optim was seen")
            self.equal = False
        return read_runs(self.folder, processes)

    def tell_result(self):
        """Print whether the weights are equal, and the last line of each run."""
        says = "equal except for rounding" if self.equal else "not shown to be equal"
        if self.equal and self.faults:
            says = "weights equal, and a mistake that they do not show"
        if self.equal and self.faults == {"printed"}:
            says = "weights equal; the printed numbers are not"
        print(says)
        lines = [line for line in self.lines if line]
        if len(lines) == len(self.args.processes) and len(set(lines)) == 1:
            print(f"the last line of each run: {lines[0]}")
        elif len(lines) > 1:
            print("the last lines of the runs:", *lines, sep="\n")


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
    parser.add_argument("script")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
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
    return args


def main():
    args = parse_args()
    torch.set_num_threads(1)  # a fork of several threads has only one of them
    # as at Ctrl-C, so that what was moved is put back
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder, put_aside(args.weights):
        check = Check(args, Path(folder))
        for processes in args.processes:
            check.run(processes)
    check.tell_result()
    sys.exit(not check.equal or bool(check.faults))


if __name__ == "__main__":
    if run.OURS in os.environ:
        run.run_exactly(*json.loads(os.environ.pop(run.OURS)))
    else:
        main()
