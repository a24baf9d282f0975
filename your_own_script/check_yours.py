"""Compare a script on one process with itself on more: python check_yours.py SCRIPT ...

    python check_yours.py after.py --noise=0

Starts SCRIPT with torchrun, with the flags that follow it, on 1, 2 and 3 processes. It
runs on the CPU, in float64, without dropout. Each run has to write its weights, with
torch.save, to the same file: model.pt, or what --weights=FILE before SCRIPT names. The
exit code is 0 if they are equal except for rounding, otherwise 1.
"""

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

ROUNDING = 1e-9  # in float64; see the page for what was measured


def run_exactly(script, flags):
    """Run a script in this process, in float64 and without dropout."""
    torch.set_default_dtype(torch.float64)
    torch.nn.functional.dropout = lambda x, *_, **__: x
    sys.path[0] = str(Path(script).resolve().parent)  # as if it had been started itself
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def train(processes, script, flags, weights):
    """Return the weights of a run, {name: tensor}, or None and say why it failed."""
    weights.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__, "--exactly", script, *flags]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "rror: " in line]
        print(f"failed: {errors[0] if errors else done.stderr.strip()}")
        return None
    if not weights.exists():
        print(f"failed: it wrote no {weights}")
        return None
    return flatten(torch.load(weights, map_location="cpu", weights_only=True))


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
        return False
    differences = {name: (one[name] - other[name]).abs().max().item() for name in one}
    name = max(differences, key=differences.get)
    print(f"largest difference {differences[name]:.1e}, in {name}")
    return differences[name] <= ROUNDING  # False if it is not a number


def shapes(weights):
    return {name: weight.shape for name, weight in weights.items()}


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, default=Path("model.pt"))
    parser.add_argument("--exactly", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.exit(2, f"there is no file {args.script}\n")
    if args.exactly:
        run_exactly(args.script, args.flags)
        return
    runs, equal = [], True
    for processes in (1, 2, 3):
        print(f"{processes} process{'es' * (processes > 1):4}", end="", flush=True)
        weights = train(processes, args.script, args.flags, args.weights)
        if weights is None:
            equal = False
        elif runs:
            equal = compare(runs[0], weights) and equal
        else:
            print("trained")
        runs += [weights] if weights else []
    print("equal except for rounding" if equal else "not shown to be equal")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
