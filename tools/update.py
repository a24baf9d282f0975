"""`make update`: bring up to date what an edit made stale, and say what is left to do.

Of what takes long, only what is stale is done again; tools/stale.py says what that is.

python -m tools.update [--no-runs]
"""

import argparse
import re

import nbformat

from harness.stages import ROOT
from harness.stages import notebooks as all_notebooks
from tools import notebooks
from tools import pages
from tools import stale
from tools.propagate import propagate


# ---- what a person has to look at ----------------------------------------------------
def numbers(texts):
    found = re.findall(
        r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])", "\n".join(texts)
    )
    return {number for number in found if len(number) > 1}


def printed(book):
    outputs = [one for cell in book.cells for one in cell.get("outputs", [])]
    return numbers(
        str(one.get("text", one.get("data", {}).get("text/plain", "")))
        for one in outputs
    )


def numbers_gone(before, after):
    """Return the numbers of a notebook's text that it printed before, and not now."""
    text = [cell.source for cell in after.cells if cell.cell_type == "markdown"]
    return sorted((printed(before) - printed(after)) & numbers(text))


# ---- the program ---------------------------------------------------------------------
def run_notebooks(runs):
    """Run the stale notebooks; return what is left to do, as lines."""
    left, found = [], stale.stale_notebooks()
    for number, path in enumerate(found, 1):
        name = path.relative_to(ROOT)
        if not runs:
            left.append(f"make notebooks NOTEBOOKS={name}")
            continue
        print(f"      {number} of {len(found)}: {name}", flush=True)
        before = nbformat.read(path, as_version=4)
        notebooks.execute(path)
        gone = numbers_gone(before, nbformat.read(path, as_version=4))
        if gone:
            left.append(f"{name}: its text has {', '.join(gone)}, no longer printed")
    return left


def show_again():
    for path in all_notebooks():
        notebooks.show_again(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-runs", action="store_true", help="run no notebook")
    args = parser.parse_args()
    print("carry edited stages to those that build on them", flush=True)
    propagate(ROOT)
    print("listings, diffs and pictures of the notebooks", flush=True)
    show_again()
    print("the notebooks that are stale", flush=True)
    left = run_notebooks(not args.no_runs)
    print("lists of stages, docs/faults.md, pictures of docs/", flush=True)
    pages.main()
    print("\nleft for a person:" if left else "\nnothing is left")
    for line in left:
        print(f"- {line}")
    print("then: make check")


if __name__ == "__main__":
    main()
