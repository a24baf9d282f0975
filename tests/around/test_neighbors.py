"""The programs with other libraries train what stage 03 trains; their page is true."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from tests.conftest import only_in_release
from tests.neighbors_harness import FOLDER
from tests.neighbors_harness import docstring
from tests.training import DOUBLE
from tests.training import losses
from tests.training import replace_once
from tests.training import train_in_forks

pytestmark = pytest.mark.ci

PAGE = FOLDER / "README.md"
STAGE = first_with("ddp")
ACCELERATE, FABRIC = "accelerate_train.py", "fabric_train.py"
PACKAGES = {ACCELERATE: "accelerate", FABRIC: "lightning-fabric"}
STAGE_03 = ("stage 03", ROOT / STAGE / "train.py")
FSDP = ("fine_tune.py", ROOT / "your_own_script/hugging_face/fine_tune.py")
# {program: (heading of its table's left column, file whose lines that column shows)}
TABLES = {
    ACCELERATE: STAGE_03,
    FABRIC: STAGE_03,
    "ray_train.py": STAGE_03,
    "horovod_train.py": STAGE_03,
    "hf_accelerate.py": FSDP,
    "hf_trainer.py": FSDP,
    "hf_distributed_config.py": FSDP,
}
SAME = "weights differ by less than 1e-10; processes: {}\n"
DIFFERENT = "AssertionError: largest difference from stage 03's weights"


@pytest.fixture
def reference(trained, device):
    """Return stage 03's run on two processes in double precision."""
    if device == "cuda":
        pytest.skip("the programs have not been tried on GPUs")
    return trained(STAGE, 2, *DOUBLE, how=train_in_forks)


def run(words, reference, folder, code=0, **variables):
    """Run a command, with the file of stage 03's weights in the place of out/last.pt.

    With a port of its own, and without the settings of whoever runs the tests.
    """
    words = [reference.weights if word == "out/last.pt" else word for word in words]
    if words[0] == "fabric":
        words[2:2] = ["--main-port", commands.free_port()]
    if words[0] in ("accelerate", "fabric"):
        words[0] = Path(sys.executable).with_name(words[0])
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": folder}
    return commands.run(words, folder, code, forks=True, **variables)


def run_changed(program, replacements, reference, folder, **variables):
    """Run a program with replaced texts under torchrun, with any exit code."""
    (folder / FOLDER.name).mkdir(parents=True)
    (folder / "common").symlink_to(ROOT / "common")
    script = folder / FOLDER.name / program
    replace_once(FOLDER / program, *replacements, target=script)
    words = ["torchrun", "--standalone", "--nproc-per-node=2", script, "out/last.pt"]
    return run(words, reference, folder, code=None, GROUP_RANK="0", **variables)


# ---- the programs --------------------------------------------------------------------
@pytest.mark.parametrize("program", [ACCELERATE, only_in_release(FABRIC)])
def test_two_processes_train_the_weights_of_stage_03(
    program, reference, tmp_path, record_property
):
    """And print what the docstring shows, with the metrics that stage 03 printed."""
    version = importlib.metadata.version(PACKAGES[program])
    record_property("tested with", f"{PACKAGES[program]} {version}")
    command, printed = docstring(program)
    screen = run(command, reference, tmp_path).stdout
    assert screen.splitlines() == printed
    assert screen.endswith(SAME.format(2))
    metric = r"(?:train|val) loss \S+ acc@1 \S+ acc@5 [\d.]+"
    assert re.findall(metric, screen) == re.findall(metric, reference.stdout)
    assert len(losses(screen)) == 4


