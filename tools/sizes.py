"""Print how large things are, for a person to look at. No test asks for a size.

python -m tools.sizes

Lines are those of the files, blank ones and comments included. A stage's changes are
counted against the stage that it builds on, as `make diff` shows them. `common` is how
many lines of common/ a stage uses that no earlier stage uses.
"""

import ast
import difflib
import json

from tools.stages import ROOT
from tools.stages import notebooks
from tools.stages import registry


def script(stage):
    """Return the lines of a stage's script."""
    return (ROOT / stage / "train.py").read_text().splitlines()


def changed_lines(before, after):
    """Return how many lines are added, and removed, between two lists of lines."""
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return tuple(sum(line[0] == sign for line in diff) for sign in "+-")


# ---- lines of common/ ----------------------------------------------------------------
def names_from_common(tree):
    """Return what a module imports from common/: {name: (module, name there)}.

    The name there is None if the module itself is imported.
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package, _, module = (node.module or "").partition(".")
            for alias in node.names if package == "common" else []:
                unit = (module, alias.name) if module else (alias.name, None)
                found[alias.asname or alias.name] = unit
    return found


def used_units(nodes, tree, module=None):
    """Return the (module, name) in common/ to which the code in `nodes` refers.

    tree: the module that the nodes are from; module: its name, if it is in common/.
    """
    imported = names_from_common(tree)
    used = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            used.add(imported.get(node.id, (module, node.id)))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            where, name = imported.get(node.value.id, (None, None))
            if where and name is None:
                used.add((where, node.attr))
    return used


def used_lines(source, modules):
    """Return the (module, line number) in common/ that a script uses.

    source: the script's text; modules: {name: text} of those in common/. A function or
    a class that it refers to, itself or through other parts of common/, is used
    completely. With the first one, all the code outside functions and classes is used,
    too: imports and constants, say.
    """
    trees = {name: ast.parse(text) for name, text in modules.items()}
    definitions = {}
    for module, tree in trees.items():
        for node in tree.body:
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            name = node.name if named else None
            definitions.setdefault((module, name), []).append(node)
    script = ast.parse(source)
    todo, seen, used = used_units([script], script), set(), set()
    while todo:
        module, name = unit = todo.pop()
        if unit in seen or module not in trees:
            continue
        seen.add(unit)
        nodes = definitions.get(unit, [])
        todo |= used_units(nodes, trees[module], module) | {(module, None)}
        for node in nodes:
            parts = [node, *getattr(node, "decorator_list", [])]
            first = min(part.lineno for part in parts)
            used |= {(module, line) for line in range(first, node.end_lineno + 1)}
    return used


# ---- the tables ----------------------------------------------------------------------
def stage_rows():
    """Return a row per stage: name, lines, added, removed, lines of common/."""
    paths = (ROOT / "common").glob("*.py")
    modules = {path.stem: path.read_text() for path in paths}
    rows, earlier = [], set()
    for stage in registry().values():
        lines = script(stage.name)
        base = stage.builds_on
        changed = changed_lines(script(base), lines) if base else ("", "")
        used = used_lines("\n".join(lines), modules)
        rows.append((stage.name, len(lines), *changed, len(used - earlier)))
        earlier |= used
    return rows


def notebook_rows():
    """Return a row per notebook: its path, cells, words of text."""
    rows = []
    for path in notebooks():
        cells = json.loads(path.read_text())["cells"]
        text = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        name = str(path.relative_to(ROOT))
        rows.append((name, len(cells), len(" ".join(text).split())))
    return rows


def recipe_rows():
    """Return a row per recipe: its name, lines."""
    paths = sorted((ROOT / "recipes").glob("*.py"))
    return [(path.name, len(path.read_text().splitlines())) for path in paths]


def show(titles, rows):
    """Print a table whose first column is text, and the others are numbers."""
    width = max(len(name) for name, *_ in rows)
    for name, *numbers in [titles, *rows]:
        print(f"{name:<{width}}", *(f"{number:>7}" for number in numbers), sep="  ")


def main():
    show(("stage", "lines", "added", "removed", "common"), stage_rows())
    print()
    show(("notebook", "cells", "words"), notebook_rows())
    print()
    show(("recipe", "lines"), recipe_rows())


if __name__ == "__main__":
    main()
