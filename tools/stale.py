"""What a notebook was run with: a digest that it keeps.

It is of the cells that run, and of the programs that they name with what these import.
It leaves out comments and docstrings, except where a program is shown or read, and
nbtools and harness. Lines count, because tracebacks have their numbers.
"""

import ast
import hashlib
import re

import nbformat

from harness.stages import ROOT
from harness.stages import notebooks

NAMED = re.compile(r"[\w./-]+\.(?:py|sh|sbatch)\b|\b\d\d_\w+\.[\w.]+")
READ = re.compile(r"--text-file[ =]([\w./-]+)")


def only_shows(source):
    """Return whether a cell only prints files of the repository, or diffs of them."""
    nodes = [*ast.walk(ast.parse(source))]
    called = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {"lesson", *(n.id for n in names if isinstance(n.ctx, ast.Store))}
    needs_no_other_cell = own.issuperset(name.id for name in names)
    shows = bool(called) and all(name.startswith("lesson.show") for name in called)
    return shows and needs_no_other_cell


def without_words(text):
    """Return a program as a tree with its lines' numbers, without its docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return ast.dump(tree, include_attributes=True)


def imported(text, folder):
    """Return the files of this repository that a program or a cell imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {file for name in names for file in [find(name, folder)] if file}


def find(name, folder):
    """Return the file of this repository that a path or a module's name means, or None.

    Not those of nbtools and harness, and not figures.py, whose pictures are always
    drawn again.
    """
    name = name if "/" in name or name.endswith(".py") else name.replace(".", "/")
    for path in (root / end for root in (ROOT, folder) for end in (name, f"{name}.py")):
        if path.is_file():
            path = path.resolve()
            spare = {"nbtools", "harness"} & {*path.parts} or path.name == "figures.py"
            return path if path.is_relative_to(ROOT) and not spare else None
    return None


def programs(files):
    """Return these files, and all that they import."""
    found, todo = set(), [*files]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            if file.suffix == ".py":
                todo += imported(file.read_text(), file.parent)
    return sorted(found)


def digest(texts, files):
    """Return a digest of some texts, and of these programs with all they import."""
    parts = [*texts]
    for file in programs(files):
        text = file.read_text()
        spare = file.name == "train.py" or file.parent.name == "common"
        parts.append(f"{file.name}: {without_words(text) if spare else text}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cells_that_run(path):
    """Return the code cells of a notebook, without those that only show files."""
    cells = nbformat.read(path, as_version=4).cells
    cells = [cell.source for cell in cells if cell.cell_type == "code"]
    return [source for source in cells if not only_shows(source)]


def programs_of(path):
    """Return the programs that a notebook runs, and all that they import."""
    text = "\n".join(cells_that_run(path))
    files = {file for name in NAMED.findall(text) if (file := find(name, path.parent))}
    return programs(files | imported(text, path.parent))


def digest_of_notebook(path):
    """Return the digest of a notebook as it is now."""
    cells = cells_that_run(path)
    read = [(ROOT / name).read_text() for name in READ.findall("\n".join(cells))]
    return digest([*cells, *read], programs_of(path))


def stale_notebooks():
    """Return the notebooks that were last run with other cells or programs."""
    return [
        path
        for path in notebooks()
        if nbformat.read(path, as_version=4).metadata.get("ran_with")
        != digest_of_notebook(path)
    ]
