"""The notebooks run, alone and in a clean copy, and show the files as they are."""

import ast
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from nbtools import lesson
from tests.harness import ROOT
from tests.harness import missing_for_slurm
from tests.solutions import SOLUTIONS
from tools import notebooks
from tools.stages import known_files
from tools.stages import stages

STAGES = stages()
HEADINGS = [
    "The idea",
    "What changed",
    "Run it",
    "Prove it",
    "Break it",
    "Your turn",
    "Where next",
]
FIRST_HEADINGS = ["The data", "The script, section by section", *HEADINGS[2:]]


def path(stage):
    return ROOT / stage / f"{stage}.ipynb"


def book(stage):
    return nbformat.read(path(stage), as_version=4)


def code_cells(stage):
    return [cell for cell in book(stage).cells if cell.cell_type == "code"]


def printed(cell):
    text = "".join(
        o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"
    )
    return re.sub(r"\x1b\[\d+m", "", text)


@pytest.fixture
def clean_copy(tmp_path):
    """A folder with a copy of the files that git tracks or would add."""
    copy = tmp_path / "copy"
    for path in known_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    return copy


def files(folder):
    """Return the files below a folder, except Python's caches."""
    return {
        p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


def nbval(notebook, compare=True):
    """Run nbval on a notebook, comparing its outputs with the stored ones."""
    options = [
        "--nbval" if compare else "--nbval-lax",
        "--nbval-current-env",
        "--nbval-cell-timeout=600",
        "-p",
        "no:cacheprovider",
    ]
    sanitize = [
        "--nbval-sanitize-with",
        str(ROOT / "tests/sanitize.cfg"),
        "-o",
        "addopts=",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *sanitize, str(notebook)],
        cwd=notebook.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_stage_has_one_notebook():
    assert len(STAGES) >= 4
    assert notebooks.notebooks() == [path(stage) for stage in STAGES]


def assert_it_runs(stage, copy, compare=True):
    """Assert that a notebook's cells run in a clean copy, and leave no file behind.

    compare: whether the outputs have to be the stored ones.
    """
    before = files(copy)
    done = nbval(copy / stage / f"{stage}.ipynb", compare)
    passed = rf"^{len(code_cells(stage))} passed"
    assert re.search(passed, done.stdout, re.MULTILINE), done.stdout[-5000:]
    assert files(copy) == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", STAGES)
def test_a_notebook_runs_alone_in_a_clean_copy(stage, clean_copy):
    without_slurm = stage == "06_slurm" and missing_for_slurm()
    assert_it_runs(stage, clean_copy, compare=not without_slurm)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_the_slurm_notebook_runs_without_a_cluster(clean_copy):
    script = clean_copy / "tools/local_slurm.sh"
    script.write_text(f"echo no cluster >&2; exit 2\n{script.read_text()}")
    assert_it_runs("06_slurm", clean_copy, compare=False)


@pytest.mark.slow
def test_a_failing_child_fails_its_cell(tmp_path):
    lines = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})",
        "from nbtools import lesson",
        "lesson.launch(['-c', 'raise SystemExit(1)'])",
    ]
    cell = nbformat.v4.new_code_cell("\n".join(lines), execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "fails.ipynb")
    done = nbval(tmp_path / "fails.ipynb")
    assert done.returncode == 1
    assert "1 failed" in done.stdout and "CalledProcessError" in done.stdout


@pytest.mark.slow
def test_rebuilding_changes_nothing(clean_copy):
    """Two runs of a process, a plot and an error give two equal files."""
    notebook = clean_copy / "notebook.ipynb"
    sources = [
        "from nbtools import figures, lesson",
        "done = lesson.launch(['-c', 'print(1)'])",
        "figures.allocation_step_task()",
        "lesson.check(lambda: 1 / 0)",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    contents = []
    for _ in range(2):
        rebuild = [sys.executable, "-m", "tools.notebooks", notebook]
        subprocess.run(rebuild, cwd=clean_copy, check=True, capture_output=True)
        contents.append(notebook.read_text())
    assert contents[0] == contents[1]
    assert "image/png" in contents[0]
    assert "Not solved yet: ZeroDivisionError" in contents[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_notebook_is_stored_as_the_tool_stores_it(stage, tmp_path):
    """Run from top to bottom, without timestamps, widgets or what a machine adds."""
    text = path(stage).read_text()
    again = tmp_path / "again.ipynb"
    notebooks.write(book(stage), again)
    assert again.read_text() == text
    cells = code_cells(stage)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "image/png"}
    assert not re.search(r"\b(19|20)\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text)
    # A cell that shells out passes every notebook test when its command fails.
    sources = "\n".join(cell.source for cell in cells)
    assert not re.search(r"^\s*[!%]|= ?!|get_ipython|;\s*$", sources, re.MULTILINE)


@pytest.mark.parametrize("stage", STAGES)
def test_the_sections_stand_in_order(stage):
    cells = [cell for cell in book(stage).cells if cell.cell_type == "markdown"]
    text = "\n".join(cell.source for cell in cells)
    assert re.match(rf"# {stage[:2]} · ", text)
    assert "**The problem.**" in text
    found = re.findall(r"^## (.*)", text, re.MULTILINE)
    wanted = FIRST_HEADINGS if stage == STAGES[0] else HEADINGS
    assert [heading for heading in found if heading in wanted] == wanted


@pytest.mark.parametrize("before, after", list(zip(STAGES, STAGES[1:], strict=False)))
def test_the_diffs_shown_are_the_diffs_of_the_files(before, after):
    """Every section that differs is shown, as it is in the files now."""
    shown = [printed(cell) for cell in code_cells(after) if "show_diff" in cell.source]
    sections = lesson.sections(after)
    wanted = [lesson.diff(before, after, section) for section in sections]
    wanted = ["".join(f"{line}\n" for line in lines) for lines in wanted if lines]
    if after == "02_dataparallel":  # its first lines differ in title and command alone
        wanted = wanted[1:]
    assert wanted
    assert shown == wanted


def test_the_first_notebook_shows_its_whole_script():
    cells = [cell for cell in code_cells(STAGES[0]) if "lesson.show(" in cell.source]
    shown = [printed(cell) for cell in cells]
    wanted = ["\n".join(lines) + "\n" for lines in lesson.sections(STAGES[0]).values()]
    assert shown == wanted


@pytest.mark.parametrize("stage", STAGES)
def test_an_exercise_is_solved_by_its_solution_only(stage, capfd):
    cells = code_cells(stage)
    tags = [cell.metadata.get("tags") for cell in cells]
    exercises = [n for n, tag in enumerate(tags) if tag == ["exercise"]]
    assert 2 <= len(exercises) <= 3
    assert len(exercises) == len(SOLUTIONS[stage])
    imports = [ast.parse("from torch import nn").body[0]]
    for node in ast.parse(cells[0].source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
    first_lines = ast.unparse(ast.Module(imports, []))
    for n, solution in zip(exercises, SOLUTIONS[stage], strict=True):
        assert tags[n + 1] == ["check"]
        for source, verdict in ((cells[n].source, "Not solved"), (solution, "Solved.")):
            exec("\n".join([first_lines, source, cells[n + 1].source]), {})
            assert capfd.readouterr().out.splitlines()[-1].startswith(verdict), source
