"""The programs with other libraries train what stage 03 trains; their page is true."""

import ast
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import harness
from tools.stages import ROOT

FOLDER = ROOT / "recipes/neighbors"
PAGE = ROOT / "docs/neighbors.md"
STAGE = "03_ddp_launch"
DOUBLE = ("--dtype", "float64", "--epochs", "2")
ACCELERATE, FABRIC = "accelerate_train.py", "fabric_train.py"
PACKAGES = {ACCELERATE: "accelerate", FABRIC: "lightning-fabric"}
TABLES = [*PACKAGES, "ray_train.py", "horovod_train.py"]
COMMANDS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accelerate": [str(Path(sys.executable).with_name("accelerate"))],
    "fabric": [str(Path(sys.executable).with_name("fabric"))],
}
# What `fabric run` sets in addition to the variables that torchrun sets.
BY_FABRIC_RUN = {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_ACCELERATOR": "cpu"}
SAME = "weights differ by less than 1e-10; processes: {}\n"
DIFFERENT = "AssertionError: largest difference from stage 03's weights"


@pytest.fixture
def reference(trained, device):
    """Return stage 03's run on two processes in double precision."""
    if device == "cuda":
        pytest.skip("the programs have not been tried on GPUs")
    return trained(STAGE, 2, *DOUBLE, how=harness.train_in_forks)


def docstring(program):
    """Return a program's command, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / program).read_text()))
    shown = text.replace("\\\n", "").split("$ ")[-1]
    command, *printed = shown.splitlines()
    return shlex.split(command), printed


def run(words, reference, folder):
    """Run a command, with the file of stage 03's weights in the place of out/last.pt.

    With a port of its own, and without the settings of whoever runs the tests.
    """
    words = [
        str(reference.weights) if word == "out/last.pt" else word for word in words
    ]
    port = {"fabric": ["--main-port", harness.free_port()]}.get(words[0], [])
    words = [*COMMANDS[words[0]], *words[1:2], *port, *words[2:]]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder)}
    done = harness.run(words, folder, seconds=120, **hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fork_two(program, replacements, reference, folder, **variables):
    """Run a changed program in two forks; return what rank 0 and rank 1 ended with."""
    (folder / "recipes/neighbors").mkdir(parents=True)
    (folder / "common").symlink_to(ROOT / "common")
    script = folder / "recipes/neighbors" / program
    harness.replace_once(FOLDER / program, *replacements, target=script)
    shared = {**harness.LAUNCHER_ENV, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"GROUP_RANK": "0", "MASTER_PORT": harness.free_port(), **variables}
    shared |= {"CUDA_VISIBLE_DEVICES": ""}
    ends = []
    for rank in "01":
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        ends.append(harness.fork(script, [reference.weights], folder / rank, **own))
    return [end() for end in ends]


# ---- the programs --------------------------------------------------------------------
@pytest.mark.parametrize("program", PACKAGES)
def test_two_processes_train_the_weights_of_stage_03(
    program, reference, tmp_path, record_property
):
    """And print what the docstring shows, with the losses that stage 03 printed."""
    version = importlib.metadata.version(PACKAGES[program])
    record_property("tested with", f"{PACKAGES[program]} {version}")
    command, printed = docstring(program)
    screen = run(command, reference, tmp_path)
    assert screen.splitlines() == printed
    assert screen.endswith(SAME.format(2))
    metric = r"(?:train|val) loss \S+ acc@1 \S+ acc@5 [\d.]+"
    metrics = re.findall(metric, screen)
    assert metrics == re.findall(metric, reference.stdout)
    assert len(metrics) == 4


def test_accelerate_launch_starts_one_process_on_a_cpu(reference, tmp_path):
    """Although it is told to start two. One process trains the same weights."""
    flags = ["--cpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    words = ["accelerate", "launch", *flags, "--dynamo_backend=no"]
    words += [str(FOLDER / ACCELERATE), "out/last.pt"]
    assert run(words, reference, tmp_path).endswith(SAME.format(1))


def test_under_torchrun_fabric_lets_each_process_train_alone(reference, tmp_path):
    """Each prints, and each says that it is the only one."""
    done = fork_two(FABRIC, [], reference, tmp_path)
    for one in done:
        assert one.returncode == 0, one.stderr
        assert one.stdout.endswith(SAME.format(1))


@pytest.mark.parametrize("program", PACKAGES)
def test_length(program):
    assert 60 <= len((FOLDER / program).read_text().splitlines()) <= 110


# ---- what the page says of each library's defaults -----------------------------------
# {claim: (program, [(a text that is there once, its replacement)], [lines then seen])}
PRINT_STEPS = 'print("at step", scheduler.scheduler.last_epoch)\n    weights ='
OTHER_ORDER = ["epoch 1: train loss (?!0.894)", DIFFERENT]
CLAIMS = {
    "the batch size is per process": (
        ACCELERATE,
        # 25 batches of 60 become 12 steps of 2 x 60: the scheduler takes 2 x 12 x 2
        [("split_batches=True", "split_batches=False"), ("weights =", PRINT_STEPS)],
        ["at step 48\n", DIFFERENT],
    ),
    "shuffle=True has an order of its own": (
        ACCELERATE,
        [("use_seedable_sampler=True", "use_seedable_sampler=False")],
        OTHER_ORDER,
    ),
    "Accelerate counts epochs from 0": (
        ACCELERATE,
        [
            ("loader.set_epoch(epoch)", "pass"),
            ("data_seed=args.seed", "data_seed=args.seed + 1"),
        ],
        [SAME.format(2)],
    ),
    "the last batch repeats samples": (
        ACCELERATE,
        [(".gather_for_metrics(", ".gather(")],
        ["epoch 1: val .* of 300\n", SAME.format(2)],
    ),
    "Fabric counts epochs from 0": (
        FABRIC,
        [
            ("seed=args.seed + 1", "seed=args.seed"),
            ("epoch = epoch\n", "epoch = epoch\n    loader.sampler.set_epoch(epoch)\n"),
        ],
        OTHER_ORDER,
    ),
    "all_reduce averages": (
        FABRIC,
        [
            (', reduce_op="sum"', ""),
            ("train {format_metrics(train)}", "{train['count']} images"),
        ],
        ["epoch 1: 750 images\n", SAME.format(2)],
    ),
    "setup_dataloaders shards and pads": (
        FABRIC,
        [('{"use_distributed_sampler": False}', "{}")],
        ["epoch 1: val .* of 149\n", SAME.format(2)],  # of 148.5
    ),
    "launch() and fabric run exclude each other": (
        FABRIC,
        [("Fabric()  #", "Fabric()\n    fabric.launch()  #")],
        ["RuntimeError: This script was launched through the CLI"],
    ),
    "64-true returns float32": (
        FABRIC,
        [
            ("Fabric()", 'Fabric(precision="64-true")'),
            ("fabric.backward(loss)", "print(loss.dtype), fabric.backward(loss)"),
        ],
        ["torch.float32\n", DIFFERENT],
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_default_is_as_the_page_says(claim, reference, tmp_path):
    program, replacements, seen = CLAIMS[claim]
    variables = BY_FABRIC_RUN if program == FABRIC else {}
    done, _ = fork_two(program, replacements, reference, tmp_path, **variables)
    screen = done.stdout + done.stderr
    for line in seen:
        assert re.search(line, screen), screen
    assert (done.returncode == 0) == (SAME.format(2) in seen), screen


# ---- the page ------------------------------------------------------------------------
def lines(path):
    """Return a program's text without its docstring and without white space."""
    text = path.read_text()
    text = text.replace(ast.get_docstring(ast.parse(text), clean=False), "")
    return "".join(text.split())


def quoted(cell):
    """Return the lines that a table's cell shows `like this`, without white space."""
    return ["".join(code.split()) for code in re.findall("`([^`]+)`", cell)]


@pytest.mark.parametrize("program", TABLES)
def test_the_table_shows_lines_of_both_files(program):
    """`...` stands for anything; a cell without a line has words."""
    (section,) = re.findall(
        rf"\n## [^\n]*\n(?:(?!\n## ).)*?{program}.*?(?=\n## |\Z)",
        PAGE.read_text(),
        re.DOTALL,
    )
    table = section.partition("| stage 03 |")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    rows = [row for row in rows if "`" in row[0]]
    assert len(rows) >= 8
    for row in rows:
        files = ROOT / STAGE / "train.py", FOLDER / program
        for cell, path in zip(row, files, strict=True):
            for code in quoted(cell):
                pattern = ".*".join(map(re.escape, code.split("...")))
                assert re.search(pattern, lines(path)), f"{path.name}: {code}"
