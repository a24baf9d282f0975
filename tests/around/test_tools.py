"""The commands of `make` do what they say, and the pages they write are not stale."""

import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
from packaging.requirements import Requirement

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import notebooks
from harness.stages import stages
from harness.stages import steps
from harness.stages import with_feature
from tests.conftest import only_in_ci
from tests.conftest import only_in_release
from tests.training import imported_by
from tests.training import replace_once
from tools import demo
from tools import diff
from tools import fault_table
from tools import gpu
from tools import pages
from tools import picture
from tools import record_steps
from tools import stale
from tools import update
from tools.propagate import propagate
from tools.sizes import changed_lines


# ---- requirements*.txt ---------------------------------------------------------------
def imported_in(*patterns):
    """Return the names of modules that files import: programs, or notebooks' cells."""
    found = set()
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            codes = [each for each in cells if each["cell_type"] == "code"]
            text = "\n".join("".join(each["source"]) for each in codes)
        found |= imported_by(text)
    return found


def required(*files):
    """Return {package: what is required of it} of requirements files."""
    lines = "\n".join((ROOT / file).read_text() for file in files).splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    found = [Requirement(line) for line in lines if line]
    return {one.name.lower(): one for one in found}


def test_requirements_are_what_scripts_and_notebooks_import():
    """No more and no less; jupyter runs the notebooks; torchvision brings Pillow."""
    scripts = required("requirements.txt").keys() - {"psutil"}
    others = required("requirements-notebooks.txt").keys()
    assert len(scripts) >= 4 and len(others) >= 4
    programs = (*ROOT.glob("*/*.py"), *ROOT.glob("*/*/*.py"))
    ours = {path.stem for path in programs if ".venv" not in path.parts}
    ours |= {path.name for path in ROOT.iterdir()} | {"PIL", "IPython"}
    known = ours | sys.stdlib_module_names
    of_scripts = imported_in("common/*.py", "*/train.py") - known
    assert of_scripts == scripts
    demo = imported_in("harness/commands.py", "harness/weights.py", "tools/demo.py")
    assert demo - known - scripts == {"psutil"}
    readers = imported_in("*/*.ipynb", "*/demos/*.py", "*/figures.py", "nbtools/*.py")
    assert readers - known - scripts - {"psutil"} == others - {"jupyter"}


def test_the_lock_has_a_version_of_all_that_is_required():
    files = [*ROOT.glob("requirements*.txt"), ROOT / "tools/site/requirements.txt"]
    locked = required("requirements.lock")
    wanted = required(*files)
    assert len(files) == 4 and len(wanted) >= 25
    for name, requirement in wanted.items():
        (version,) = locked[name].specifier
        assert version.operator == "==", name
        assert version.version in requirement.specifier, name


# ---- harness/commands.py -------------------------------------------------------------
def test_a_rank_that_failed_before_one_waits_ends_the_others(tmp_path):
    """As under torchrun."""
    script = tmp_path / "script.py"
    fails = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\n"
    script.write_text(f"{fails}time.sleep({2 * commands.LIMIT})\n")
    words = ["torchrun", "--standalone", "--nproc-per-node=2", script]
    options = {"forks": True, "together": True}
    with commands.start(words, tmp_path / "printed", **options) as job:
        job.forks[1].join()
        done = job.wait()
    assert [rank.returncode for rank in done.ranks] == [-signal.SIGTERM, 3]
    assert done.returncode == 1


# ---- make sizes ----------------------------------------------------------------------
def test_changed_lines_are_those_of_a_diff():
    assert changed_lines(["a", "b", "c"], ["a", "B", "c", "", "d"]) == (3, 1)


def test_make_sizes_prints_every_stage_notebook_and_page():
    printed = commands.run("python -m tools.sizes").stdout
    rows = dict(line.split(maxsplit=1) for line in printed.splitlines() if line)
    assert {*stages(), "CONTRIBUTING.md"} <= {*rows}
    assert {str(path.relative_to(ROOT)) for path in notebooks()} <= {*rows}
    length = {stage: int(rows[stage].split()[0]) for stage in stages()}
    for before, after in steps():
        _, added, removed = map(int, rows[after].split())
        assert length[after] - length[before] == added - removed


