"""Bad input gets one clear line and exit code 2, no traceback, and writes nothing."""

import socket

import pytest
import torch

from tests.conftest import swept_unless
from tests.fault_injection import not_writable
from tests.harness import LAUNCHED
from tests.harness import LAUNCHER_ENV
from tests.harness import LAUNCHERS
from tests.harness import assert_one_error_line
from tests.harness import fork
from tests.harness import fork_ranks
from tests.harness import free_port
from tests.harness import run
from tools.stages import ROOT
from tools.stages import command
from tools.stages import launcher
from tools.stages import reference
from tools.stages import stages
from tools.stages import trains_on_text

STAGES = stages()
BY_TORCHRUN = [stage for stage in LAUNCHED if launcher(stage) == "torchrun"]
# What is wrong, and what the line must say of it.
WRONG = {
    "no epochs": (["--epochs", "0"], "--epochs: '0' is not an integer, 1 or more"),
    "a negative batch": (["--batch-size", "-60"], "--batch-size: '-60'"),
    "half a sample": (["--batch-size", "1.5"], "--batch-size: '1.5'"),
    "a batch larger than the set": (["--batch-size", "60000"], "--batch-size 60000: "),
    "a learning rate of nan": (["--lr", "nan"], "--lr: 'nan' is not a number"),
    "an infinite timeout": (["--timeout", "inf"], "--timeout: "),
    "a negative seed": (["--seed", "-1"], "--seed: "),
    "an unknown flag": (["--learning-rate", "1"], "--learning-rate"),
    "an abbreviated flag": (["--epoch", "1"], "--epoch"),
    "no file of weights": (["--evaluate", "{tmp}/none.pt"], "--evaluate: "),
    "a truncated file": (["--evaluate", "{tmp}/half.pt"], "--evaluate: "),
    "a text file": (["--evaluate", "{tmp}/text.pt"], "--evaluate: "),
    "another model's weights": (
        ["--evaluate", "{tmp}/other.pt"],
        "other.pt holds another model's weights",
    ),
    "a file, not a directory": (["--out-dir", "{tmp}/text.pt"], "--out-dir: "),
}
WRONG_WITH_IMAGES = {
    "an unknown data set": (["--data", "mnist"], "--data: "),
    "an unknown model": (["--arch", "resnet19"], "--arch resnet19: neither 'small'"),
    "a model for larger images": (["--arch", "vgg11"], "--arch vgg11: cannot take"),
    "weights of the small model": (["--pretrained"], "--pretrained: "),
    "no data directory": (
        ["--data", "cifar10", "--data-dir", "{tmp}/none"],
        "none: no such directory",
    ),
    "a directory without the data": (
        ["--data", "cifar10", "--data-dir", "{tmp}"],
        "--data cifar10: not readable",
    ),
    "no image folder": (
        ["--data", "imagefolder", "--data-dir", "{tmp}"],
        "--data-dir ",
    ),
}
WRONG_WITH_TEXT = {
    "no text": (["--text-file", "{tmp}/none.txt"], "--text-file: there is no file"),
    "a directory, not a text": (["--text-file", "{tmp}"], "--text-file: "),
    "an empty text": (["--text-file", "{tmp}/empty.txt"], "--text-file {tmp}/empty."),
    "a text without a window to validate on": (
        ["--text-file", "{tmp}/short.txt", "--batch-size", "1"],
        "--text-file {tmp}/short.txt: 300 bytes are too few for windows of",
    ),
    "a text shorter than a batch": (
        ["--text-file", "{tmp}/short.txt", "--context-length", "16"],
        "--batch-size 60: the training part of --text-file {tmp}/short.txt has only 15 "
        "windows of --context-length 16",
    ),
    "no context": (["--context-length", "0"], "--context-length: '0' is not"),
    "half a head": (["--heads", "1.5"], "--heads: '1.5' is not an integer"),
    "no width": (["--width", "0"], "--width: '0' is not"),
    "no block": (["--depth", "0"], "--depth: '0' is not"),
    "heads that do not divide the width": (
        ["--width", "64", "--heads", "5"],
        "--width 64 must be divisible by --heads (5)",
    ),
    "less than no sample": (["--sample", "-1"], "--sample: '-1' is not"),
    "a flag for images": (["--data", "digits"], "--data digits"),
}
# What is seen by the parser, by the data, by the model, and by a launched run.
KINDS = ("no epochs", "a directory without the data", "a truncated file")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with weights of another model, also truncated, and a text file."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({"weight": torch.zeros(1000)}, folder / "other.pt")
    (folder / "half.pt").write_bytes((folder / "other.pt").read_bytes()[:2000])
    (folder / "text.pt").write_text("not a file of weights")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_bytes(b"0123456789" * 30)
    return folder


