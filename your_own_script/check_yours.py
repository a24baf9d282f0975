"""Compare a script on one process with itself on more: python check_yours.py SCRIPT ...

    python check_yours.py after.py --noise=0

Starts SCRIPT with torchrun, with the flags that follow it, on 1, 2 and 3 processes, or
on those that --processes=1,2 before SCRIPT names. It runs on the CPU, in float64,
without dropout. Each run has to write its last weights to the same file: with
torch.save to model.pt, or to what --weights=FILE before SCRIPT names, which can be a
file of safetensors. A file of that name is moved aside and put back. The exit code is
0 if the weights are equal except for rounding, and the processes have trained together:
in DistributedDataParallel or by fully_shard, each on samples of its own. Otherwise it
is 1.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from math import isnan
from pathlib import Path

import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

OURS = "CHECK_YOURS"  # the variable that has the script, its flags, and a folder
ROUNDING = 1e-9  # in float64; see the page for what was measured
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")


class KeepFloat64(TorchFunctionMode):
    """Leave a tensor in float64 that a script makes float32, as many norms do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (
            args
            and isinstance(args[0], torch.Tensor)
            and args[0].dtype == torch.float64
        ):
            if function is torch.Tensor.float:
                return args[0]
            args = [torch.float64 if each is torch.float32 else each for each in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def note_inputs(file):
    """Write to `file` a hash of what a wrapped model gets first in its training."""

    def note(module, arguments, options):
        if module.training and torch.is_grad_enabled() and not file.exists():
            leaves = tree_leaves((arguments, options))
            tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
            digest = hashlib.sha256()
            for each in tensors:  # without numpy, which torch does not install
                each = each.detach().cpu().contiguous()
                digest.update(ctypes.string_at(each.data_ptr(), each.nbytes))
            file.write_text(digest.hexdigest())

    def noting(wrap):
        def wrap_and_note(module, *arguments, **options):
            wrapped = wrap(module, *arguments, **options)
            for each in module if isinstance(module, list) else [module]:
                each.register_forward_pre_hook(note, with_kwargs=True)
            return wrapped

        return wrap_and_note

    ddp = nn.parallel.DistributedDataParallel
    ddp.__init__ = noting(ddp.__init__)  # the module is then the wrapper itself
    fsdp.fully_shard = noting(fsdp.fully_shard)


def run_exactly(script, flags, folder):
    """Run a script in this process, in float64 and without dropout.

    What it prints goes to the files RANK.out and RANK.err in the folder, and what it
    trains on to RANK.inputs.
    """
    rank = os.environ["RANK"]
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
    note_inputs(Path(folder, f"{rank}.inputs"))
    torch.set_default_dtype(torch.float64)
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
    # For a script without a seed: each run begins with the same weights, rank 0's. Data
    # that each rank draws for itself still differ.
    torch.manual_seed(int(rank))
    sys.path[0] = str(Path(script).resolve().parent)  # as if it had been started itself
    sys.argv = [script, *flags]
    with KeepFloat64():
        runpy.run_path(script, run_name="__main__")


def train(processes, script, flags, weights):
    """Return the weights of a run, {name: tensor}, and the last line that it printed.

    Return None if it failed, or if its processes did not train together; say why.
    """
    remove(weights)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        # not as arguments: torchrun refuses some flags
        environment[OURS] = json.dumps([script, flags, folder])
        returncode = call(command, environment)
        ranks = [Path(folder, str(rank)) for rank in range(processes)]
        printed = [
            [read_lines(rank.with_suffix(suffix)) for rank in ranks]
            for suffix in (".out", ".err", ".inputs")
        ]
    out, err, inputs = printed
    if returncode:
        print(f"failed: {find_cause(err)}")
        return None
    if not weights.exists():
        print(f"failed: it wrote no {weights}")
        return None
    if weights.is_dir():
        print(f"failed: {weights} is a directory; write model.state_dict() to a file")
        return None
    try:
        state = load(weights)
    except pickle.UnpicklingError:
        print(f"failed: {weights} has more than weights; write model.state_dict()")
        return None
    state = flatten(state)
    if not state:
        print(f"failed: {weights} has no weights; write model.state_dict()")
        return None
    if processes > 1 and not any(inputs):
        print("failed: no model was trained in DistributedDataParallel or fully_shard")
        return None
    if processes > 1 and len({str(each) for each in inputs}) < processes:
        print("failed: ranks train on the same samples; does a sampler deal them out?")
        return None
    *_, last = ["", *out[0]]
    return state, last


def call(command, environment):
    """Run a launcher and return its exit code; whatever ends this ends it, too."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as launcher:
        try:
            return launcher.wait()
        except BaseException:
            launcher.terminate()  # SIGTERM, at which it ends its ranks
            raise


def load(file):
    """Return the state dict in a file of torch.save or of safetensors."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def read_lines(file):
    """Return the lines of a file that are not blank; none if there is no file."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def find_cause(err):
    """Return the last line of the rank whose error is the cause, as far as one can say.

    err: the lines that each rank has printed to standard error. A rank whose connection
    broke, or that waited, is there because of another one.
    """
    last = [(rank, lines[-1]) for rank, lines in enumerate(err) if lines]
    effects = re.compile("connection|timed out|timeout", re.IGNORECASE)
    last.sort(key=lambda each: bool(effects.search(each[1])))
    return f"rank {last[0][0]}: {last[0][1].strip()}" if last else "it printed nothing"


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
    # one that is not a number is the largest, and is no rounding
    name = max(
        differences, key=lambda name: (isnan(differences[name]), differences[name])
    )
    print(f"largest difference {differences[name]:.1e}, in {name}")
    if differences[name] == 0:
        print("           bit for bit: has anything been trained?")
    return differences[name] <= ROUNDING


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


def shapes(weights):
    return {name: weight.shape for name, weight in weights.items()}


def numbers(text):
    """Return the numbers of a list such as 1,2,3."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,3")
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, default=Path("model.pt"))
    parser.add_argument("--processes", type=numbers, default=[1, 2, 3])
    parser.add_argument("script")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.exit(2, f"there is no file {args.script}\n")
    # as at Ctrl-C, so that what was moved is put back
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs, lines, equal = [], [], True
    with put_aside(args.weights):
        for processes in args.processes:
            print(f"{processes} process{'es' * (processes > 1):4}", end="", flush=True)
            done = train(processes, args.script, args.flags, args.weights)
            if done is None:
                equal = False
                continue
            if runs:
                equal = compare(runs[0], done[0]) and equal
            else:
                print("trained")
            runs.append(done[0])
            lines.append(done[1])
    print("equal except for rounding" if equal else "not shown to be equal")
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