# ---- make propagate, make diff -------------------------------------------------------
# 03 and 04 build on 02, and 05 on 03.
TREE = {"01_a": "", "02_b": "01_a", "03_c": "02_b", "04_d": "02_b", "05_e": "03_c"}
SCRIPT = "one = 1\n\n\n\ntwo = 2\n\n\n\nthree = 3\n"


@pytest.fixture
def tree(tmp_path):
    """A repository with five stages, committed. From 03_c on, `three` is different."""
    entries = []
    for name, before in TREE.items():
        (tmp_path / name).mkdir()
        changed = ("three = 3", "three = 33") if name in ("03_c", "05_e") else ("", "")
        (tmp_path / name / "train.py").write_text(SCRIPT.replace(*changed))
        base = f'builds_on = "{before}"\n' if before else ""
        texts = "".join(f'{key} = ""\n' for key in ("teaches", "teaches_zh", "command"))
        entries.append(f'[[stage]]\nname = "{name}"\n{base}{texts}features = []\n')
    (tmp_path / "stages.toml").write_text("\n".join(entries))
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    commit = [*who, "commit", "-qm", "as it is"]
    for arguments in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return {name: tmp_path / name / "train.py" for name in TREE}


def test_propagate_carries_an_edit_to_all_stages_that_build_on_it(tree, tmp_path):
    replace_once(tree["01_a"], ("one = 1", "one = 11"))
    replace_once(tree["03_c"], ("two = 2", "two = 22"))
    for _ in range(2):  # the second time changes nothing
        propagate(tmp_path)
        for name, script in tree.items():
            assert "one = 11\n" in script.read_text()
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
    resolved = untouched.replace("one = 1", "one = 11")
    tree["03_c"].write_text(resolved)
    propagate(tmp_path, "03_c")
    assert tree["05_e"].read_text() == resolved


def test_propagate_starts_from_a_stage_that_its_number_names(monkeypatch):
    started = []

    def start(*words):
        started.append(words)

    monkeypatch.setattr("tools.propagate.propagate", start)
    for stage in stages():
        monkeypatch.setattr(sys, "argv", ["propagate.py", stage[:2]])
        sys.modules["tools.propagate"].main()
    assert started == [(ROOT, stage) for stage in stages()]


def test_propagate_rewords_a_comment_whatever_stands_around_it(tree, tmp_path):
    """In 03_c, the lines above and below are different, which git calls a conflict."""
    old, new = "two = 2  # the old words", "two = 2  # the new words"
    replace_once(tree["01_a"], ("two = 2", old))
    for name in ("02_b", "04_d"):
        replace_once(tree[name], ("two = 2", old))
    for name in ("03_c", "05_e"):
        replace_once(tree[name], ("\n\ntwo = 2\n\n", f"\nx = 1\n{old}\ny = 1\n"))
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    words = ["git", *who, "commit", "-qam", "comments"]
    subprocess.run(words, cwd=tmp_path, check=True)
    replace_once(tree["01_a"], (old, new))
    propagate(tmp_path)
    assert all(new in script.read_text() for script in tree.values())
    for script in tree.values():  # code is never carried over in this way
        assert script.read_text().count("two = 2") == 1
    replace_once(tree["04_d"], (new, "two = 2  # words of its own"))
    subprocess.run(words, cwd=tmp_path, check=True)
    replace_once(tree["01_a"], (new, old))
    propagate(tmp_path)
    assert "two = 2  # words of its own" in tree["04_d"].read_text()
    assert old in tree["05_e"].read_text()
    subprocess.run(["git", "checkout", "-q", "."], cwd=tmp_path, check=True)
    replace_once(tree["02_b"], (new, "two = 22  # the new words"))
    with pytest.raises(SystemExit, match="2"):
        propagate(tmp_path, "02_b")
    assert "||||||| 02_b/train.py at HEAD" in tree["03_c"].read_text()


