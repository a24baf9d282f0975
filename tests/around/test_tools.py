"""`make propagate` carries an edit on, and the pages that are generated are not stale.

And what README.md says of `make demo`, and CONTRIBUTING.md of `make gpu`.
"""

import re
import subprocess

import pytest

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import stages
from tests.conftest import only_in_ci
from tests.conftest import only_in_release
from tests.training import replace_once
from tools import fault_table
from tools import gpu
from tools import pages
from tools import picture
from tools.propagate import propagate

# ---- make propagate ------------------------------------------------------------------
# 03 and 04 build on 02, and 05 on 03.
TREE = {"01_a": "", "02_b": "01_a", "03_c": "02_b", "04_d": "02_b", "05_e": "03_c"}
SCRIPT = "one = 1\n\n\n\n# words\ntwo = 2\n\n\n\nthree = 3\n"


@pytest.fixture
def tree(tmp_path):
    """A repository with five stages, committed. From 03_c on, `three` is different."""
    entries = []
    for name, before in TREE.items():
        changed = ("three = 3", "three = 33") if name in ("03_c", "05_e") else ("", "")
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT.replace(*changed))
        base = f'builds_on = "{before}"\n' if before else ""
        rest = 'teaches = ""\ncommand = ""\nfeatures = []\n'
        entries.append(f'[[stage]]\nname = "{name}"\n{base}{rest}')
    (tmp_path / "stages.toml").write_text("\n".join(entries))
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    commit = [*who, "commit", "-qm", "as it is"]
    for arguments in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return {name: tmp_path / name / "train.py" for name in TREE}


def test_propagate_carries_an_edit_to_all_stages_that_build_on_it(tree, tmp_path):
    replace_once(tree["01_a"], ("one = 1", "one = 11"), ("# words", "# other words"))
    replace_once(tree["03_c"], ("two = 2", "two = 22"))
    for _ in range(2):  # the second time changes nothing
        propagate(tmp_path)
        for name, script in tree.items():
            assert "one = 11\n" in script.read_text()
            assert "# other words\n" in script.read_text()
            assert ("two = 22\n" in script.read_text()) == (name in ("03_c", "05_e"))


def test_propagate_leaves_the_branch_of_a_conflict_and_continues(tree, tmp_path, capfd):
    replace_once(tree["01_a"], ("three = 3", "three = 4"), ("one = 1", "one = 11"))
    untouched = tree["05_e"].read_text()
    for said in ("make propagate FROM=03_c", "03_c/train.py contains conflict markers"):
        with pytest.raises(SystemExit, match="2"):
            propagate(tmp_path)
        assert said in capfd.readouterr().err
        assert "<<<<<<<" in tree["03_c"].read_text()
        assert tree["04_d"].read_text() == tree["01_a"].read_text()
        assert tree["05_e"].read_text() == untouched
    tree["03_c"].write_text(untouched.replace("one = 1", "one = 11"))
    propagate(tmp_path, "03_c")
    assert tree["05_e"].read_text() == tree["03_c"].read_text()


# ---- what `make update` writes -------------------------------------------------------
@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.name)
def test_a_page_is_as_stages_toml_and_the_tests_say(path):
    assert path.read_text() == pages.pages()[path], "stale: type `make update`"


def test_the_pictures_of_docs_are_as_they_are_drawn_now():
    found = dict(picture.of_docs())
    assert found.keys() == {*(ROOT / "docs").glob("*.png")}
    for path, now in found.items():
        stored = path.read_bytes()
        if picture.version(stored) == picture.version(now):
            assert picture.newer(stored, now) == stored, f"{path.name}: `make update`"


def test_the_tests_of_the_faults_check_what_the_page_says():
    rows = fault_table.faults()
    assert len(rows) >= 20
    for row in rows:  # otherwise the test does not check the mark's words
        assert "fault" in row["takes"], row["test"]


def test_what_an_assistant_reads_exists():
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "llms.txt").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


# ---- make ----------------------------------------------------------------------------
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_only_targets_of_make(page):
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.M)
    assert named
    for target in named:
        assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.M), target


@pytest.mark.parametrize(
    "wanted",
    [only_in_ci(first_with("images")), only_in_release("")],
)
def test_the_demo_ends_with_a_table_of_equal_weights(wanted):
    """Of a stage, or of all: each trains the weights of one process."""
    done = commands.run(f"python -m tools.demo {wanted}", seconds=600)
    _, *rows = done.stdout.rpartition("\nstage ")[2].split("\n\n")[0].splitlines()
    assert rows[-1].split()[0] == (wanted or stages()[-1])
    differences = [float(row.split()[-1]) for row in rows]
    assert differences[0] == 0 and max(differences) <= 1e-11
    assert float(rows[-1].split()[6]) >= (95 if wanted else 25)


def test_make_gpu_names_what_exists(tmp_path):
    """What it runs can only be seen on a machine with a GPU."""
    known = gpu.parts(tmp_path)
    text = "\n".join(command for part in known.values() for command in part)
    files = {*re.findall(r"[\w/.]+\.py", text)}
    folders = (ROOT, ROOT / "your_own_script")
    missing = [file for file in files if not any((f / file).is_file() for f in folders)]
    assert missing == [] and len(files) > 40
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    for name in gpu.SEVERAL.split(" or "):
        assert re.search(rf"^def test_\w*{name}", tests, re.M), name
