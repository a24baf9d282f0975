"""The tools for contributors, and what the README promises."""

import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from tests.harness import replace_once
from tests.harness import run
from tools import fault_table
from tools import gpu
from tools import missing
from tools import picture
from tools import stages as counting
from tools.propagate import propagate
from tools.stages import ROOT
from tools.stages import changed_lines
from tools.stages import first_used_lines
from tools.stages import plain_command
from tools.stages import shown_commands
from tools.stages import stages

STAGES = stages()


# ---- tools/stages.py -----------------------------------------------------------------
def test_docstrings_and_help_texts_are_not_counted():
    source = '''"""A module.

Its docstring.
"""

# a comment
add("--one", type=int, help="on the line of others")
add(
    "--two",
    help="on its own line",
)
add(
    "--three",
    help="on two"
    " lines",
)
add("--four", help="begins beside others"
    " and ends beside a bracket")
'''
    assert counting.counted_lines(source) == [5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18]


def written_chain(folder, monkeypatch, *scripts, **modules):
    """Write a chain of scripts and a common/ of modules, and have them counted."""
    for number, text in enumerate(scripts, 1):
        (folder / f"0{number}_x").mkdir()
        (folder / f"0{number}_x/train.py").write_text(text)
    (folder / "common").mkdir()
    for name, text in modules.items():
        (folder / f"common/{name}.py").write_text(text)
    monkeypatch.setattr(counting, "ROOT", folder)
    monkeypatch.setattr(counting, "stages", lambda: stages(folder))
    return stages(folder)


def test_changed_lines_are_counted_as_difflib_does(tmp_path, monkeypatch):
    before = '"""One."""\na = 1\nb = 2\nc = 3\n'
    after = '"""Two,\nlonger."""\na = 1\nb = 4\nc = 3\n\nd = 5\n'
    names = written_chain(tmp_path, monkeypatch, before, after)
    assert changed_lines(*names) == 4  # - b, + b, + a blank line, + d


def test_lines_of_common_count_when_they_are_first_used(tmp_path, monkeypatch):
    one = "from common import m\n\nm.used()\n"
    two = "from common.m import late\nfrom common import m\n\nm.used(), late()\n"
    module = '''"""A docstring, not counted."""

from common.n import helper

CONSTANT = 1


def used():
    return helper(CONSTANT)


def late():
    """Two lines."""
    return used()


def never():
    return 0
'''
    other = "def helper(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x\n"
    names = written_chain(tmp_path, monkeypatch, one, two, two, m=module, n=other)
    # the import and the constant, used(), and helper() and inner() behind it
    assert [first_used_lines(name) for name in names] == [2 + 2 + 4, 3, 0]


# ---- make propagate ------------------------------------------------------------------
# Of a line that all stages have.
EDIT = ("cuda.matmul.allow_tf32 = args.tf32", "cuda.matmul.allow_tf32 = True")


@pytest.fixture
def chain(tmp_path):
    """A repository with the stages' scripts, committed."""
    for stage in STAGES:
        (tmp_path / stage).mkdir()
        shutil.copy(ROOT / stage / "train.py", tmp_path / stage)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    commit = [*who, "commit", "-qm", "as it is"]
    for arguments in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


def test_propagate_carries_an_edit_to_every_later_stage(chain):
    replace_once(chain / STAGES[0] / "train.py", EDIT)
    propagate(chain, STAGES[0])
    for stage in STAGES:
        ours = (ROOT / stage / "train.py").read_text()
        assert (chain / stage / "train.py").read_text() == ours.replace(*EDIT)
    propagate(chain, STAGES[0])  # a second time changes nothing
    assert (chain / STAGES[-1] / "train.py").read_text().count(EDIT[1]) == 1


def test_propagate_stops_at_a_conflict_and_continues_after_it(chain, capfd):
    conflict, later = ("local_rank = 0", "local_rank = 1"), EDIT
    for edit in (conflict, later):
        replace_once(chain / STAGES[0] / "train.py", edit)
    with pytest.raises(SystemExit, match="2"):
        propagate(chain, STAGES[0])
    assert "FROM=03_ddp_launch" in capfd.readouterr().err
    scripts = [chain / stage / "train.py" for stage in STAGES]
    assert conflict[1] in scripts[1].read_text()
    stopped = scripts[2].read_text()
    assert "<<<<<<<" in stopped
    assert scripts[3].read_text() == (ROOT / STAGES[3] / "train.py").read_text()
    with pytest.raises(SystemExit, match="2"):
        propagate(chain, STAGES[0])
    assert "conflict markers" in capfd.readouterr().err
    assert scripts[2].read_text() == stopped
    ours = (ROOT / STAGES[2] / "train.py").read_text()
    scripts[2].write_text(ours.replace(*later))
    propagate(chain, STAGES[2])
    for stage, script in list(zip(STAGES, scripts, strict=True))[3:]:
        ours = (ROOT / stage / "train.py").read_text()
        assert script.read_text() == ours.replace(*later)


def test_make_diff_shows_a_step():
    diff = ["make", "diff", "A=02", "B=03"]
    done = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "+    loader.sampler.set_epoch(epoch)" in done.stdout


