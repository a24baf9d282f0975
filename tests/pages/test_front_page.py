"""README.md, check_yours/README.md, docs/running.md: what they show runs as typed."""

import re
import shutil

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor import zeros

from harness import commands
from harness.stages import ROOT
from harness.stages import stages
from tests.conftest import only_in_release
from tests.training import losses
from tests.training import replace_once

README = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()
FOLDER = ROOT / "your_own_script"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
(DIFF,) = [text for kind, text in BLOCK.findall(README) if kind == "diff"]
(TRY,) = [text for kind, text in BLOCK.findall(README) if kind == "bash"]


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


def test_the_chinese_front_page_names_every_stage_and_no_file_that_is_not_there():
    text = (ROOT / "README.zh-CN.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert {f"{stage}/{stage}.ipynb" for stage in stages()} <= {*links}
    assert [link for link in links if not (ROOT / link).exists()] == []


# As many as common machines have GPUs.
@pytest.mark.ci
@pytest.mark.parametrize(
    "processes", [only_in_release(n, unless=n == 2) for n in (1, 2, 4, 8)]
)
def test_the_commands_to_try_work_on_so_many_processes(processes, tmp_path):
    install, enter, *typed = TRY.splitlines()
    assert (install, enter) == ("pip install torch", "cd your_own_script")
    alone, several, _ = typed
    assert alone.startswith("python ") and several.startswith("torchrun ")
    several = several.replace("per-node=2", f"per-node={processes}")
    (tmp_path / "work").mkdir()
    for command in (alone, several):
        words = [FOLDER / w if w.endswith(".py") else w for w in command.split()]
        where = {"cwd": tmp_path / "work", "CUDA_VISIBLE_DEVICES": ""}
        done = commands.run(words, tmp_path / "out", forks=True, **where)
        first, *_, last = losses(done.stdout)
        assert last < 0.5 * first


def rounded(text):
    """Return what check_yours prints, without sizes and places of differences."""
    text = re.sub(r"(equal: .*) \d\.\de-1[3-9], in .*", r"\1", text)
    return re.sub(r"(differ: .*) \d\.\de-\d+, in .*", r"\1", text)


@pytest.mark.ci
def test_the_check_prints_what_both_pages_show(tmp_path):
    """In a copy of its folder, where there is nothing but torch: not even NumPy."""
    shutil.copytree(ROOT / "check_yours", tmp_path / "check_yours")
    (tmp_path / "mine").mkdir()
    script = tmp_path / "mine/after.py"
    shutil.copy(FOLDER / "after.py", script)
    (tmp_path / "none").mkdir()
    (tmp_path / "none/numpy.py").write_text("raise ModuleNotFoundError('numpy')")
    where = {"cwd": tmp_path / "mine", "PYTHONPATH": tmp_path / "none"}
    (command,) = re.findall(r"^python \.\./check_yours .*$", TRY, re.MULTILINE)
    printed = commands.run(command, **where).stdout
    replace_once(script, ("train_one_epoch(ddp_model", "train_one_epoch(model"))
    broken = command.replace("check_yours ", "check_yours --processes=1,2 ")
    printed += commands.run(broken, code=1, **where).stdout
    page = (ROOT / "check_yours/README.md").read_text()
    assert f"\n$ {command}\n" in page
    for text in (README, page):
        shown = re.findall(r"^(?:1|2) process.*?(?=\.\.\.|```)", text, re.M | re.S)
        assert len(shown) == 2
        assert all(rounded(each) in rounded(printed) for each in shown), printed


# ---- docs/running.md -----------------------------------------------------------------
(BUCKET,) = [code for kind, code in BLOCK.findall(RUNNING) if "url_to_fs" in code]


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
    assert BUCKET.count('"s3://my-bucket/run-7"') == 1
    code = BUCKET.replace(
        '"s3://my-bucket/run-7"', repr(f"{scheme}://{tmp_path}/run-7")
    )
    store = tmp_path / "store"
    calls = [(code, rank, processes, store) for rank in range(processes)]
    commands.call_in_forks(use_bucket, calls)
