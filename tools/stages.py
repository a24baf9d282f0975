"""The stages, in order, and the commands in the first lines of each script."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stages(root=ROOT):
    """Return the names of the stages' folders, in order."""
    return sorted(path.parent.name for path in root.glob("[0-9][0-9]_*/train.py"))


def shown_commands(stage):
    """Return the commands in the docstring of a stage's script.

    The first is the one to show: it is the stage's lesson. The last is the plain one, which runs on
    any machine. Mostly they are the same.
    """
    tree = ast.parse((ROOT / stage / "train.py").read_text())
    _, _, commands = ast.get_docstring(tree).partition("\n\n")
    return commands.splitlines()


def launcher(stage):
    """Return the program that the plain command of a stage starts with: python or torchrun."""
    return shown_commands(stage)[-1].split()[0]


def takes_processes(stage):
    """Return whether a stage's command says how many processes there are."""
    return "nproc" in shown_commands(stage)[-1]


def command(stage, processes=1, root=ROOT):
    """Return the argument list that runs a stage on so many processes, from any folder.

    It is the plain command of its docstring, run by this Python, with the script's full path.
    """
    words = shlex.split(shown_commands(stage)[-1])
    words = [re.sub(r"(--nproc(-per-node)?)=\d+", rf"\1={processes}", word) for word in words]
    words = [str(Path(root, word)) if word.endswith(".py") else word for word in words]
    program, *arguments = words
    module = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    return [sys.executable, *module, *arguments]


def changed_lines(before, after):
    """Return how many lines `diff` shows between the scripts of two stages."""
    scripts = [ROOT / stage / "train.py" for stage in (before, after)]
    done = subprocess.run(["diff", *scripts], capture_output=True, text=True, check=False)
    return len(re.findall("^[<>]", done.stdout, re.MULTILINE))
