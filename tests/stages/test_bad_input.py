"""docs/faults.md: bad input gets one line and exit code 2, and no file is touched."""

import functools
import socket

import pytest
import torch

from harness.stages import features
from harness.stages import first_with
from harness.stages import stages
from tests.conftest import only_in_release
from tests.fault_injection import no_large_files
from tests.training import assert_one_error_line
from tests.training import run_stage

BY_TORCHRUN, BY_SPAWN = first_with("torchrun"), first_with("spawn")
# What is wrong, and what the line must say of it: with any data, images or a text.
WRONG = {
    "no epochs": (["--epochs", "0"], "--epochs: '0' is not an integer, 1 or more"),
    "a batch larger than the set": (["--batch-size", "60000"], "--batch-size 60000: "),
    "a learning rate of nan": (["--lr", "nan"], "--lr: 'nan' is not a number"),
    "an unknown flag": (["--learning-rate", "1"], "--learning-rate"),
    "an abbreviated flag": (["--epoch", "1"], "--epoch"),
    "no file of weights": (["--evaluate", "{tmp}/none.pt"], "--evaluate: "),
    "a truncated file": (["--evaluate", "{tmp}/half.pt"], "--evaluate: "),
    "another model's weights": (
        ["--evaluate", "{tmp}/other.pt"],
        "other.pt holds another model's weights",
    ),
    "a file, not a directory": (["--out-dir", "{tmp}/text.pt"], "--out-dir: "),
    "a bucket": (["--out-dir", "s3://a/b"], "--out-dir: 's3://a/b' is not the path of"),
    "a name that is too long": (["--out-dir", "{tmp}/" + 300 * "n"], "(File name too"),
    "a link to nowhere": (["--out-dir", "{tmp}/link"], "link is not a directory"),
    "metrics of another tool": (
        ["--out-dir", "{tmp}/other"],
        "--out-dir: {tmp}/other/metrics.jsonl, line 2: not the metrics of an epoch",
    ),
}
WRONG_WITH_IMAGES = {
    "an unknown data set": (["--data", "mnist"], "--data: "),
    "an unknown model": (["--arch", "resnet19"], "--arch resnet19: neither 'small'"),
    "a model for larger images": (["--arch", "vgg11"], "--arch vgg11: cannot take"),
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
        "--data imagefolder: [Errno 2] No such file or directory: '{tmp}/train'",
    ),
}
WRONG_WITH_TEXT = {
    "no text": (["--text-file", "{tmp}/none.txt"], "--text-file: there is no file"),
    "a text without a window to validate on": (
        ["--text-file", "{tmp}/short.txt", "--batch-size", "1"],
        "--text-file: {tmp}/short.txt: 300 bytes are too few for windows of",
    ),
    "half a head": (["--heads", "1.5"], "--heads: '1.5' is not an integer"),
    "heads that do not divide the width": (
        ["--width", "64", "--heads", "5"],
        "--width 64 must be divisible by --heads (5)",
    ),
    "a flag for images": (["--data", "digits"], "--data digits"),
}
# One that the parser sees, one that the data does, and one that the model does.
OF_EVERY_STAGE = ("no epochs", "a directory without the data", "a truncated file")
FEW = [(BY_TORCHRUN, what) for what in OF_EVERY_STAGE]
FEW += [(BY_SPAWN, OF_EVERY_STAGE[1])]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with weights of another model, also truncated, and a text file."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({"weight": torch.zeros(1000)}, folder / "other.pt")
    (folder / "half.pt").write_bytes((folder / "other.pt").read_bytes()[:2000])
    (folder / "text.pt").write_text("not a file of weights")
    (folder / "link").symlink_to(folder / "nowhere")
    (folder / "other").mkdir()
    row = '{"epoch": 1, "train": {}, "val": {}}'
    (folder / "other/metrics.jsonl").write_text(f"{row}\n{row[:-3]}")
    (folder / "short.txt").write_bytes(b"0123456789" * 30)
    return folder


def wrong(stage):
    """Return what can be wrong in a stage's flags, and what the line must say."""
    return WRONG | (WRONG_WITH_TEXT if "text" in features(stage) else WRONG_WITH_IMAGES)