def test_make_diff_shows_what_each_stage_changes():
    command = "make --no-print-directory diff"
    shown = commands.run(command).stdout
    scripts = re.findall(r"^--- (\w+)/train\.py.*\n\+\+\+ (\w+)/train\.py", shown, re.M)
    assert scripts == steps()
    (before, after), *_ = steps()
    (one,) = re.findall(
        r"^\+\+\+ .*", commands.run(f"{command} B={after}").stdout, re.M
    )
    assert after in one
    assert commands.run(f"{command} A={after} B={after[:2]}").stdout == ""


def test_the_site_compares_any_two_stages_as_diff_does():
    found = diff.all_pairs()
    lines = {name: text.split("\n") for name, text in found["scripts"].items()}
    assert len(found["hunks"]) == len(stages()) * (len(stages()) - 1) // 2
    for pair, hunks in found["hunks"].items():
        before, after = pair.split()
        shown = []
        for old, new, signs in hunks:
            places = {"-": old - 1, "+": new - 1}
            shown.append(None)
            for sign in signs:
                side = "+" if sign == "+" else "-"
                script = lines[after if side == "+" else before]
                shown.append(sign + script[places[side]])
                for each in "-+" if sign == " " else sign:
                    places[each] += 1
        wanted = diff.unified(before, after)
        assert shown == [None if line[:2] == "@@" else line for line in wanted]


