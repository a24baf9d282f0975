"""The commands for whoever carries on, and what the README promises."""

import re
import shutil
import subprocess
import sys

from tests.harness import run
from tools import fault_table
from tools import picture
from tools import propagate
from tools.stages import ROOT
from tools.stages import changed_lines
from tools.stages import shown_commands
from tools.stages import stages

import pytest
from PIL import Image

STAGES = stages()


@pytest.fixture
def chain(tmp_path):
    """A repository with the stages' scripts, committed."""
    for stage in STAGES:
        (tmp_path / stage).mkdir()
        shutil.copy(ROOT / stage / "train.py", tmp_path / stage)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "as it is"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_propagate_carries_an_edit_to_every_later_stage(chain):
    edit = ("momentum=0.9,", "momentum=0.8,")
    replace(chain / STAGES[0] / "train.py", *edit)
    assert propagate.main(chain) == 0
    for stage in STAGES:
        assert (chain / stage / "train.py").read_text() == (
            ROOT / stage / "train.py"
        ).read_text().replace(*edit)
    assert propagate.main(chain) == 0  # a second time changes nothing
    assert (chain / STAGES[-1] / "train.py").read_text().count(edit[1]) == 1


def test_propagate_stops_at_a_conflict(chain, capfd):
    replace(chain / STAGES[0] / "train.py", "device = flags.nth_device(args, 0)", "device = None")
    assert propagate.main(chain) == 2
    assert "02_dataparallel/train.py -> 03_ddp_launch/train.py" in capfd.readouterr().err
    assert "<<<<<<<" in (chain / "03_ddp_launch/train.py").read_text()
    assert "device = None" in (chain / "02_dataparallel/train.py").read_text()
    untouched = (ROOT / "04_ddp_spawn/train.py").read_text()
    assert (chain / "04_ddp_spawn/train.py").read_text() == untouched
    assert propagate.main(chain) == 2  # it does not carry the conflict on


def test_make_diff_shows_a_step():
    done = subprocess.run(
        ["make", "diff", "A=02", "B=03"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "+    loader.sampler.set_epoch(epoch)" in done.stdout


def test_the_demo_ends_with_a_table(tmp_path):
    done = run([sys.executable, str(ROOT / "tools/demo.py"), "01_single_gpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    titles, row = done.stdout.splitlines()[-5:-3]
    assert titles.split()[:4] == ["stage", "launch", "processes", "device"]
    name, launch, processes, *figures, distance = row.split()
    assert (name, launch, processes, distance) == ("01_single_gpu", "python", "1", "0.0e+00")
    assert float(figures[3]) >= 95  # acc@1
    assert "epoch 5: " in done.stdout


def test_the_demo_knows_its_stages(tmp_path):
    done = run([sys.executable, str(ROOT / "tools/demo.py"), "01"], tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "01_single_gpu" in done.stderr


def test_the_table_in_the_readme_is_true():
    text = (ROOT / "README.md").read_text()
    for before, stage in zip([None, *STAGES], STAGES, strict=False):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| [{stage[:2]}]")]
        assert f"({stage}/{stage}.ipynb)" in row
        assert f"`{shown_commands(stage)[0]}`" in row
        lines = str(changed_lines(before, stage)) if before else ""
        assert row.split("|")[-2].strip() == lines


def test_the_picture_shows_the_stages_as_they_are():
    with Image.open(picture.PICTURE) as stored:
        assert stored.text["Description"] == picture.description()
    assert len(picture.TEACHES) == len(STAGES)


def test_the_page_of_faults_is_what_the_tests_say():
    rows = fault_table.faults()
    assert len(rows) >= 20
    assert fault_table.PAGE.read_text() == fault_table.page()
    for row in rows:  # a test that does not take the mark's words and seconds could say anything
        assert "fault" in row["takes"], row["test"]
    named = " ".join(row["stages"] for row in rows)
    assert {int(number) for number in re.findall(r"\d\d", named)} >= {1, 3, 6, 9}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_only_what_is_there(page):
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
