"""Run the notebooks from top to bottom and store them with their outputs, without timestamps.

python -m tools.notebooks [NOTEBOOK ...]
"""

import sys
from pathlib import Path

from tools.stages import ROOT

import nbformat
from nbclient import NotebookClient

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebooks():
    """Return the paths of the stages' notebooks, in order."""
    return sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb"))


def normalise(book):
    """Take out of a notebook what differs from machine to machine, and number its cells."""
    book.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    book.nbformat, book.nbformat_minor = 4, 5
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
    return book


def write(book, path):
    """Write a notebook as the repository keeps it."""
    path.write_text(nbformat.writes(normalise(book), indent=1) + "\n")


def execute(path):
    """Run the notebook at `path` in its own folder and store it there. Raises if a cell fails."""
    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        book, timeout=300, resources=resources, record_timing=False, coalesce_streams=True
    ).execute()
    write(book, path)


def main():
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else notebooks():
        print(path, flush=True)
        execute(path.resolve())


if __name__ == "__main__":
    main()
