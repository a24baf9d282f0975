"""README.md and docs/running.md: what they show is in the files, and runs as typed."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor import zeros

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import losses

README = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()
FOLDER = ROOT / "your_own_script"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
(DIFF,) = [text for kind, text in BLOCK.findall(README) if kind == "diff"]
(TRY,) = [text for kind, text in BLOCK.findall(README) if kind == "bash"]
(CHECKED,) = re.findall(r"^```\n(1 process .*?)```", README, re.MULTILINE | re.DOTALL)
(STAGE, TWO_MACHINES, UV) = [
    text for kind, text in BLOCK.findall(RUNNING) if kind == "bash"
]
# As many as common machines have GPUs.
PROCESSES = [only_in_release(n, unless=n in (2, 4)) for n in (1, 2, 4, 8)]


def code(path):
    """Return the lines of a script, without indentation and comments."""
    return {line.partition("  #")[0].strip() for line in path.read_text().splitlines()}


def test_the_diff_shows_lines_of_both_scripts():
    before, after = code(FOLDER / "before.py"), code(FOLDER / "after.py")
    lines = DIFF.splitlines()
    assert {line[0] for line in lines} == {"+", "-", " "}
    for line in lines:
        shown = line[1:].strip()
        assert shown in after or line[0] == "-", line
        assert shown in before or line[0] == "+", line


@pytest.mark.parametrize("processes", PROCESSES)
def test_the_commands_to_try_work_on_so_many_processes(processes, tmp_path):
    install, enter, *typed = TRY.splitlines()
    assert (install, enter) == ("pip install torch", "cd your_own_script")
    alone, several, check = typed
    assert alone.startswith("python ") and several.startswith("torchrun ")
    several = several.replace("per-node=2", f"per-node={processes}")
    (tmp_path / "work").mkdir()
    for command in (alone, several):
        words = [FOLDER / w if w.endswith(".py") else w for w in command.split()]
        where = {"cwd": tmp_path / "work", "CUDA_VISIBLE_DEVICES": ""}
        done = commands.run(words, tmp_path / "out", forks=True, **where)
        first, *_, last = losses(done.stdout)
        assert last < 0.5 * first
    if processes == 2:  # the command checks on numbers of its own
        words = [FOLDER / w if w.endswith(".py") else w for w in check.split()]
        printed = commands.run(words, tmp_path / "out", **where).stdout
        assert rounded(printed).startswith(rounded(CHECKED))


def rounded(text):
    """Return what check_yours.py prints, without sizes of rounding, and where."""
    return re.sub(r"difference \d\.\de-1[3-9], in .*", "difference", text)


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_stage_starts_on_so_many_processes(processes, tmp_path):
    """With the default batch size, which all of these numbers divide."""
    command = STAGE.strip().replace("per-node=2", f"per-node={processes}")
    flags = "--device cpu --epochs 2"
    done = commands.run(f"{command} {flags}", tmp_path, forks=True)
    first, *_, last = losses(done.stdout)
    assert last < 0.5 * first
    assert f"{processes} processes on gloo\n" in done.stdout


@pytest.mark.release
def test_two_launchers_find_each_other(tmp_path):
    """The command for two machines, started twice on this one."""
    endpoint = f"127.0.0.1:{commands.free_port()}"
    command = TWO_MACHINES.replace("\\\n", " ").replace("FIRST:29500", endpoint)
    command = command.replace("per-node=4", "per-node=2") + " --device cpu --epochs 1"
    with (
        commands.start(command, tmp_path / "a", cwd=ROOT) as one,
        commands.start(command, tmp_path / "b", cwd=ROOT) as other,
    ):
        done = one.wait(), other.wait()
    assert [each.returncode for each in done] == [0, 0], done
    printed = "".join(each.stdout for each in done)
    assert "4 processes on gloo\n" in printed and len(losses(printed)) == 2


# ---- uv, rented machines, buckets ----------------------------------------------------
def code_with(kind, text):
    """Return the block of docs/running.md that has a text."""
    blocks = [each for name, each in BLOCK.findall(RUNNING) if name == kind]
    (block,) = [each for each in blocks if text in each]
    return block


def test_uv_installs_what_the_page_names_and_starts_the_stage():
    (packages,) = re.findall(r"pip install (torch .*)`", RUNNING)
    words = shlex.split(UV.replace("\\\n", ""))
    assert words[words.index("--with") + 1].split(",") == packages.split()
    assert words[words.index("torchrun") :] == shlex.split(STAGE)


def use_bucket(code, rank, world_size, store):
    """Be a rank that saves two steps; the lines that load must give the second."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for step in (9, 10):
        weights = distribute_tensor(torch.full((6,), float(step)), mesh)
        names = {"state": {"weights": weights}, "step": step}
        exec(code, names)
    # Of a third save, which was killed before it wrote .metadata.
    names["bucket"].makedirs(f"{names['path']}/step-00000011", exist_ok=True)
    names["bucket"].touch(f"{names['path']}/step-00000011/__0_0.distcp")
    names["state"] = {"weights": zeros(6, device_mesh=mesh)}
    exec("".join(line for line in code.splitlines(True) if "save(" not in line), names)
    assert names["state"]["weights"].full_tensor().tolist() == [10] * 6
    dist.destroy_process_group()


@pytest.mark.parametrize("scheme, processes", [("memory", 1), ("file", 2)])
def test_a_checkpoint_in_a_bucket(scheme, processes, tmp_path):
    code, run = code_with("python", "url_to_fs"), f"{scheme}://{tmp_path}/run-7"
    assert code.count('"s3://my-bucket/run-7"') == 1
    code = code.replace('"s3://my-bucket/run-7"', repr(run))
    store = tmp_path / "store"
    calls = [(code, rank, processes, store) for rank in range(processes)]
    commands.call_in_forks(use_bucket, calls)


def test_a_path_is_not_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"weights": torch.ones(1)}
    dcp.save(state, checkpoint_id=Path("s3://my-bucket/run-7"), no_dist=True)
    assert (tmp_path / "s3:/my-bucket/run-7/.metadata").exists()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(ImportError, match="^Install s3fs to access S3$"):
            dcp.save(state, checkpoint_id="s3://my-bucket/run-7", no_dist=True)
