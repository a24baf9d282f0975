"""Bad input gets one clear line and exit code 2, no traceback, and nothing is written."""

import os
import socket

from tests.harness import ANSWER
from tests.harness import fork
from tests.harness import fork_ranks
from tests.harness import free_port
from tests.harness import run
from tests.harness import spawn_by_fork
from tests.test_rank_failures import LAUNCHERS
from tools.stages import ROOT
from tools.stages import command
from tools.stages import launcher
from tools.stages import stages
from tools.stages import takes_processes

import pytest
import torch

STAGES = stages()
ENV = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
# What is wrong, and the flag or variable that the line must name.
WRONG = {
    "no epochs": (["--epochs", "0"], "--epochs"),
    "a negative batch": (["--batch-size", "-60"], "--batch-size"),
    "half a batch": (["--batch-size", "1.5"], "--batch-size"),
    "a batch larger than the set": (["--batch-size", "6000"], "--batch-size"),
    "a learning rate that is no number": (["--lr", "nan"], "--lr"),
    "an endless timeout": (["--timeout", "inf"], "--timeout"),
    "a negative seed": (["--seed", "-1"], "--seed"),
    "an unknown flag": (["--learning-rate", "1"], "--learning-rate"),
    "an abbreviated flag": (["--epoch", "1"], "--epoch"),
    "an unknown data set": (["--data", "mnist"], "--data"),
    "an unknown model": (["--arch", "resnet19"], "--arch"),
    "a model for larger images": (["--arch", "vgg11"], "--arch"),
    "no weights of the small model": (["--pretrained"], "--pretrained"),
    "a missing data folder": (["--data", "cifar10", "--data-dir", "{tmp}/none"], "--data-dir"),
    "a data folder without the data": (["--data", "cifar10", "--data-dir", "{tmp}"], "--data"),
    "no image folder": (["--data", "imagefolder", "--data-dir", "{tmp}"], "--data-dir"),
    "a missing checkpoint": (["--evaluate", "{tmp}/none.pt"], "--evaluate"),
    "a truncated checkpoint": (["--evaluate", "{tmp}/half.pt"], "--evaluate"),
    "a text for a checkpoint": (["--evaluate", "{tmp}/text.pt"], "--evaluate"),
    "another model's checkpoint": (["--evaluate", "{tmp}/other.pt"], "--evaluate"),
    "a file for a folder": (["--out-dir", "{tmp}/text.pt"], "--out-dir"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a truncated checkpoint, a text file, and a checkpoint of another model."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({"weight": torch.zeros(1000)}, folder / "other.pt")
    (folder / "half.pt").write_bytes((folder / "other.pt").read_bytes()[:2000])
    (folder / "text.pt").write_text("not a checkpoint")
    return folder


def assert_one_line(done, named, code=2):
    lines = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("train.py: error: ")
    assert named in lines[0]


@pytest.mark.fault(
    stages="01 to 09",
    what="a flag is wrong, a file or a folder missing, truncated or of another kind",
    sees="one line that names the flag, `train.py: error: ...`; exit code 2 (under torchrun the"
    " line of every rank that sees it, and torchrun's exit code 1)",
    seconds=20,
    lost="nothing; no file is touched",
)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("stage", STAGES)
def test_one_line_and_code_2(stage, what, files, tmp_path, device, fault):
    """The scripts themselves, each in a single process: stage 03 with the variables of torchrun."""
    flags, named = WRONG[what]
    flags = [flag.format(tmp=files) for flag in flags]
    if "--out-dir" not in flags:
        flags += ["--out-dir", str(tmp_path / "out")]
    if takes_processes(stage) and "nproc=" in command(stage)[-1]:
        flags += ["--nproc", "1"]
    before = sorted(files.rglob("*"))
    variables = {**ENV, "MASTER_PORT": free_port()}
    script = ROOT / stage / "train.py"
    options = {"prepare": spawn_by_fork, "seconds": fault.seconds, **variables}
    done = fork(script, [*flags, "--device", device], tmp_path, **options)()
    assert_one_line(done, named)
    fault.assert_seen(done.stderr)
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()
    assert sorted(files.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so cuda is no bad input")
@pytest.mark.parametrize("stage", STAGES)
def test_cuda_without_a_gpu(stage, tmp_path):
    variables = {**ENV, "MASTER_PORT": free_port()}
    done = fork(ROOT / stage / "train.py", ["--device", "cuda"], tmp_path, **variables)()
    assert_one_line(done, "--device cuda")


LAUNCHED = [stage for stage in STAGES if takes_processes(stage)]
BY_VARIABLES = [stage for stage in LAUNCHED if launcher(stage) == "torchrun"]


@pytest.mark.fault(
    stages="03, 06 to 09",
    what="a launcher's variables are missing or contradict each other; a launched stage is started"
    " with plain python",
    sees="one line, `train.py: error: ...`, which names the variable and, if it is missing, the"
    " command that sets it; exit code 2",
    seconds=20,
    lost="nothing",
)
@pytest.mark.parametrize("stage", BY_VARIABLES)
@pytest.mark.parametrize(
    "variables, named",
    [
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "one"}, "RANK is one"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
        ({"RANK": "1"}, "RANK=1 WORLD_SIZE=1"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
        ({"WORLD_SIZE": "7"}, "--batch-size 60"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
    ],
)
def test_a_launchers_variables(stage, variables, named, tmp_path, fault):
    merged = {**ENV, "MASTER_PORT": "1", **variables}
    merged = {name: value for name, value in merged.items() if value is not None}
    done = fork(ROOT / stage / "train.py", [], tmp_path, seconds=fault.seconds, **merged)()
    assert_one_line(done, named)
    fault.assert_seen(done.stderr)
    if "is not set" in named:
        assert "torchrun --standalone" in done.stderr


@pytest.mark.fault(
    stages="03, 06 to 09",
    what="another program listens at the port that a launcher chose",
    sees="`check MASTER_ADDR, MASTER_PORT: ... in use`; exit code 2",
    seconds=20,
    lost="nothing",
)
@pytest.mark.parametrize("stage", BY_VARIABLES)
def test_a_port_in_use(stage, tmp_path, fault):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variables = {**ENV, "MASTER_PORT": str(taken.getsockname()[1])}
        script = ROOT / stage / "train.py"
        done = fork(script, [], tmp_path, seconds=fault.seconds, **variables)()
    assert_one_line(done, "MASTER_PORT")
    fault.assert_seen(done.stderr)


@pytest.mark.parametrize("stage", LAUNCHERS)
def test_a_batch_that_the_processes_cannot_share(stage, tmp_path):
    """Each rank sees it by itself; where they are spawned, their parent does, before them."""
    for end in fork_ranks(stage, 2, ["--batch-size", "61", "--device", "cpu"], tmp_path):
        assert_one_line(end(), "--batch-size 61")


@pytest.mark.parametrize("stage", LAUNCHERS)
def test_a_fault_that_only_the_ranks_can_see(stage, files, tmp_path):
    """Launched as shown: torchrun ends with its own code 1 and its report stands below our line."""
    flags = ["--data", "cifar10", "--data-dir", str(files), "--device", "cpu"]
    done = run([*command(stage, 2), *flags], tmp_path, seconds=ANSWER)
    ours = [line for line in done.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert len(ours) == 1  # rank 0 goes first, so it alone reports it
    assert "--data cifar10" in ours[0]
    assert done.returncode == (1 if stage in BY_VARIABLES else 2)
    assert "Traceback" not in done.stderr.partition(ours[0])[0]


@pytest.mark.parametrize("stage", LAUNCHED)
def test_sync_bn_needs_gpus(stage, tmp_path):
    variables = {**ENV, "MASTER_PORT": free_port()}
    script = ROOT / stage / "train.py"
    done = fork(script, ["--sync-bn", "--device", "cpu"], tmp_path, **variables)()
    assert_one_line(done, "--sync-bn")


def not_writable():
    os.access = lambda *_: False  # as for a user who is not root


def test_a_folder_that_is_not_writable(tmp_path):
    script = ROOT / STAGES[0] / "train.py"
    done = fork(script, ["--out-dir", tmp_path / "out"], tmp_path, prepare=not_writable)()
    assert_one_line(done, "--out-dir")
