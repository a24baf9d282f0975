"""A notebook's outputs are those of its cells, run in a clean clone: docs/running.md.

And what CONTRIBUTING.md says of notebooks: they copy no code and leave nothing behind.
"""

import os
import re

import nbformat
import pytest

from harness import commands
from harness.stages import ROOT
from harness.stages import known_files
from harness.stages import notebooks
from harness.stages import stages
from tests.conftest import only_in_ci
from tests.conftest import only_in_release
from tests.training import TRANSFORMERS
from tests.training import missing_for_slurm

ALL = [path.relative_to(ROOT).as_posix() for path in notebooks()]
MAIN = [f"{stage}/{stage}.ipynb" for stage in stages()]
SANITIZE = ROOT / "tests/sanitize.cfg"
USES_SLURM = [name for name in ALL if "cluster.start(" in (ROOT / name).read_text()]


def book(notebook):
    return nbformat.read(ROOT / notebook, as_version=4)


def code_cells(notebook):
    return [cell for cell in book(notebook).cells if cell.cell_type == "code"]


# ---- they run ------------------------------------------------------------------------
def files(folder):
    """Return the files below a folder, except Python's caches."""
    return {
        p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


def assert_it_runs(notebook, copy, compare):
    """Assert that a notebook's cells run in a clean copy, and leave no file behind.

    compare: whether the outputs have to be the stored ones.
    """
    before = files(copy)
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:hypothesispytest"]  # which takes a second to import
    command += ["-o", "addopts=", "--nbval-current-env", "--nbval-cell-timeout=1500"]
    command += ["--nbval" if compare else "--nbval-lax"]
    command += ["--nbval-sanitize-with", SANITIZE, copy / notebook]
    # It shows what the launcher says, or does, when a command fails.
    tags = [cell.metadata.get("tags", []) for cell in code_cells(copy / notebook)]
    launched = any("launcher" in each for each in tags)
    options = {"LESSON_FORKS": "working" if launched else "all"}
    if "hugging_face" in (copy / notebook).read_text():
        options["FORKS_PRELOAD"] = " ".join(TRANSFORMERS)
    folder = (copy / notebook).parent
    done = commands.run(command, code=None, seconds=1500, cwd=folder, **options)
    passed = rf"^{len(tags)} passed"
    assert re.search(passed, done.stdout, re.MULTILINE), done.stdout[-5000:]
    assert files(copy) == before


# The later ones take longer. They come first, so that a worker's last test is short.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "notebook",
    [
        only_in_ci(n, unless=n in MAIN[:1]) if n in MAIN else only_in_release(n)
        for n in reversed(ALL)
    ],
)
def test_a_notebook_runs_alone_in_a_clean_copy(notebook, clean_copy, record_property):
    missing = notebook in USES_SLURM and missing_for_slurm()
    assert not (missing and "REQUIRE_SLURM" in os.environ), missing
    if missing:
        record_property(f"{notebook} was run, but not compared:", missing)
    assert_it_runs(notebook, clean_copy, compare=not missing)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("notebook", USES_SLURM)
def test_a_notebook_runs_without_a_cluster(notebook, clean_copy):
    script = clean_copy / "tools/local_slurm.sh"
    script.write_text(f"echo not here >&2; exit 2\n{script.read_text()}")
    assert_it_runs(notebook, clean_copy, compare=False)


# ---- how they are stored -------------------------------------------------------------
@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_was_run_from_top_to_bottom(notebook):
    """And is stored without timestamps, widgets or what a machine adds."""
    text = (ROOT / notebook).read_text()
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "image/png"}
    assert not re.search(r"\b(19|20)\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text)
    # A cell that shells out passes every notebook test when its command fails.
    shells_out = re.compile(r"^\s*[!%]|= ?!|get_ipython|;\s*$", re.MULTILINE)
    assert not shells_out.search("\n".join(cell.source for cell in cells))


def runs_of_lines(text, length):
    """Return all runs of so many lines, without indentation, blanks and imports."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if not re.match(r"(import |from |$)", line)]
    return set(zip(*(lines[n:] for n in range(length)), strict=False))


@pytest.fixture(scope="module")
def our_lines():
    """All runs of four lines in the scripts; three equal lines may be any loop's."""
    scripts = [n for n in known_files() if re.match(r"(\d\d_.*|common/.*)\.py$", n)]
    return set().union(*(runs_of_lines((ROOT / n).read_text(), 4) for n in scripts))


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_copies_no_code_and_writes_no_program(notebook, our_lines):
    """What is in a file is shown from there."""
    cells = [cell.source for cell in book(notebook).cells]
    assert not our_lines & set().union(*(runs_of_lines(cell, 4) for cell in cells))
    program = re.compile(r"write_text\(|^import .*\n.*\"\"\"$", re.MULTILINE)
    assert not any(program.search(cell.source) for cell in code_cells(notebook))
