"""The stages in order, their commands, and how many lines each of them changes."""

import ast
import difflib
import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def fail(message):
    """End a tool with one line on standard error and exit code 2.

    common.args.fail does the same, but importing it imports torch.
    """
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    sys.exit(2)


def stages(root=ROOT):
    """Return the names of the stages' folders, in order."""
    return sorted(path.parent.name for path in root.glob("[0-9][0-9]_*/train.py"))


def known_files(root=ROOT):
    """Return the paths of the files that git tracks or would add, relative to `root`.

    They are strings, sorted. Raises CalledProcessError outside a clone.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True)
    return sorted(name for name in done.stdout.split("\0") if (root / name).is_file())


# ---- commands ------------------------------------------------------------------------
def shown_commands(stage):
    """Return the commands in the docstring of a stage's script, each on one line.

    The first is the one to show: it is the stage's lesson. The last is the plain one,
    which runs on any machine. They can be the same.
    """
    tree = ast.parse((ROOT / stage / "train.py").read_text())
    _, _, commands = ast.get_docstring(tree).partition("\n\n")
    return commands.splitlines()


def launcher(stage):
    """Return the program that a stage's plain command starts: python or torchrun."""
    return shown_commands(stage)[-1].split()[0]


def takes_processes(stage):
    """Return whether a stage's command says how many processes there are."""
    return "nproc" in shown_commands(stage)[-1]


def trains_on_text(stage):
    """Return whether a stage trains a language model; the others take images."""
    tree = ast.parse((ROOT / stage / "train.py").read_text())
    return "TextArgumentParser" in names_from_common(tree)


def reference(stage):
    """Return the first stage that trains on the same data: the others must equal it."""
    kind = trains_on_text(stage)
    return next(name for name in stages() if trains_on_text(name) == kind)


def plain_command(stage, processes):
    """Return a stage's plain command for so many processes, as it is typed."""
    plain = shown_commands(stage)[-1]
    return re.sub(r"(--nproc(-per-node)?)=\d+", rf"\1={processes}", plain)


def command(stage, processes=1, root=ROOT):
    """Return the arguments that run a stage on `processes` processes, from any folder.

    They are the plain command of its docstring, run by this Python, with the script's
    full path.
    """
    words = [
        str(Path(root, word)) if word.endswith(".py") else word
        for word in shlex.split(plain_command(stage, processes))
    ]
    program, *arguments = words
    module = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    return [sys.executable, *module, *arguments]


# ---- changed lines -------------------------------------------------------------------
def counted_lines(source):
    """Return the numbers of the lines of a module that count, in order.

    These are all but the module's docstring and the lines that hold nothing but (part
    of) the `help=` text of a flag. Blank lines and comments count.
    """
    tree, lines = ast.parse(source), source.splitlines()
    left_out = set()
    if ast.get_docstring(tree) is not None:
        left_out |= set(range(tree.body[0].lineno, tree.body[0].end_lineno + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            before = lines[node.lineno - 1].encode()[: node.col_offset]
            after = lines[node.end_lineno - 1].encode()[node.end_col_offset :]
            first = node.lineno + bool(before.strip())
            last = node.end_lineno - (after.strip() not in (b"", b","))
            left_out |= set(range(first, last + 1))
    return [n for n in range(1, len(lines) + 1) if n not in left_out]


def changed_lines(before, after):
    """Return how many lines are removed or added from one stage's script to another's.

    Only the lines that `counted_lines` returns are compared.
    """
    scripts = []
    for stage in (before, after):
        source = (ROOT / stage / "train.py").read_text()
        lines = source.splitlines()
        scripts.append([lines[n - 1] for n in counted_lines(source)])
    diff = list(difflib.unified_diff(*scripts, n=0, lineterm=""))[2:]
    return sum(line[0] in "+-" for line in diff)


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


@functools.cache
def used_lines(stage):
    """Return the (module, line number) in common/ that a stage's script uses.

    A function or a class that it refers to, itself or through other parts of common/,
    is used completely. With the first one, all the code outside functions and classes
    is used, too: imports and constants, say.
    """
    definitions, counted, trees = {}, {}, {}
    for path in sorted((ROOT / "common").glob("*.py")):
        source = path.read_text()
        trees[path.stem] = ast.parse(source)
        counted[path.stem] = set(counted_lines(source))
        for node in trees[path.stem].body:
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            name = node.name if named else None
            definitions.setdefault((path.stem, name), []).append(node)
    script = ast.parse((ROOT / stage / "train.py").read_text())
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
            lines = counted[module] & {*range(first, node.end_lineno + 1)}
            used |= {(module, line) for line in lines}
    return used


def first_used_lines(stage):
    """Return how many lines of common/ a stage uses that no earlier stage uses."""
    names = stages()
    earlier = [used_lines(name) for name in names[: names.index(stage)]]
    return len(used_lines(stage).difference(*earlier))