# ---- make update ---------------------------------------------------------------------
@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository of one notebook, whose cell runs a script that imports a module."""
    files = {
        "01_one/train.py": '"Title."\n\nfrom common.part import x  # why\n\nprint(x)\n',
        "01_one/demos/one.py": "print(1)  # why\n",
        "common/part.py": "x = 1  # why\n",
        "nbtools/part.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    sources = [
        "from nbtools import part",
        "lesson.show('01_one', 'x')",
        "lesson.run(X)",
    ]
    command = "'python 01_one/train.py; 01_one/demos/one.py --text-file common/part.py'"
    sources[2] = sources[2].replace("X", command)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = tmp_path / "01_one/one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    "file, old, new, is_stale",
    [
        ("01_one/train.py", "why", "the reason", False),
        ("01_one/train.py", "Title", "Other title", False),
        ("01_one/train.py", "\n\nprint", "\n\n\nprint", True),
        ("01_one/train.py", "print(x)", "print(2)", True),
        ("01_one/demos/one.py", "why", "the reason", True),
        ("common/part.py", "x = 1", "x = 2", True),
        ("nbtools/part.py", "1", "2", False),
        ("01_one/one.ipynb", "'x'", "'y'", False),
        ("01_one/one.ipynb", "common/part.py", "01_one/train.py", True),
    ],
)
def test_a_notebook_is_stale_when_what_it_runs_has_changed(
    file, old, new, is_stale, small
):
    before = stale.digest_of_notebook(small)
    replace_once(small.parents[1] / file, (old, new))
    assert (stale.digest_of_notebook(small) != before) == is_stale


def test_a_text_that_is_read_counts_with_its_comments(small):
    before = stale.digest_of_notebook(small)
    replace_once(small.parents[1] / "common/part.py", ("why", "the reason"))
    assert stale.digest_of_notebook(small) != before


def test_a_digest_is_of_all_that_the_notebooks_run():
    named = stale.NAMED.findall("torchrun 03_ddp_launch/train.py; 09_resume.demos.x")
    assert named == ["03_ddp_launch/train.py", "09_resume.demos.x"]
    found = {file for path in notebooks() for file in stale.programs_of(path)}
    assert {ROOT / stage / "train.py" for stage in with_feature("distributed")} <= found
    assert ROOT / "common/checkpoint.py" in found
    assert len(found) > 60 and not [one for one in found if one.suffix == ".ipynb"]


def test_numbers_that_a_text_has_and_its_output_has_no_longer():
    def book(text, printed):
        out = [nbformat.v4.new_output("stream", text=printed)]
        cells = [nbformat.v4.new_code_cell("x", outputs=out)]
        cells.append(nbformat.v4.new_markdown_cell(text))
        return nbformat.v4.new_notebook(cells=cells)

    text = "It differs by 1.4e-15, in 24 steps of 0.5."
    before, after = book(text, "1.4e-15 24 0.5 17"), book(text, "1.5e-15 24 0.25 18")
    assert update.numbers_gone(before, after) == ["0.5", "1.4e-15"]


# ---- make steps ----------------------------------------------------------------------
@pytest.mark.parametrize("stage", [*map(only_in_ci, record_steps.RUNS)])
def test_a_recorded_step_is_one_that_the_stage_takes(stage, tmp_path):
    """A fresh recording is equal; all ranks do the same things, in the same order."""
    stored = json.loads(record_steps.PAGE.read_text())["steps"]
    assert [*stored] == [*record_steps.RUNS]
    ranks = record_steps.record(stage, tmp_path)
    assert ranks == stored[stage], "stale: type `make steps`"
    processes, _ = record_steps.RUNS[stage]
    assert len(ranks) == processes
    for moments in zip(*ranks, strict=True):
        assert len({moment[0] for moment in moments}) == 1  # what happens
        assert len({moment[-2] for moment in moments}) == 1  # the line
        for rank, moment in enumerate(moments):
            assert not isinstance(moment[1], list) or rank in moment[1]
    kinds = {moment[0] for moment in ranks[0]}
    assert {"forward", "backward", "all_reduce", "optimizer"} <= kinds


# ---- make site -----------------------------------------------------------------------
def test_make_site_without_sphinx_is_one_line(tmp_path):
    python = tmp_path / "python"  # one that sees no packages
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    built = ROOT / "docs/_build"
    there = built.exists()
    done = commands.run(["make", "--silent", "site", f"PY={python}"], code=2)
    said, *makes_own = done.stderr.splitlines()
    assert "has no Sphinx" in said and "install -r tools/site/requirements.txt" in said
    assert done.stdout == "" and [m[:4] for m in makes_own] == ["make"]
    assert built.exists() == there


# ---- make demo -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "wanted",
    [first_with("images"), only_in_ci(first_with("torchrun")), only_in_release("")],
)
def test_the_demo_ends_with_a_table_of_equal_weights(wanted):
    """Of a stage, or of all: each trains the weights of one process."""
    done = commands.run(f"python -m tools.demo {wanted}", seconds=600)
    titles, *rows = done.stdout.rpartition("\nstage ")[2].split("\n\n")[0].splitlines()
    assert titles.split()[:3] == ["launch", "processes", "device"]
    *_, last = stages()
    assert rows[-1].split()[0] == (wanted or last)
    differences = [float(row.split()[-1]) for row in rows]
    assert differences[0] == 0 and max(differences) <= 1e-11
    accuracy = rows[-1].split()[6]
    assert float(accuracy) >= (95 if wanted else 25)


def test_the_demo_knows_its_stages(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "01"])
    with pytest.raises(SystemExit, match="^2$"):
        demo.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("demo.py: error: ") and "01_single_gpu" in line


def test_a_python_of_ones_own_is_used_as_it_is():
    """`make demo PY=...` installs nothing; only the Python's version is checked."""
    done = commands.run(f"make --no-print-directory -n demo PY={sys.executable}")
    check, run = done.stdout.splitlines()
    assert "version_info < (3, 11)" in check
    assert run == f"{sys.executable} -m tools.demo"
    said = commands.run("make demo PY=false", code=2).stderr
    assert "false is not Python 3.11 or later" in said


# ---- the pages -----------------------------------------------------------------------
@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.name)
def test_a_page_is_as_stages_toml_and_the_tests_say(path):
    assert path.read_text() == pages.pages()[path], "stale: type `make pages`"