@pytest.mark.release
def test_accelerate_launch_starts_one_process_on_a_cpu(reference, tmp_path):
    """Although it is told to start two. One process trains the same weights."""
    flags = ["--cpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    words = ["accelerate", "launch", *flags, "--dynamo_backend=no"]
    done = run([*words, FOLDER / ACCELERATE, "out/last.pt"], reference, tmp_path)
    assert done.stdout.endswith(SAME.format(1))


@pytest.mark.release
def test_under_torchrun_fabric_lets_each_process_train_alone(reference, tmp_path):
    """Each prints, and each says that it is the only one."""
    done = run_changed(FABRIC, [], reference, tmp_path)
    for rank in done.ranks:
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.endswith(SAME.format(1))


# ---- what the page says of each library's defaults -----------------------------------
# What `fabric run` sets in addition to the variables that torchrun sets.
BY_FABRIC_RUN = {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_ACCELERATOR": "cpu"}
# {claim: (program, [(a text that is there once, its replacement)], [lines then seen])}
PRINT_STEPS = 'print("at step", scheduler.scheduler.last_epoch)\n        trained ='
OTHER_ORDER = ["epoch 1: train loss (?!0.801)", DIFFERENT]
FROM_0 = [
    ("loader.set_epoch(epoch)", "pass"),
    ("data_seed=args.seed", "data_seed=args.seed + 1"),
]
LOOP = "for inputs, targets in loader:  # already"
RESUMED = (
    "rest = accelerator.skip_first_batches(loader, {}) if epoch == 1 else loader\n"
    "    for inputs, targets in rest:\n"
    '        print("labels", targets.tolist())  #'
)
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
        OTHER_ORDER,
    ),
    "Accelerate counts epochs from 0": (
        ACCELERATE,
        FROM_0,
        [SAME.format(2)],
    ),
    "skip_first_batches does not count its epoch": (
        ACCELERATE,
        [*FROM_0, (LOOP, RESUMED.format(15))],
        [r"(?s)labels (.*?)\n.*epoch 1: val.*labels \1\n", DIFFERENT],
    ),
    "unless set_epoch is called in every epoch": (
        ACCELERATE,
        [(LOOP, RESUMED.format(0))],
        [SAME.format(2)],
    ),
    "the last batch repeats samples": (
        ACCELERATE,
        [(".gather_for_metrics(", ".gather(")],
        ["epoch 1: val .* of 384\n", SAME.format(2)],
    ),
    "Fabric counts epochs from 0": (
        FABRIC,
        [
            ("seed=args.seed + 1", "seed=args.seed"),
            ("fill_(epoch)\n", "fill_(epoch)\n    loader.sampler.set_epoch(epoch)\n"),
        ],
        OTHER_ORDER,
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


@pytest.mark.release
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_default_is_as_the_page_says(claim, reference, tmp_path):
    program, replacements, seen = CLAIMS[claim]
    variables = BY_FABRIC_RUN if program == FABRIC else {}
    done = run_changed(program, replacements, reference, tmp_path, **variables)
    rank_0 = done.ranks[0]
    screen = rank_0.stdout + rank_0.stderr
    for line in seen:
        assert re.search(line, screen), screen
    assert (rank_0.returncode == 0) == (SAME.format(2) in seen), screen


# ---- the page ------------------------------------------------------------------------
def without_spaces(text):
    return "".join(text.split())


def code_of(path):
    """Return a program's text without its docstring and without white space."""
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    return without_spaces(text.replace(docstring, ""))


@pytest.mark.parametrize("program", TABLES)
def test_the_table_shows_lines_of_both_files(program):
    """`...` stands for anything; a cell without a line has words."""
    heading, left = TABLES[program]
    sections = re.split("^##+ ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = [each for each in sections if program in each]
    table = section.partition(f"| {heading} |")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    rows = [row for row in rows if "`" in row[0]]
    assert len(rows) >= 7
    for row in rows:
        for cell, path in zip(row, (left, FOLDER / program), strict=True):
            for line in re.findall("`([^`]+)`", cell):
                parts = without_spaces(line).split("...")
                pattern = ".*".join(map(re.escape, parts))
                assert re.search(pattern, code_of(path)), f"{path.name}: {line}"