# ---- make demo -----------------------------------------------------------------------
def test_the_demo_ends_with_a_table(tmp_path):
    demo = [sys.executable, "-m", "tools.demo", "01_single_gpu"]
    done = run(demo, tmp_path)
    assert done.returncode == 0, done.stderr
    titles, row = done.stdout.splitlines()[-7:-5]
    assert titles.split()[:4] == ["stage", "launch", "processes", "device"]
    name, launch, processes, *metrics, difference = row.split()
    assert (name, launch, processes) == ("01_single_gpu", "python", "1")
    assert difference == "0.0e+00"
    assert float(metrics[3]) >= 95  # acc@1
    assert done.stdout.count("epoch 5: ") == 1


def test_a_command_is_shown_for_the_number_of_processes_that_it_starts():
    """make demo trains a language model twice, on one process and on two."""
    started = "torchrun --standalone --nproc-per-node=1 11_gpt/train.py"
    assert plain_command("11_gpt", 1) == started
    assert plain_command("04_ddp_spawn", 3) == "python 04_ddp_spawn/train.py --nproc=3"
    assert plain_command("01_single_gpu", 1) == shown_commands("01_single_gpu")[-1]


def test_the_demo_knows_its_stages(tmp_path):
    done = run([sys.executable, "-m", "tools.demo", "01"], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("demo.py: error: ") and "01_single_gpu" in line


# ---- the pages -----------------------------------------------------------------------
def test_the_table_in_the_readme_is_true():
    lines = (ROOT / "README.md").read_text().splitlines()
    for before, stage in zip([None, *STAGES], STAGES, strict=False):
        start = f"| [{stage[:2]}]({stage}/{stage}.ipynb) |"
        (row,) = [line for line in lines if line.startswith(start)]
        assert f"`{shown_commands(stage)[0]}`" in row
        *_, changed, first_used, _ = (cell.strip() for cell in row.split("|"))
        assert changed == (str(changed_lines(before, stage)) if before else "")
        assert first_used == str(first_used_lines(stage))


def test_the_picture_shows_the_stages_as_they_are():
    with Image.open(picture.PICTURE) as stored:
        assert stored.text["Description"] == picture.description()
    assert list(picture.TEACHES) == [stage[:2] for stage in STAGES]


def test_the_page_of_faults_is_what_the_tests_say():
    rows = fault_table.faults()
    assert len(rows) >= 20
    assert fault_table.PAGE.read_text() == fault_table.page()
    for row in rows:  # otherwise the test does not check the mark's words and seconds
        assert "fault" in row["takes"], row["test"]
    named = " ".join(row["stages"] for row in rows)
    assert {int(number) for number in re.findall(r"\d\d", named)} >= {1, 3, 6, 9, 10}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_only_what_exists(page):
    text = (ROOT / page).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)
    assert commands
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


# ---- tools/missing.py ----------------------------------------------------------------
def test_what_is_missing_or_too_old_is_named(monkeypatch, capsys):
    versions = {"torch": "2.9.1+cu128", "numpy": "1.26"}

    def version(name):
        if name in versions:
            return versions[name]
        raise missing.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(missing.metadata, "version", version)
    assert missing.missing(["torch", "numpy", "tqdm"]) == ["torch>=2.11", "tqdm>=4.66"]
    assert len(missing.missing()) > 10
    monkeypatch.setattr(sys, "argv", ["missing.py", "torch"])
    with pytest.raises(SystemExit, match="^2$"):
        missing.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("lacks packages; type: pip install 'torch>=2.11'")
    versions["torch"] = "2.11"
    missing.main()


def test_a_python_of_ones_own_is_used_as_it_is():
    """`make demo PY=...` checks what it needs and installs nothing."""
    dry_run = ["make", "--no-print-directory", "-n", "demo", f"PY={sys.executable}"]
    done = subprocess.run(dry_run, cwd=ROOT, check=True, capture_output=True, text=True)
    names = "torch torchvision numpy tqdm matplotlib psutil"
    assert done.stdout.splitlines() == [
        f"{sys.executable} -m tools.missing {names}",
        f"{sys.executable} -m tools.demo",
    ]


# ---- tools/gpu.py --------------------------------------------------------------------
@pytest.mark.sweep
def test_every_part_of_the_gpu_half_runs(tmp_path):
    """On the CPU, with little work; stage 01 is trained twice, to equal weights."""
    command = [sys.executable, "-m", "tools.gpu", "--dry-run", "--out-dir", tmp_path]
    (tmp_path / "screen").mkdir()
    done = run(command, tmp_path / "screen", seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in gpu.PARTS:
        text = (tmp_path / f"{part}.txt").read_text()
        assert f"{part}: ended as it should" in text and text in done.stdout
    trained = (tmp_path / "stages.txt").read_text()
    rows = [line.split() for line in trained.splitlines()[1:4]]
    assert [row[0] for row in rows] == [STAGES[0], STAGES[0], STAGES[-1]]
    assert rows[1][1:4] == ["float32", "again", "0"] and float(rows[1][-1]) == 0
    assert rows[2][1:3] == ["fp16", "0"]
    for part, files in gpu.TESTS.items():
        assert re.search(
            "^[1-9][0-9]* passed", (tmp_path / f"{part}.txt").read_text(), re.M
        )
        assert all((ROOT / f"tests/test_{name}.py").exists() for name in files)
    probed = (tmp_path / "probe.txt").read_text()
    assert "failed" not in probed and "left out" not in probed


@pytest.mark.parametrize(
    "words, named", [(["smoke"], "no part smoke"), ([], "no GPU is visible")]
)
def test_what_the_gpu_half_cannot_do(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    out_dir = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--out-dir", str(out_dir)])
    with pytest.raises(SystemExit, match="^2$"):
        gpu.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu.py: error: ") and named in line
    assert not out_dir.exists()
