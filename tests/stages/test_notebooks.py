"""The notebooks run, alone and in a clean copy, and show the files as they are."""

import ast
import os
import re
import shutil

import matplotlib
import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import known_files
from harness.stages import notebooks
from harness.stages import registry
from harness.stages import stages
from nbtools import lesson
from tests.conftest import only_in_ci
from tests.conftest import only_in_release
from tests.training import TRANSFORMERS
from tests.training import missing_for_slurm
from tools import picture
from tools.notebooks import show_again
from tools.notebooks import write
from tools.stale import only_shows

ALL = [path.relative_to(ROOT).as_posix() for path in notebooks()]
PAGES = [name for name in known_files() if name.endswith(".md")]


def main_notebook(stage):
    return f"{stage}/{stage}.ipynb"


MAIN = [notebook for notebook in map(main_notebook, stages()) if notebook in ALL]
SANITIZE = ROOT / "tests/sanitize.cfg"
USES_SLURM = [name for name in ALL if "cluster.start(" in (ROOT / name).read_text()]
# Words that were once used here, and are not the field's (or not English): pattern, and
# what to say instead.
RETIRED = {
    r"but for\b": "except",
    r"\banew\b": "again",
    r"\blikewise\b": "too",
    r"\bheeded\b": "acted on",
    r"\bno more[.;,]": "no longer",
    r"\b(is|are|be|has) an?other[.;,]": "is different",
    r"(?<!memory[ -])\bsnapshots?\b": "checkpoint",
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


def tags_of(notebook):
    """Return the tags of each code cell, a list that may be empty."""
    return [cell.metadata.get("tags", []) for cell in code_cells(notebook)]


def sources(notebook):
    return "\n".join(cell.source for cell in code_cells(notebook))


def prose(notebook):
    """Return the text of a notebook's markdown cells."""
    cells = [cell for cell in book(notebook).cells if cell.cell_type == "markdown"]
    return "\n".join(cell.source for cell in cells)


def without_colors(text):
    return re.sub(r"\x1b\[\d+m", "", text)


def printed(cell):
    return without_colors(
        "".join(
            o.text
            for o in cell.outputs
            if o.output_type == "stream" and o.name == "stdout"
        )
    )


# ---- which there are -----------------------------------------------------------------
def test_every_stage_has_a_notebook():
    missing = {*map(main_notebook, stages())} - {*ALL}
    assert not missing, f"missing: {missing}"
    assert {notebook.split("/")[0] for notebook in ALL} == set(stages())
    explain_slurm = {main_notebook(first_with(name)) for name in ("slurm", "signals")}
    assert explain_slurm <= set(USES_SLURM)


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_begins_with_its_number_and_is_linked(notebook):
    stage, _, name = notebook.partition("/")
    assert re.match(rf"# {registry()[stage].number} · ", prose(notebook))
    if notebook not in MAIN:
        assert f"]({name}" in prose(main_notebook(stage))
        assert f"]({stage}.ipynb" in prose(notebook)


# ---- they run ------------------------------------------------------------------------
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
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:hypothesispytest"]  # which takes a second to import
    command += ["-o", "addopts=", "--nbval-current-env", "--nbval-cell-timeout=1500"]
    command += ["--nbval" if compare else "--nbval-lax"]
    command += ["--nbval-sanitize-with", SANITIZE, notebook]
    # It shows what the launcher says, or does, when a command fails.
    launched = any("launcher" in tags for tags in tags_of(notebook))
    options = {"LESSON_FORKS": "working" if launched else "all"}
    options["cwd"] = notebook.parent
    if "hugging_face" in notebook.read_text():
        options["FORKS_PRELOAD"] = " ".join(TRANSFORMERS)
    return commands.run(command, code=None, seconds=1500, **options)


def assert_it_runs(notebook, copy, compare=True, cells=None):
    """Assert that a notebook's cells run in a clean copy, and leave no file behind.

    compare: whether the outputs have to be the stored ones; cells: their number, if it
    is not that of the stored notebook.
    """
    before = files(copy)
    done = nbval(copy / notebook, compare)
    passed = rf"^{cells or len(code_cells(notebook))} passed"
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
    """Those of its cells that want one."""
    script = clean_copy / "tools/local_slurm.sh"
    script.write_text(f"echo not here >&2; exit 2\n{script.read_text()}")
    shorter = book(notebook)
    shorter.cells = cells_that_want(["cluster"], code_cells(notebook))
    assert 0 < len(shorter.cells) <= len(code_cells(notebook))
    nbformat.write(shorter, clean_copy / notebook)
    assert_it_runs(notebook, clean_copy, compare=False, cells=len(shorter.cells))


def names(cell):
    """Return the names that a cell wants from others, and those that it sets."""
    wanted, given = set(), set()
    for statement in ast.parse(cell.source).body:
        nodes = list(ast.walk(statement))
        named = [node for node in nodes if isinstance(node, ast.Name)]
        wanted |= {n.id for n in named if isinstance(n.ctx, ast.Load)} - given
        given |= {n.id for n in named if isinstance(n.ctx, ast.Store)}
        given |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
        given |= {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}
    return wanted, given


def cells_that_want(modules, cells):
    """Return the cells that use modules or what such a cell computed, in their order.

    And those that give them what they use. Files of the other cells are not there.
    """
    every = [names(cell) for cell in cells]
    chosen, of_modules = set(), set(modules)
    for n, (wanted, given) in enumerate(every):
        if wanted & of_modules:
            chosen.add(n)
            of_modules |= given
        else:
            of_modules -= given - set(modules)
    needed = set()
    for n, (wanted, given) in reversed([*enumerate(every)]):
        if n in chosen or given & needed:
            chosen.add(n)
            needed = needed - given | wanted
    return [cells[n] for n in sorted(chosen)]


def test_outputs_are_compared_without_what_differs():
    """nbval reads each section of the file, and skips one that it cannot read."""
    text = SANITIZE.read_text()
    patterns = get_sanitize_patterns(text)
    assert len(patterns) == len(re.findall(r"^\[", text, re.MULTILINE))


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
    assert "1 failed" in done.stdout and "CommandError" in done.stdout
    assert "its reason" in done.stdout


# ---- how they are stored -------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.release
def test_rebuilding_changes_nothing(clean_copy):
    """Two runs of a process, a plot and an error give two equal files."""
    notebook = clean_copy / "notebook.ipynb"
    sources = [
        "import importlib",
        "from nbtools import lesson",
        "figures = importlib.import_module('06_slurm.figures')",
        "done = lesson.run('python --version')",
        "figures.allocation_step_task()",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    contents = []
    for _ in range(2):
        commands.run(["python", "-m", "tools.notebooks", notebook], cwd=clean_copy)
        contents.append(notebook.read_text())
    assert contents[0] == contents[1]
    assert "image/png" in contents[0]


def pictures(notebook):
    """Return the outputs of a notebook that are pictures."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [one for one in outputs if "image/png" in one.get("data", {})]


@pytest.mark.ci
def test_pictures_are_as_figures_py_draws_them_now():
    """From what the run gave them, which the outputs keep."""
    drawn = [one for notebook in ALL for one in pictures(notebook)]
    kept = [output for output in drawn if picture.drawn_by(output)]
    # All but the digits of 01, which have no words.
    assert len(drawn) - len(kept) <= 1 and len(kept) > 40
    ours = f"Matplotlib version{matplotlib.__version__}"
    stored = {
        picture.version(picture.stored_in(output)).split(",")[0] for output in kept
    }
    if stored != {ours}:
        pytest.skip(f"stored by {stored}, which may draw otherwise than {ours}")
    for output in kept:
        stored = output.data["image/png"]
        hint = f"{output.metadata['picture']}: make notebooks SHOW=1"
        assert picture.drawn_now(output) == stored, hint


def test_listings_alone_can_be_made_again(tmp_path):
    """Cells that do something else keep what they are stored with."""
    shows = (
        'for section in ("2. processes",):\n    lesson.show("03_ddp_launch", section)'
    )
    needs = "lesson.show('03_ddp_launch', section)"
    stale = nbformat.v4.new_output("stream", text="as it was\n")
    cells = [
        nbformat.v4.new_code_cell(source, execution_count=3, outputs=[stale])
        for source in (shows, needs, "lesson.run('false')", "print(1)")
    ]
    path = tmp_path / "shows.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    show_again(path)
    first, *others = nbformat.read(path, as_version=4).cells
    wanted = "\n".join(lesson.sections("03_ddp_launch")["2. processes"]) + "\n"
    assert printed(first) == wanted and first.execution_count == 3
    assert [printed(cell) for cell in others] == ["as it was\n"] * 3


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_is_stored_as_the_tool_stores_it(notebook, tmp_path):
    """Run from top to bottom, without timestamps, widgets or what a machine adds."""
    text = (ROOT / notebook).read_text()
    again = tmp_path / "again.ipynb"
    write(book(notebook), again)
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
    shells_out = re.compile(r"^\s*[!%]|= ?!|get_ipython|;\s*$", re.MULTILINE)
    assert not shells_out.search(sources(notebook))


# ---- what they show ------------------------------------------------------------------
@pytest.mark.parametrize("notebook", ALL)
def test_listings_and_diffs_are_those_of_the_files_now(notebook, capsys):
    for cell in code_cells(notebook):
        if only_shows(cell.source):
            exec(cell.source, {"lesson": lesson})
            shown = without_colors(capsys.readouterr().out)
            assert printed(cell) == shown, "stale: type `make notebooks SHOW=1`"


def runs_of_lines(text, length):
    """Return all runs of so many lines, without indentation, blanks and imports."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if not re.match(r"(import |from |$)", line)]
    return set(zip(*(lines[n:] for n in range(length)), strict=False))


@pytest.mark.parametrize("notebook", ALL)
def test_a_notebook_copies_no_code_and_writes_no_program(notebook):
    """What is in a file is shown from there; three equal lines may be any loop's."""
    scripts = [n for n in known_files() if re.match(r"(\d\d_.*|common/.*)\.py$", n)]
    ours = set().union(*(runs_of_lines((ROOT / n).read_text(), 4) for n in scripts))
    cells = [cell.source for cell in book(notebook).cells]
    assert not ours & set().union(*(runs_of_lines(cell, 4) for cell in cells))
    program = re.compile(r"write_text\(|^import .*\n.*\"\"\"$", re.MULTILINE)
    assert not program.search(sources(notebook))


# ---- the words -----------------------------------------------------------------------
def retired_words(text):
    """Return {words found in a text: what to say instead}."""
    found = {
        re.search(pattern, text, re.IGNORECASE): RETIRED[pattern] for pattern in RETIRED
    }
    return {match[0]: better for match, better in found.items() if match}


@pytest.mark.parametrize("name", ALL + PAGES)
def test_the_words_are_those_of_the_field(name):
    if name in ALL:
        text = "\n".join(cell.source for cell in book(name).cells)
    else:
        text = (ROOT / name).read_text()
    assert not retired_words(text)


def test_retired_words_are_found():
    text = "It goes on after step 3, but for rank 0, which is another."
    assert set(retired_words(text)) == {"goes on after", "but for", "is another."}
