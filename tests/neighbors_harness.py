"""What the tests of the programs in other_libraries share: their docstrings."""

import ast
import shlex

from harness.stages import ROOT

FOLDER = ROOT / "other_libraries"


def docstring(program):
    """Return a program's last command as words, and the lines that it prints."""
    text = ast.get_docstring(ast.parse((FOLDER / program).read_text()))
    shown = text.replace("\\\n", "").split("$ ")[-1]
    command, *printed = shown.splitlines()
    return shlex.split(command), printed