def test_the_front_pages_say_which_stage_each_builds_on(monkeypatch):
    """Where it is not the one before it; and which a reader can skip."""
    bases = {"01_a": None, "02_b": "01_a", "03_c": "01_a", "04_d": "02_b"}
    known = {}
    for name, base in bases.items():
        fields = {"name": name, "number": name[:2], "builds_on": base}
        known[name] = SimpleNamespace(**fields)
    monkeypatch.setattr(pages, "registry", lambda: known)
    said = "except 03, which builds on 01, and 04, which builds on 02. You can skip 03."
    assert pages.builds_on(chinese=False).endswith(said)
    chinese = pages.builds_on(chinese=True)
    assert "除 03 以 01 为基础、04 以 02 为基础外，" in chinese
    assert chinese.endswith("。03 可以跳过。")


def test_make_pages_draws_the_pictures_of_docs_as_they_are():
    found = [path for name in picture.PICTURES for path in picture.paths(name)]
    assert {*found} == {*(ROOT / "docs").glob("*.png")}
    for name in picture.PICTURES:
        for path in picture.paths(name):
            stored = picture.stored_text(path)
            assert stored == picture.source(name), f"{path.name}: type `make pages`"


def test_the_tests_of_the_faults_check_what_the_page_says():
    rows = fault_table.faults()
    assert len(rows) >= 20
    for row in rows:  # otherwise the test does not check the mark's words
        assert "fault" in row["takes"], row["test"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_only_what_exists(page):
    text = (ROOT / page).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert commands
    for command in commands:
        rule = rf"^([\w-]+ )*{command}( [\w-]+)*:"
        assert re.search(rule, makefile, re.MULTILINE), command


# ---- tools/gpu.py --------------------------------------------------------------------
@pytest.mark.release
def test_every_part_of_the_gpu_half_runs(tmp_path):
    """On the CPU, with little work; stage 01 is trained twice, to equal weights."""
    words = ["python", "-m", "tools.gpu", "--dry-run", "--out-dir", tmp_path]
    done = commands.run(words, seconds=600)
    for part in gpu.PARTS:
        text = (tmp_path / f"{part}.txt").read_text()
        assert f"{part}: ended as it should" in text and text in done.stdout
    trained = (tmp_path / "stages.txt").read_text()
    rows = [line.split() for line in trained.splitlines()[1:4]]
    first, *_, last = stages()
    assert [row[0] for row in rows] == [first, first, last]
    assert rows[1][1:4] == ["float32", "again", "0"] and float(rows[1][-1]) == 0
    assert rows[2][1:3] == ["fp16", "0"]
    for part, files in gpu.TESTS.items():
        assert re.search(
            "^[1-9][0-9]* passed", (tmp_path / f"{part}.txt").read_text(), re.M
        )
        assert all([*ROOT.glob(f"tests/*/test_{name}.py")] for name in files)
    probed = (tmp_path / "probe.txt").read_text()
    assert "failed" not in probed and "left out" not in probed


@pytest.mark.release
def test_the_tests_of_the_gpu_half_need_no_jupyter(tmp_path):
    """All of them are collected where what may be missing is missing."""
    names = [name for names in gpu.TESTS.values() for name in names]
    wanted = [str(next(ROOT.glob(f"tests/*/test_{name}.py"))) for name in names]
    missing = [*gpu.MISSING_IS_FINE, "nbclient", "nbconvert", "IPython"]
    lines = f"""
import sys

import pytest

sys.modules.update(dict.fromkeys({missing}))  # importing one raises ImportError
sys.exit(pytest.main(["--collect-only", "--all", "-qq", *{wanted}]))
"""
    (tmp_path / "collect.py").write_text(lines)
    # otherwise the packages that are plugins of pytest are looked for, too
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1, "PYTEST_PLUGINS": "xdist.plugin"}
    done = commands.run(["python", tmp_path / "collect.py"], PYTHONPATH=ROOT, **alone)
    for file in wanted:
        assert re.search(rf"^{file}: [1-9]", done.stdout, re.M), file


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


def test_what_an_assistant_reads_exists():
    links = re.findall(r"\]\(([^)#]+)", pages.for_assistants())
    assert len(links) > 40
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_new_container_runs_a_command_of_make():
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    name = settings["postCreateCommand"].removeprefix("make ")
    assert f"\n{name}:" in (ROOT / "Makefile").read_text()
