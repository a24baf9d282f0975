"""The stages, in order, and the command in the first lines of each script."""

import ast
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stages(root=ROOT):
    """Return the names of the stages' folders, in order."""
    return sorted(path.parent.name for path in root.glob("[0-9][0-9]_*/train.py"))


def shown_command(stage):
    """Return the command that the docstring of a stage's script ends with."""
    tree = ast.parse((ROOT / stage / "train.py").read_text())
    return ast.get_docstring(tree).splitlines()[-1]


def takes_processes(stage):
    """Return whether a stage's command says how many processes there are."""
    return "nproc" in shown_command(stage)


def command(stage, processes=1, root=ROOT):
    """Return the argument list that runs a stage on so many processes, from any folder.

    It is the command its docstring shows, run by this Python, and with the script's full path.
    """
    words = shlex.split(shown_command(stage))
    words = [re.sub(r"(--nproc(-per-node)?)=\d+", rf"\1={processes}", word) for word in words]
    words = [str(Path(root, word)) if word.endswith(".py") else word for word in words]
    program, *arguments = words
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    return [sys.executable, *launcher, *arguments]