def wrong(stage):
    """Return what can be wrong in a stage's flags, and what the line must say."""
    return WRONG | (WRONG_WITH_TEXT if trains_on_text(stage) else WRONG_WITH_IMAGES)


def is_default(stage, what):
    """Return whether a case runs without --all: what is new in a stage, and KINDS."""
    new_here = stage == reference(stage) and (what not in WRONG or stage == STAGES[0])
    return new_here or what in KINDS


@pytest.mark.fault(
    stages="01 to 13",
    what="a flag is wrong, or a file or directory is missing, truncated or of the wrong"
    " kind",
    sees="one line that names the flag, `train.py: error: ...`; exit code 2 (under"
    " torchrun the line of every rank that sees it, and torchrun's exit code 1)",
    seconds=20,
    lost="nothing; no file is touched",
)
@pytest.mark.parametrize(
    "stage, what",
    [swept_unless(is_default(s, w), s, w) for s in STAGES for w in wrong(s)],
)
def test_one_line_and_exit_code_2(stage, what, files, tmp_path, device, fault):
    """In a single process, to which a launched stage's variables are given."""
    flags, named = wrong(stage)[what]
    flags, named = [flag.format(tmp=files) for flag in flags], named.format(tmp=files)
    if "--out-dir" not in flags:
        flags += ["--out-dir", tmp_path / "out"]
    before = sorted(files.rglob("*"))
    flags += ["--device", device]
    (end,) = fork_ranks(stage, 1, flags, tmp_path / "run", seconds=fault.seconds)
    done = end()
    assert_one_error_line(done, named)
    fault.assert_seen(done.stderr)
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()
    assert sorted(files.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="--device cuda is right here")
@pytest.mark.parametrize("stage", [swept_unless(s in LAUNCHERS, s) for s in STAGES])
def test_cuda_without_a_gpu(stage, tmp_path):
    (end,) = fork_ranks(stage, 1, ["--device", "cuda"], tmp_path)
    assert_one_error_line(end(), "--device cuda: no GPU is visible; use --device cpu")


VARIABLES = [
    ({"RANK": None}, "RANK is not set; a launcher sets it: start with "),
    ({"RANK": "one"}, "RANK is 'one', not a number"),
    ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
    ({"RANK": "1"}, "RANK=1 WORLD_SIZE=1 LOCAL_RANK=0 contradict each other"),
    ({"LOCAL_RANK": "1"}, "RANK=0 WORLD_SIZE=1 LOCAL_RANK=1 contradict each other"),
    ({"WORLD_SIZE": "7"}, "--batch-size 60 is the global batch: it must be divisible"),
    ({"MASTER_ADDR": None}, "check MASTER_ADDR and MASTER_PORT: "),
]


@pytest.mark.fault(
    stages="03, 06 to 13",
    what="a launcher's variables are missing or contradict each other; a stage is"
    " started with python instead of its launcher",
    sees="one line, `train.py: error: ...`, that names the variable and, if it is"
    " missing, the command that sets it; exit code 2",
    seconds=20,
    lost="nothing",
)
@pytest.mark.parametrize(
    "stage, variables, named",
    [
        swept_unless(stage == BY_TORCHRUN[0] or case == VARIABLES[0], stage, *case)
        for stage in BY_TORCHRUN
        for case in VARIABLES
    ],
)
def test_a_launchers_variables(stage, variables, named, tmp_path, fault):
    merged = {**LAUNCHER_ENV, "MASTER_PORT": "1", **variables}
    merged = {name: value for name, value in merged.items() if value is not None}
    script = ROOT / stage / "train.py"
    done = fork(script, [], tmp_path, seconds=fault.seconds, **merged)()
    assert_one_error_line(done, named)
    fault.assert_seen(done.stderr)
    if "is not set" in named:
        assert "torchrun --standalone" in done.stderr


