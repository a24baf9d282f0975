"""`make new-stage`: the files of one more stage, to be filled in.

It copies the script of the stage that the new one builds on, writes a notebook with
the sections, the diffs and two exercises, and adds an entry to stages.toml. The
notebook is run, so that `make check` has something to say about it. What you have to
write is marked TODO.

python -m tools.new_stage NAME [--from NN]
"""

import argparse
import re
import sys

import nbformat

from harness.sections import sections
from harness.stages import ROOT
from harness.stages import fail
from harness.stages import registry
from harness.stages import stages
from tools.diff import find
from tools.notebooks import execute
from tools.notebooks import write

TOML = ROOT / "stages.toml"
EXERCISE = '''@lesson.check
def exercise_{n}():
    assert answer_{n} is not None, "set answer_{n}: TODO, what is asked for"
    assert answer_{n} == {n}, "TODO: what is wrong with another answer"'''


def script(name, before):
    """Return the new stage's script: that of `before`, with its own title."""
    text = (ROOT / before / "train.py").read_text()
    text = re.sub(r'"""\[\d\d\] .*', f'"""[{name[:2]}] TODO', text, count=1)
    return text.replace(before, name)


def entry(name, before):
    """Return the new stage's entry of stages.toml, with the features of `before`."""
    lines = TOML.read_text().split(f'name = "{before}"\n')[1].partition("\n\n")[0]
    lines = re.sub("(?m)^(builds_on|part|companions).*\n", "", lines).replace(
        before, name
    )
    lines = re.sub("(?m)^(teaches.*) = .*", r'\1 = "TODO"', lines)
    head = f'\n[[stage]]\nname = "{name}"\nbuilds_on = "{before}"\n'
    return f"{head}{lines.rstrip()}\n"


def notebook(name, before):
    """Return the new stage's notebook, in the order that readers know."""
    new = nbformat.v4
    text, code = new.new_markdown_cell, new.new_code_cell
    command = registry()[before].commands[-1].replace(before, name)
    flags = "  --device cpu --epochs 1"
    run = f'done = lesson.run(\n    "{command} \\\\\\n"\n    "{flags}"\n)'
    setup = 'import sys\n\nsys.path.insert(0, "..")\n\nfrom nbtools import lesson'
    cells = [
        text(f"# {name[:2]} · TODO: the title\n\n**The problem.** TODO\n\n## The idea"),
        code(setup),
        text("## Run it"),
        code(run),
        text("## Prove it\n\nTODO"),
        text("## Break it\n\nTODO"),
        text("## What changed"),
    ]
    for section in sections(before):  # what did not change prints nothing
        cells.append(code(f'lesson.show_diff("{before}", "{name}", "{section}")'))
    answers = "The answers are in [solutions.py](solutions.py)."
    for n in (1, 2):
        head = f"## Your turn\n\n{answers}\n\n" if n == 1 else ""
        cells.append(text(f"{head}**{n}.** TODO"))
        cells.append(code(f"answer_{n} = None", metadata={"tags": ["exercise"]}))
        check = EXERCISE.format(n=n)
        cells.append(code(check, metadata={"tags": ["check"]}))
    cells.append(text("## Where next\n\nTODO"))
    return new.new_notebook(cells=cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    example = f"{len(stages()) + 1:02}_zero"
    parser.add_argument("name", metavar="NAME", help=f"the folder, such as {example}")
    parser.add_argument("--from", dest="before", metavar="NN", help="builds on it")
    args = parser.parse_args()
    *_, last = stages()
    before = find(args.before) if args.before else last
    number = f"{len(stages()) + 1:02}"
    if not re.fullmatch(rf"{number}_[a-z]\w*", args.name):
        fail(f"{args.name}: the next stage is named {number}_ and a word")
    folder = ROOT / args.name
    if folder.exists():
        fail(f"{args.name} exists")
    folder.mkdir()
    (folder / "train.py").write_text(script(args.name, before))
    solutions = f'"""Solutions of the exercises in {args.name}.ipynb."""\n'
    for n in (1, 2):
        banner = f"# ---- exercise {n} ".ljust(88, "-")
        solutions += f"\n{banner}\n# TODO: why this is right, in a sentence or two.\n"
        solutions += f"answer_{n} = {n}\n"
    (folder / "solutions.py").write_text(solutions)
    with TOML.open("a") as file:
        file.write(entry(args.name, before))
    registry.cache_clear()
    path = folder / f"{args.name}.ipynb"
    write(notebook(args.name, before), path)
    execute(path)
    sys.stdout.write(
        f"{args.name} builds on {before}. Write what is marked TODO, there and in"
        f" stages.toml; then make notebooks NOTEBOOKS={path.relative_to(ROOT)},"
        " make pages, make check.\n"
    )


if __name__ == "__main__":
    main()
