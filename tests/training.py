"""How the tests train a stage: with little work, from copies, with a fault in it.

harness/commands.py starts the processes.

    DOUBLE, ENDLESS     flags that many tests use
    small_workload      flags with which an epoch takes a second or two
    start_stage, run_stage      a stage in forks, or by its launcher; `stage_words`
    train, train_in_forks       the same to its end, with what it wrote
    copied, changed, injected   a stage in another folder, as it is or with a fault
    load_stage, stage_args      a stage's script as a module, for its functions
"""

import ast
import collections
import functools
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from harness import commands
from harness.stages import ROOT
from harness.stages import command
from harness.stages import features

DOUBLE = ("--dtype", "float64", "--epochs", "2")
ENDLESS = ("--epochs", "100000")
DIGITS = 1440  # images for training
WINDOW = 8  # tokens, of a language model's samples

commands.preloaded += ["tests.training"]
# For commands.preloaded, where forks train models of transformers: importing these
# takes each of them two seconds.
TRANSFORMERS = ["transformers", "transformers.models.auto.modeling_auto"]
TRANSFORMERS += [
    f"transformers.models.{each}.modeling_{each}" for each in ("llama", "gpt2")
]


def counts(device):
    """Return the numbers of processes to try: 1 to 4, if GPUs have room for them."""
    most = ranks_on_gpus() if device == "cuda" else 4
    return range(1, min(4, most) + 1)


def ranks_on_gpus():
    """Return how many ranks find a GPU: one on each, or --ranks-per-gpu."""
    return torch.cuda.device_count() * int(os.environ.get("RANKS_PER_GPU", "1"))


def skip_without_gpus(processes, device):
    """Skip a test of so many processes, each on a GPU, if there are fewer GPUs."""
    if device == "cuda" and processes > ranks_on_gpus():
        pytest.skip(f"{processes} processes need as many GPUs")


def missing_for_slurm():
    """Return what the local cluster lacks on this machine; "" if it can run."""
    if os.geteuid() != 0:
        return "the local cluster needs root"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))):
        return "no Slurm here: apt-get install slurmctld slurmd slurm-client munge"
    name = os.uname().nodename
    if socket.gethostbyname(name) != "127.0.0.1":
        return f"Slurm would leave loopback: echo 127.0.0.1 {name} >>/etc/hosts"
    return ""


# ---- work ----------------------------------------------------------------------------
# flags: of the data; train, val: targets in an epoch and in the validation set, one per
# image and WINDOW per window of a text.
Workload = collections.namedtuple("Workload", "flags train val")


@functools.cache
def texts():
    """Return the folder of the texts that `small_workload` writes."""
    return tempfile.TemporaryDirectory()


