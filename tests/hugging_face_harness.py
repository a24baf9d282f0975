"""What tests of your_own_script/hugging_face and other_libraries/hf_*.py share."""

import functools
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from harness import commands
from harness.stages import ROOT
from tests import spy
from tests.training import TRANSFORMERS
from tests.training import replace_once

commands.preloaded += TRANSFORMERS

SCRIPTS = ROOT / "your_own_script/hugging_face"
FINE_TUNE, MAKE_MODEL = SCRIPTS / "fine_tune.py", SCRIPTS / "make_model.py"
PLAIN = ROOT / "tests/plain_fine_tune.py"
# A changed copy can be beside a script.
MODULES = "fine_tune", "sharded"


# On some CPUs, bitsandbytes prints this when peft or the Trainer imports it.
BY_BITSANDBYTES = "Failed to load CPU gemm_4bit_forward"


def own_lines(text):
    """Return the lines of a text, without what bitsandbytes prints."""
    return [line for line in text.splitlines() if BY_BITSANDBYTES not in line]


def command(script, processes, *arguments):
    """Return the words that start a script; those of one process are not launched."""
    if script.name in (PLAIN.name, MAKE_MODEL.name):
        return ["python", script, *arguments]
    launch = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return [*launch, script, *arguments]


def run(words, folder, code=0, prepare=None, **options):
    """Run a script in forks, in the folder `folder`/work; return a commands.Done."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    options |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < 2:
        options["CUDA_VISIBLE_DEVICES"] = ""
    prepare = functools.partial(spy.import_again, MODULES, prepare)
    options |= {"forks": True, "cwd": work, "prepare": prepare}
    return commands.run(words, folder, code, **options)


def train_before(model, flags, samples, folder, *changes):
    """Train in one process, in the order of fine_tune.py's samples, in exact float64.

    samples: of an epoch, whose last batch is dropped; changes: texts of PLAIN, each of
    which is there once, and what replaces them. Returns the screen and the weights.
    """
    folder.mkdir(exist_ok=True)
    script = folder / PLAIN.name
    replace_once(PLAIN, *changes, target=script)
    for name in ("fine_tune.py", "sharded.py"):  # which it imports
        (folder / name).symlink_to(SCRIPTS / name)
    prepare = functools.partial(spy.exact_norm_and_shuffle, samples)
    done = run(command(script, 1, model, *flags), folder, prepare=prepare)
    return done.stdout, saved(folder)


def saved(folder):
    """Return the weights that a script has written."""
    (path,) = (folder / "work").glob("*/*.safetensors")
    return load_file(path)


def max_abs_diff(one, other):
    """Return the largest difference of two models' weights, which have equal names."""
    assert one.keys() == other.keys()
    return max(
        (one[name].double() - other[name].double()).abs().max().item() for name in one
    )


@functools.cache
def models():
    """Return the folder of what `pretrained` makes."""
    return tempfile.TemporaryDirectory()


@functools.cache
def pretrained(kind):
    """Return the folder of a small random model of this kind, by make_model.py."""
    folder = Path(models().name, kind)
    run(command(MAKE_MODEL, 1, kind), folder)
    return folder / "work" / kind
