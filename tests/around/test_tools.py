"""`make propagate` carries an edit on, and nothing that is generated is stale.

And what README.md says of `make demo`, and CONTRIBUTING.md of `make gpu`.
"""

import re
import subprocess

import matplotlib
import pytest

from harness import commands
from harness.stages import ROOT
from harness.stages import ancestors
from harness.stages import first_with
from harness.stages import known_files
from harness.stages import stages
from harness.stages import steps
from tests.conftest import only_in_ci
from tests.conftest import only_in_release
from tests.training import replace_once


# ---- make propagate ------------------------------------------------------------------
@pytest.fixture
def scripts(clean_copy):
    """{stage: its script} in a repository of its own, in which all is committed."""
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    commit = [*who, "commit", "-qm", "as it is"]
    for arguments in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *arguments], cwd=clean_copy, check=True)
    return {stage: clean_copy / stage / "train.py" for stage in stages()}


def propagate(scripts, start="", code=0):
    """Run it there; return its standard error."""
    command = f"python -m tools.propagate {start}"
    root = scripts[stages()[0]].parents[1]
    return commands.run(command, code=code, cwd=root).stderr


def test_propagate_carries_an_edit_to_all_stages_that_build_on_it(scripts):
    edits = {stages()[0]: "def main():", first_with("amp"): "    main()"}
    for stage, line in edits.items():
        replace_once(scripts[stage], (f"\n{line}\n", f"\n{line}  # edited\n"))
    # A comment changes its words, also where later stages have other lines beside it.
    words = "before the forward pass, which then has the memory"
    replace_once(scripts[stages()[0]], (words, "in the memory"))
    for _ in range(2):  # the second time changes nothing
        propagate(scripts)
        for stage, script in scripts.items():
            for start, line in edits.items():
                carried = f"\n{line}  # edited\n" in script.read_text()
                assert carried == (start in (stage, *ancestors(stage)))
            assert script.read_text().count("# in the memory") == 1


def test_propagate_leaves_the_branch_of_a_conflict_and_continues(scripts):
    """All titles differ, so a new one conflicts in the stages that build on it."""
    first = stages()[0]
    conflicts = [after for before, after in steps() if before == first]
    texts = {stage: script.read_text() for stage, script in scripts.items()}
    replace_once(scripts[first], ('"""[01] ', '"""[one] '))
    for said in (f"make propagate FROM={conflicts[-1]}", "contains conflict markers"):
        assert said in propagate(scripts, code=2)
        for stage in stages()[1:]:
            text = scripts[stage].read_text()
            assert ("<<<<<<<" in text) == (stage in conflicts)
            assert (text == texts[stage]) == (stage not in conflicts)
    for stage in conflicts:
        scripts[stage].write_text(f"{texts[stage]}# edited\n")
    propagate(scripts, conflicts[-1])
    assert scripts[first_with("amp")].read_text().endswith("\n# edited\n")


# ---- what `make update` writes -------------------------------------------------------
def test_nothing_that_is_generated_is_stale(clean_copy):
    """The list of stages, the table of faults, pictures, and what notebooks show.

    So each notebook is stored as the tool stores it, too.
    """
    for tool in ("tools.pages", "tools.notebooks --show"):
        commands.run(f"python -m {tool}", seconds=600, cwd=clean_copy)
    locked = (ROOT / "requirements.lock").read_text()
    # Another Matplotlib may draw the same picture with other pixels.
    drawn = f"matplotlib=={matplotlib.__version__}\n" in locked

    def content(path):
        data = path.read_bytes()
        return data if drawn else re.sub(rb'"image/png": ".*"', b"", data)

    known = [name for name in known_files() if drawn or not name.endswith(".png")]
    pairs = [(ROOT / name, clean_copy / name) for name in known]
    stale = [str(here) for here, again in pairs if content(here) != content(again)]
    assert stale == [], "type `make update`"


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


def test_make_gpu_names_what_exists():
    """What it runs can only be seen on a machine with a GPU."""
    text = commands.run("python -m tools.gpu --dry-run").stdout
    files = {*re.findall(r"[\w/.-]+\.py", text)}
    folders = (ROOT, ROOT / "your_own_script")
    missing = [file for file in files if not any((f / file).is_file() for f in folders)]
    assert missing == [] and len(files) > 40
    (names,) = re.findall(r"-k '(.+)'", text)
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    for name in names.split(" or "):
        assert re.search(rf"^def test_\w*{name}", tests, re.M), name