@pytest.mark.fault(
    what="a flag is wrong, or a file or directory is missing, truncated or of the wrong"
    " kind",
    sees="one line that names the flag, `train.py: error: ...`; exit code 2 (under"
    " torchrun the line of every rank that sees it, and torchrun's exit code 1)",
    lost="nothing; no file is touched",
)
@pytest.mark.parametrize(
    "stage, what",
    [
        *((first_with("images"), what) for what in WRONG | WRONG_WITH_IMAGES),
        *((first_with("text"), what) for what in WRONG_WITH_TEXT),
        *(
            only_in_release(stage, what, unless=(stage, what) in FEW)
            for stage in stages()[1:]
            for what in OF_EVERY_STAGE
            if what in wrong(stage)
        ),
    ],
)
def test_one_line_and_exit_code_2(stage, what, files, tmp_path, several, device, fault):
    """From each rank that finds it: all do, except that mp.spawn ends the others."""
    flags, named = wrong(stage)[what]
    flags, named = [flag.format(tmp=files) for flag in flags], named.format(tmp=files)
    if "--out-dir" not in flags:
        flags += ["--out-dir", tmp_path / "out"]
    before = sorted(files.rglob("*"))
    processes = several if "distributed" in features(stage) else 1
    flags += ["--device", device]
    done = run_stage(stage, processes, flags, tmp_path / "run", code=2)
    if "spawn" in features(stage):  # all print into one file, if they get so far
        done.ranks[0].stderr = "\n".join({*done.stderr.splitlines()})
    else:
        assert len(done.ranks) == processes
    for rank in done.ranks:
        assert_one_error_line(rank, named)
    fault.assert_seen(done.stderr)
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()
    assert sorted(files.rglob("*")) == before


def test_a_directory_on_a_disk_that_is_full(tmp_path):
    """It is found before the training, and not after the first epoch."""
    flags, stage = ["--out-dir", tmp_path / "out"], first_with("images")
    full = functools.partial(no_large_files, 1000, ranks=[None])
    done = run_stage(stage, 1, flags, tmp_path / "run", code=2, prepare=full)
    assert_one_error_line(done, f"--out-dir: {tmp_path}/out is not writable (File too")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="--device cuda is right here")
@pytest.mark.parametrize("stage", [BY_TORCHRUN, BY_SPAWN])
def test_cuda_without_a_gpu(stage, tmp_path):
    done = run_stage(stage, 1, ["--device", "cuda"], tmp_path, code=2)
    assert_one_error_line(done, "--device cuda: no GPU is visible; use --device cpu")


# ---- launchers -----------------------------------------------------------------------
VARIABLES = [
    ({"RANK": None}, "RANK is not set; a launcher sets it: start with "),
    ({"RANK": "one"}, "RANK is 'one', not a number"),
    ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
    ({"LOCAL_RANK": "1"}, "RANK=0 WORLD_SIZE=1 LOCAL_RANK=1 contradict each other"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR is not set, or MASTER_PORT is not a port"),
    ({"MASTER_PORT": "65536"}, "MASTER_ADDR is not set, or MASTER_PORT is not a port"),
]


@pytest.mark.fault(
    since="torchrun",
    what="a launcher's variables are missing or contradict each other; a stage is"
    " started with python instead of its launcher",
    sees="one line, `train.py: error: ...`, that names the variable and, if it is"
    " missing, the command that sets it; exit code 2",
    lost="nothing",
)
@pytest.mark.parametrize(
    "stage, variables, named",
    [
        *((BY_TORCHRUN, *case) for case in VARIABLES),
        # from here on, srun's variables are taken, too
        *((first_with("slurm"), *case) for case in VARIABLES[:2]),
    ],
)
def test_a_launchers_variables(stage, variables, named, tmp_path, fault):
    done = run_stage(stage, 1, [], tmp_path, code=2, **variables)
    assert_one_error_line(done, named)
    fault.assert_seen(done.stderr)
    if "is not set" in named and "or MASTER_PORT" not in named:
        assert "torchrun --standalone" in done.stderr


@pytest.mark.fault(
    since="torchrun",
    what="another program listens on the port that a launcher chose",
    sees="torch's traceback, which ends in `EADDRINUSE`; exit code 1",
    lost="nothing",
)
def test_a_port_in_use(tmp_path, fault):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_stage(BY_TORCHRUN, 1, [], tmp_path, code=1, MASTER_PORT=port)
    fault.assert_seen(done.stderr)


@pytest.mark.parametrize("stage", [BY_TORCHRUN, only_in_release(BY_SPAWN)])
def test_a_batch_that_the_processes_cannot_divide(stage, tmp_path):
    """Each rank that gets so far reports it; mp.spawn ends the others when one ends."""
    flags = ["--batch-size", "61", "--device", "cpu"]
    done = run_stage(stage, 2, flags, tmp_path, code=2)
    named = "--batch-size 61 is the global batch: it must be divisible by the number"
    line = f"train.py: error: {named} of processes (2); try 60"
    for one in done.ranks:
        assert line in one.stderr.splitlines()
        assert "Traceback" not in one.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "stage, code", [(BY_TORCHRUN, 1), only_in_release(BY_SPAWN, 2)]
)
def test_an_error_that_only_the_ranks_can_see(stage, code, files, tmp_path):
    """torchrun ends with a code of its own, and its report stands below our line."""
    flags = ["--data", "cifar10", "--data-dir", files, "--device", "cpu"]
    done = run_stage(stage, 2, flags, tmp_path, code=code, forks=False)
    lines = done.stderr.splitlines()
    ours = [line for line in lines if line.startswith("train.py: error: ")]
    assert len(ours) == 2  # each rank looks when it is its turn
    assert ours[0] == ours[1] and "--data cifar10" in ours[0]
    assert "Traceback" not in done.stderr.rpartition(ours[0])[0]