def small_workload(stage, samples=DIGITS):
    """Return the Workload of a stage with so many training samples of a few values.

    With as many as there are digits, an epoch has 30 steps, and images are the digits.
    With another number they are random. A text is the beginning of common/text.txt.
    """
    if "text" in features(stage):
        training = WINDOW * (samples + 1)  # so many fit, wherever the first one begins
        size = -(-10 * training // 9)  # of which nine tenths are for training
        windows = (size - training - 1) // WINDOW
        path = Path(texts().name, f"{samples}.txt")
        path.write_bytes((ROOT / "common/text.txt").read_bytes()[:size])
        flags = ("--text-file", str(path), "--context-length", str(WINDOW))
        return Workload(flags, WINDOW * samples, WINDOW * windows)
    if samples == DIGITS:
        return Workload((), samples, 357)
    flags = ("--data", "fake", "--image-size", "8", "--images", str(samples))
    return Workload(flags, samples, max(1, samples // 5))


# ---- runs ----------------------------------------------------------------------------
def stage_words(stage, processes, flags, root=ROOT):
    """Return a stage's plain command with more flags, as words.

    The precision is float32 unless the flags say otherwise, also where the command that
    a reader types has --amp, which goes with no --dtype.
    """
    words = command(stage, processes, root)
    full = ("--amp", "off") if "--amp" in words else ()
    return [*words, *full, *flags]


def start_stage(stage, processes, flags, folder, root=ROOT, forks=True, **options):
    """Start a stage's plain command with more flags; return a commands.Job.

    root: where its folder is; forks, options: as for `commands.start`.
    """
    words = stage_words(stage, processes, flags, root)
    return commands.start(words, folder, forks=forks, **options)


def run_stage(
    stage, processes, flags, folder, code=0, seconds=commands.LIMIT, **options
):
    """Run a stage to its end; return a commands.Done.

    Raises commands.CommandError, with what it printed, if it ends with another code.
    """
    words = stage_words(stage, processes, flags, options.pop("root", ROOT))
    options = {"forks": True, **options}
    return commands.run(words, folder, code, seconds, **options)


def train(stage, processes, flags, folder):
    """Copy a stage elsewhere and run it from a third folder by its command.

    That folder contains another package called `common`, which must not be imported
    instead of the copy's. Returns the run's Done, with what `with_results` adds.
    """
    folder = Path(folder)
    project = copied(stage, folder / "project")
    (folder / "common").mkdir()
    (folder / "common/__init__.py").write_text("raise ImportError('the wrong common')")
    flags = [*flags, "--out-dir", "out"]
    options = {"root": project, "forks": False, "cwd": folder}
    done = run_stage(stage, processes, flags, folder, **options)
    return with_results(done, folder / "out")


def train_in_forks(stage, processes, flags, folder):
    """Train a stage where it is, in forks; return what `train` returns."""
    out = Path(folder) / "out"
    done = run_stage(stage, processes, [*flags, "--out-dir", out], folder)
    assert not any(one.stdout for one in done.ranks[1:])
    return with_results(done, out)


def with_results(done, out):
    """Add to a run's Done its `rows`, `weights` and `epochs` (lines it printed)."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    done.rows = [json.loads(line) for line in lines]
    done.weights = out / "last.pt"
    done.epochs = re.findall("^epoch .*", done.stdout, re.MULTILINE)
    return done


def assert_one_error_line(done, named):
    """Assert that a run ended with code 2 and one line that contains `named`.

    Beside it, nccl warns that the process group is still there, and mp.spawn says which
    process it ends.
    """
    assert done.returncode == 2, done.stderr
    others = re.compile(r"destroy_process_group\(\) was not called|Terminating process")
    (line,) = [each for each in done.stderr.splitlines() if not others.search(each)]
    assert line.startswith("train.py: error: ")
    assert named in line


def losses(text):
    """Return the losses that a run has printed, in order."""
    return [float(number) for number in re.findall(r"loss ([\d.]+)", text)]


def call_all(*functions):
    """Call those of the functions that are not None: several faults at once."""
    for function in filter(None, functions):
        function()


# ---- copies --------------------------------------------------------------------------
def copied(stage, folder):
    """Copy a stage's script and common/ into a new folder, as a reader does."""
    (folder / stage).mkdir(parents=True)
    shutil.copy(ROOT / stage / "train.py", folder / stage)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "common", folder / "common", ignore=ignored)
    return folder


def imported_by(source):
    """Return the names of the modules that a program imports, without their parts."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def replace_once(path, *replacements, target=None):
    """Replace texts of a file, each of which is there once; write it, or `target`."""
    text = path.read_text()
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (target or path).write_text(text)


def changed(stage, folder, *replacements):
    """Copy a stage and replace texts of its script, each of which is there once."""
    replace_once(copied(stage, folder) / stage / "train.py", *replacements)
    return folder


def injected(stage, folder, code):
    """Copy a stage and add code to its end, which every process of a run executes."""
    end = '\n\nif __name__ == "__main__":\n'
    return changed(stage, folder, (end, f"\n\n{code}\n{end}"))


# ---- functions of a script -----------------------------------------------------------
def load_program(path, name="program"):
    """Return a program as a module, without running it.

    It can import what is beside it, as when it runs.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


def load_stage(stage):
    """Return a stage's script as a module, without running it."""
    return load_program(ROOT / stage / "train.py", f"stage_{stage}")


def load_stage_for_vectors(stage):
    """Return a stage's script as a module that takes float vectors for samples."""
    module = load_stage(stage)
    replace_in(module, "data", normalize=lambda vectors, _, dtype: vectors.to(dtype))
    return module


def stage_args(module, *flags):
    """Return what a stage's script, loaded as a module, makes of flags, on the CPU."""
    words = ["train.py", "--device", "cpu", *map(str, flags)]
    with mock.patch.object(sys, "argv", words):
        return module.parse_args()


def mesh_of(module, args):
    """Return [the mesh of the processes] if a stage's functions take it, or []."""
    return [module.make_mesh(args)] if hasattr(module, "make_mesh") else []


def loaders_of(module, args):
    """Return the loaders of this process by a stage's own function.

    It is taken for one that has its machine for itself.
    """
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        return module.make_loaders(args, *mesh_of(module, args))


def replace_data(module, train_set, val_set):
    """Have a stage's script, loaded as a module, load these sets instead of its own."""
    replace_in(module, "data", load=lambda *_: (train_set, val_set))
    replace_in(module, "text", load=lambda *_: (train_set, val_set))


def replace_in(module, name, **functions):
    """Replace functions of what a module knows by a name, if it does; for it alone."""
    if hasattr(module, name):
        known = vars(getattr(module, name))
        setattr(module, name, types.SimpleNamespace(**{**known, **functions}))


def train_first_epoch(stage, module, args, model, loader, optimizer, scheduler, scaler):
    """Train by a stage's own function; return the metrics of the epoch.

    scaler: without effect on a stage that has no --amp. No checkpoint is saved, and no
    signal comes.
    """
    parts = [optimizer, scheduler, scaler]
    if "checkpoints" in features(stage):
        parts = [module.AppState(model, *parts, {})]
        if "signals" in features(stage):
            parts.append(lambda: False)
    elif "amp" not in features(stage):
        parts.remove(scaler)
    parts += mesh_of(module, args)
    metrics = module.train_one_epoch(args, 1, model, loader, *parts)
    return metrics[0] if "signals" in features(stage) else metrics


def sharded(model):
    """Shard a small model with FSDP2 over the processes of the default group."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh)


def plain(tensor):
    """Return a tensor, whole if FSDP2 has sharded it: then all ranks must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class FakeLoader(list):
    """A list of batches, with what a training loop asks of a DataLoader."""

    class Dataset(list):
        """Has a length and an epoch."""

        epoch = torch.zeros((), dtype=torch.int64)

    def __init__(self, batches):
        super().__init__(batches)
        self.dataset = self.Dataset(label for _, labels in batches for label in labels)
        self.sampler = types.SimpleNamespace(set_epoch=lambda _: None)
