"""other_libraries/README.md: the programs train what stage 03 does.

What a library does by default changes with its versions, so --release runs most of it.
Horovod is in an environment of its own, which `make horovod` makes before its test.
"""

import ast
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.training import DOUBLE
from tests.training import TRANSFORMERS
from tests.training import replace_once
from tests.training import train_in_forks

pytestmark = pytest.mark.ci

FOLDER = ROOT / "other_libraries"
STAGE = first_with("ddp")
ACCELERATE, FABRIC = "accelerate_train.py", "fabric_train.py"
TRAINER, HOROVOD = "hf_trainer.py", "horovod_train.py"
SAME = "weights differ by less than 1e-10; processes: {}\n"
DIFFERENT = "AssertionError: largest difference from stage 03's weights"

commands.preloaded += TRANSFORMERS


def docstring(program):
    """Return a program's last command as words, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / program).read_text()))
    shown = text.replace("\\\n", "").split("$ ")[-1]
    command, *printed = shown.splitlines()
    return shlex.split(command), printed


@pytest.fixture
def reference(trained, device):
    """Return stage 03's run on two processes in double precision."""
    if device == "cuda":
        pytest.skip("the programs have not been tried on GPUs")
    return trained(STAGE, 2, *DOUBLE, how=train_in_forks)


def run(words, reference, folder, code=0, **variables):
    """Run a command, with stage 03's weights in the place of out/last.pt."""
    words = [reference.weights if word == "out/last.pt" else word for word in words]
    if words[0] == "fabric":
        words[2:2] = ["--main-port", commands.free_port()]
        words[0] = Path(sys.executable).with_name("fabric")
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": folder}
    return commands.run(words, folder, code, forks=True, **variables)


@pytest.mark.parametrize("program", [ACCELERATE, only_in_release(FABRIC)])
def test_two_processes_train_the_weights_of_stage_03(program, reference, tmp_path):
    """And print what the docstring shows, with the metrics that stage 03 printed."""
    command, printed = docstring(program)
    screen = run(command, reference, tmp_path).stdout
    assert screen.splitlines() == printed and screen.endswith(SAME.format(2))
    metric = r"(?:train|val) loss \S+ acc@1 \S+ acc@5 [\d.]+"
    assert re.findall(metric, screen) == re.findall(metric, reference.stdout)


# What `fabric run` sets in addition to the variables that torchrun sets.
BY_FABRIC_RUN = {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_ACCELERATOR": "cpu"}
PRINT_STEPS = 'print("at step", scheduler.scheduler.last_epoch)\n        trained ='
# {claim: (program, [(a text that is there once, its replacement)], [lines then seen])}
CLAIMS = {
    "the batch size is per process": (
        ACCELERATE,
        # 30 batches of 48 become 15 steps of 2 x 48: the scheduler takes 2 x 15 x 2
        [("split_batches=True", "split_batches=False"), ("trained =", PRINT_STEPS)],
        ["at step 60\n", DIFFERENT],
    ),
    "shuffle=True has an order of its own": (
        ACCELERATE,
        [("use_seedable_sampler=True", "use_seedable_sampler=False")],
        ["epoch 1: train loss (?!0.801)", DIFFERENT],
    ),
    "the last batch repeats samples": (
        ACCELERATE,
        [(".gather_for_metrics(", ".gather(")],
        ["epoch 1: val .* of 384\n", SAME.format(2)],
    ),
    "all_reduce averages": (
        FABRIC,
        [
            (', reduce_op="sum"', ""),
            ("train {format_metrics(train)}", "{train['count']} images"),
        ],
        ["epoch 1: 720 images\n", SAME.format(2)],
    ),
    "setup_dataloaders shards and pads": (
        FABRIC,
        [('{"use_distributed_sampler": False}', "{}")],
        ["epoch 1: val .* of 179\n", SAME.format(2)],  # of 178.5
    ),
    "under torchrun each process trains alone": (
        FABRIC,
        [],
        [SAME.format(1)],
    ),
}


@pytest.mark.release
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_default_is_as_the_page_says(claim, reference, tmp_path):
    program, replacements, seen = CLAIMS[claim]
    (tmp_path / FOLDER.name).mkdir()
    (tmp_path / "common").symlink_to(ROOT / "common")
    script = tmp_path / FOLDER.name / program
    replace_once(FOLDER / program, *replacements, target=script)
    words = ["torchrun", "--standalone", "--nproc-per-node=2", script, "out/last.pt"]
    variables = BY_FABRIC_RUN if program == FABRIC and replacements else {}
    done = run(words, reference, tmp_path, code=None, GROUP_RANK="0", **variables)
    screen = done.ranks[0].stdout + done.ranks[0].stderr
    for line in seen:
        assert re.search(line, screen), screen


# ---- the Trainer ---------------------------------------------------------------------
def tune(folder, processes):
    """Run the Trainer's program; return its Done."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    words.append(FOLDER / TRAINER)
    words += ["--out", folder / "tuned"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return commands.run(words, folder, forks=True, **variables)


@pytest.mark.release
def test_the_trainer_prints_what_it_shows(tmp_path):
    _, printed = docstring(TRAINER)
    pattern = "\n".join(".*".join(map(re.escape, s.split("..."))) for s in printed)
    done = tune(tmp_path, 2)
    assert re.fullmatch(pattern + "\n", done.stdout), done.stdout


@pytest.mark.release
def test_two_processes_of_the_trainer_train_the_weights_of_one(tmp_path):
    for processes in (1, 2):
        tune(tmp_path / str(processes), processes)
    one, two = (
        load_file(tmp_path / name / "tuned/model.safetensors") for name in ("1", "2")
    )
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-4


def test_the_defaults_of_the_trainer_and_of_accelerates_plugin():
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    assert FullyShardedDataParallelPlugin().fsdp_version == 1
    assert TrainingArguments.lr_scheduler_type == "linear"
    assert TrainingArguments.weight_decay == 0
    assert TrainingArguments.max_grad_norm == 1


# ---- Horovod -------------------------------------------------------------------------
@pytest.mark.release
def test_horovod(reference, tmp_path):
    """It trains the weights of stage 03."""
    environment = ROOT / ".venv-horovod"
    if not (environment / "installed").exists():
        assert "REQUIRE_HOROVOD" not in os.environ, "type: make horovod"
        pytest.skip("Horovod is not installed; type: make horovod")
    words, _ = docstring(HOROVOD)
    words = [environment / "bin" / words[0], *words[1:-1], FOLDER / HOROVOD, *DOUBLE]
    words += ["--device", "cpu", "--out-dir", tmp_path / "out"]
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    commands.run(words, tmp_path, PATH=path)
    assert max_abs_diff(reference.weights, tmp_path / "out/last.pt") <= 1e-10