@pytest.mark.fault(
    stages="03, 06 to 13",
    what="another program listens on the port that a launcher chose",
    sees="`check MASTER_ADDR and MASTER_PORT: ... in use`; exit code 2",
    seconds=20,
    lost="nothing",
)
@pytest.mark.parametrize(
    "stage", [swept_unless(s == "03_ddp_launch", s) for s in BY_TORCHRUN]
)
def test_a_port_in_use(stage, tmp_path, fault):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variables = {**LAUNCHER_ENV, "MASTER_PORT": str(taken.getsockname()[1])}
        script = ROOT / stage / "train.py"
        done = fork(script, [], tmp_path, seconds=fault.seconds, **variables)()
    assert_one_error_line(done, "check MASTER_ADDR and MASTER_PORT: ")
    fault.assert_seen(done.stderr)


def test_a_rank_that_never_comes(tmp_path):
    """It may have another address, or have died on another machine."""
    variables = {**LAUNCHER_ENV, "WORLD_SIZE": "2", "MASTER_PORT": free_port()}
    script = ROOT / "03_ddp_launch/train.py"
    flags = ["--timeout", "3", "--device", "cpu"]
    done = fork(script, flags, tmp_path, **variables)()
    assert_one_error_line(done, "check MASTER_ADDR and MASTER_PORT: ")
    assert "1/2 clients joined" in done.stderr


@pytest.mark.parametrize("stage", LAUNCHERS)
def test_a_batch_that_the_processes_cannot_divide(stage, tmp_path):
    """Each rank reports it; in stage 04 the parent does, before it starts them."""
    named = "--batch-size 61 is the global batch: it must be divisible by the number"
    for end in fork_ranks(
        stage, 2, ["--batch-size", "61", "--device", "cpu"], tmp_path
    ):
        done = end()
        assert_one_error_line(done, named)
        assert done.stderr.endswith(" of processes (2); try 60\n")


def test_an_error_that_only_the_ranks_can_see(files, tmp_path):
    """torchrun ends with its own code 1, its report below our line; stage 04 with 2."""
    flags = ["--data", "cifar10", "--data-dir", files, "--device", "cpu"]
    (tmp_path / "03").mkdir()
    launched = run([*command(LAUNCHERS[0], 2), *flags], tmp_path / "03")
    (spawned,) = [end() for end in fork_ranks(LAUNCHERS[1], 2, flags, tmp_path / "04")]
    assert (launched.returncode, spawned.returncode) == (1, 2)
    for done in (launched, spawned):
        lines = done.stderr.splitlines()
        ours = [line for line in lines if line.startswith("train.py: error: ")]
        assert len(ours) == 1  # rank 0 goes first, so only it reports the error
        assert "--data cifar10" in ours[0]
        assert "Traceback" not in done.stderr.partition(ours[0])[0]


@pytest.mark.parametrize("stage", [swept_unless(s in LAUNCHERS, s) for s in LAUNCHED])
def test_sync_bn_needs_gpus(stage, tmp_path):
    (end,) = fork_ranks(stage, 1, ["--sync-bn", "--device", "cpu"], tmp_path)
    assert_one_error_line(end(), "--sync-bn: ")


def test_a_directory_that_is_not_writable(tmp_path):
    flags = ["--out-dir", tmp_path / "out"]
    (end,) = fork_ranks(STAGES[0], 1, flags, tmp_path, prepare=not_writable)
    assert_one_error_line(end(), f"--out-dir: {tmp_path} is not writable")
