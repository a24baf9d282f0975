"""The notebooks run, alone and in a clean copy, and show the files as they are."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import nbformat
import pytest

from nbtools import lesson
from tests.conftest import swept_unless
from tests.harness import ROOT
from tests.harness import missing_for_slurm
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
MAIN = [f"{stage}/{stage}.ipynb" for stage in STAGES]
ALL = [path.relative_to(ROOT).as_posix() for path in notebooks.notebooks()]
USES_SLURM = [name for name in ALL if "cluster.start(" in (ROOT / name).read_text()]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("b*/*.md")]
]
# Most of a notebook's time goes by while processes import torch: forks have it.
STARTER = shlex.join([sys.executable, str(ROOT / "tests/by_fork.py")])
MAX_CELLS, MAX_WORDS = 40, 1600  # "about 1,500 words" of text

# Words that were once used here, and are not the field's (or not English): pattern, and
# what to say instead.
RETIRED = {
    r"but for\b": "except",
    r"\banew\b": "again",
    r"\blikewise\b": "too",
    r"\bheeded\b": "acted on",
    r"\bno more[.;,]": "no longer",
    r"\b(is|are|be|has) an?other[.;,]": "is different",
    r"\bsnapshots?\b": "checkpoint",
    r"\b(takes?|taken|taking|took) up\b(?! to\b)": "resume",
    r"\brehears": "warm up",
    r"\bfigures? (are|is) (the )?same\b": "metrics",
    r"\bgo(es)? on (after|from|with)\b": "resumes from",
    r"\bof that time\b": "then",
    r"\bwhoever\b": "a reader who, a process that",
    r"\bin vain\b": "without result",
    r"--accumulate\b|--snapshots?\b|--predictions\b": "the flag's new name",
    r"is_main\b(?!_)": "is_main_process",
    r"\b(normalis|colour|centre|behaviour|serialis|initialis|synchronis)": "American",
}


def book(notebook):
    return nbformat.read(ROOT / notebook, as_version=4)


def code_cells(notebook):
    return [cell for cell in book(notebook).cells if cell.cell_type == "code"]


def prose(notebook):
    """Return the text of a notebook's markdown cells."""
    cells = [cell for cell in book(notebook).cells if cell.cell_type == "markdown"]
    return "\n".join(cell.source for cell in cells)


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
        env={**os.environ, "LESSON_STARTER": STARTER},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_stage_has_a_notebook():
    assert len(STAGES) >= 4
    assert set(MAIN) <= set(ALL)
    assert {notebook.split("/")[0] for notebook in ALL} == set(STAGES)


def assert_it_runs(notebook, copy, compare=True):
    """Assert that a notebook's cells run in a clean copy, and leave no file behind.

    compare: whether the outputs have to be the stored ones.
    """
    before = files(copy)
    done = nbval(copy / notebook, compare)
    passed = rf"^{len(code_cells(notebook))} passed"
    assert re.search(passed, done.stdout, re.MULTILINE), done.stdout[-5000:]
    assert files(copy) == before


# The later ones take longer. They come first, so that a worker's last test is short.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "notebook", [swept_unless(n in MAIN, n) for n in reversed(ALL)]
)
def test_a_notebook_runs_alone_in_a_clean_copy(notebook, clean_copy):
    without_slurm = notebook in USES_SLURM and missing_for_slurm()
    assert_it_runs(notebook, clean_copy, compare=not without_slurm)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("notebook", USES_SLURM)
def test_a_slurm_notebook_runs_without_a_cluster(notebook, clean_copy):
    script = clean_copy / "tools/local_slurm.sh"
    script.write_text(f"echo no cluster >&2; exit 2\n{script.read_text()}")
    assert_it_runs(notebook, clean_copy, compare=False)


def test_the_notebooks_of_the_stages_for_slurm_use_it():
    assert {"06_slurm/06_slurm.ipynb", "10_preemption/10_preemption.ipynb"} <= {
        *USES_SLURM
    }


@pytest.mark.slow
def test_a_failing_child_fails_its_cell(tmp_path):
    lines = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})",
        "from nbtools import lesson",
        "lesson.run('python -c \"raise SystemExit(\\'its \\' + \\'reason\\')\"')",
    ]
    cell = nbformat.v4.new_code_cell("\n".join(lines), execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "fails.ipynb")
    done = nbval(tmp_path / "fails.ipynb")
    assert done.returncode == 1
    assert "1 failed" in done.stdout and "CalledProcessError" in done.stdout
    assert "its reason" in done.stdout


@pytest.mark.slow
def test_rebuilding_changes_nothing(clean_copy):
    """Two runs of a process, a plot and an error give two equal files."""
    notebook = clean_copy / "notebook.ipynb"
    sources = [
        "from nbtools import figures, lesson",
        "done = lesson.run('python --version')",
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
    assert "Not solved yet: ZeroDivisionError: division" in contents[0]


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_is_stored_as_the_tool_stores_it(notebook, tmp_path):
    """Run from top to bottom, without timestamps, widgets or what a machine adds."""
    text = (ROOT / notebook).read_text()
    again = tmp_path / "again.ipynb"
    notebooks.write(book(notebook), again)
    assert again.read_text() == text
    cells = code_cells(notebook)
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
    text = prose(f"{stage}/{stage}.ipynb")
    assert "**The problem.**" in text
    found = re.findall(r"^## (.*)", text, re.MULTILINE)
    wanted = FIRST_HEADINGS if stage == STAGES[0] else HEADINGS
    assert [heading for heading in found if heading in wanted] == wanted


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_keeps_to_its_limits(notebook):
    """It is short, writes no program, and as a companion is linked to its stage."""
    words = len(prose(notebook).split())
    print(f"{notebook}: {len(book(notebook).cells)} cells, {words} words")
    assert len(book(notebook).cells) <= MAX_CELLS
    assert words <= MAX_WORDS
    sources = "\n".join(cell.source for cell in code_cells(notebook))
    assert not re.search(r"write_text\(|^import .*\n.*\"\"\"$", sources, re.MULTILINE)
    stage, _, name = notebook.partition("/")
    assert re.match(rf"# {stage[:2]} · ", prose(notebook))
    if notebook not in MAIN:
        assert f"]({name}" in prose(f"{stage}/{stage}.ipynb")
        assert f"]({stage}.ipynb" in prose(notebook)


def retired_words(text):
    """Return {words found in a text: what to say instead}."""
    found = {
        re.search(pattern, text, re.IGNORECASE): RETIRED[pattern] for pattern in RETIRED
    }
    return {match[0]: better for match, better in found.items() if match}


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_speaks_the_words_of_the_field(notebook):
    assert not retired_words("\n".join(cell.source for cell in book(notebook).cells))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_speaks_the_words_of_the_field(page):
    assert not retired_words((ROOT / page).read_text())


def test_retired_words_are_found():
    text = "It goes on after step 3, but for rank 0, which is another."
    assert set(retired_words(text)) == {"goes on after", "but for", "is another."}


@pytest.mark.parametrize("before, after", list(zip(STAGES, STAGES[1:], strict=False)))
def test_the_diffs_shown_are_the_diffs_of_the_files(before, after):
    """Every section that differs is shown, whole or hunk by hunk, as it is now."""
    call = f'lesson.show_diff("{before}", "{after}"'
    cells = code_cells(f"{after}/{after}.ipynb")
    shown = [printed(cell) for cell in cells if call in cell.source]
    sections = lesson.sections(after)
    wanted = [lesson.diff(before, after, section) for section in sections]
    wanted = ["".join(f"{line}\n" for line in lines) for lines in wanted if lines]
    if after == "02_dataparallel":  # its first lines differ in title and command alone
        wanted = wanted[1:]
    assert wanted
    assert "".join(shown) == "".join(wanted)


def test_the_first_notebook_shows_its_whole_script():
    cells = [cell for cell in code_cells(MAIN[0]) if "lesson.show(" in cell.source]
    shown = [printed(cell) for cell in cells]
    wanted = ["\n".join(lines) + "\n" for lines in lesson.sections(STAGES[0]).values()]
    assert shown == wanted


def solutions(stage):
    """Return the solutions of a stage's exercises, and what comes before the first."""
    text = (ROOT / stage / "solutions.py").read_text()
    imports, *parts = re.split(r"^# -+ exercise \d+ -+\n", text, flags=re.MULTILINE)
    return imports, parts


@pytest.mark.parametrize("stage", STAGES)
def test_an_exercise_is_solved_by_its_solution_only(stage, capfd):
    notebook = f"{stage}/{stage}.ipynb"
    cells = code_cells(notebook)
    tags = [cell.metadata.get("tags") for cell in cells]
    exercises = [n for n, tag in enumerate(tags) if tag == ["exercise"]]
    imports, answers = solutions(stage)
    assert 2 <= len(exercises) <= 3
    assert len(exercises) == len(answers)
    assert "](solutions.py)" in prose(notebook)
    first_lines = [imports]
    for node in ast.parse(cells[0].source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            first_lines.append(ast.unparse(node))
    for n, solution in zip(exercises, answers, strict=True):
        assert tags[n + 1] == ["check"]
        for source, solved in ((cells[n].source, False), (solution, True)):
            exec("\n".join([*first_lines, source, cells[n + 1].source]), {})
            said = capfd.readouterr().out.splitlines()[-1]
            # The message is the check's own, and neither empty nor Python's.
            wanted = (
                r"Solved\." if solved else r"Not solved yet: (?!\w+(Error|:)).{10,}"
            )
            assert re.match(wanted, said), (source, said)
