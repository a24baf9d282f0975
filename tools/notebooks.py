"""`make notebooks`: run them and store their outputs, without timestamps.

python -m tools.notebooks [NOTEBOOK ...]
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.stages import notebooks

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def normalize(book):
    """Remove from a notebook what differs between machines, and number its cells."""
    language = {"name": "python"}
    metadata = {"kernelspec": KERNEL, "language_info": language}
    book.metadata = nbformat.from_dict(metadata)
    book.nbformat, book.nbformat_minor = 4, 5
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
    return book


def write(book, path):
    """Write a notebook as the repository keeps it."""
    path.write_text(nbformat.writes(normalize(book), indent=1) + "\n")


def execute(path):
    """Run the notebook at `path` in its own folder and store it there.

    Raises CellExecutionError if a cell fails; the file is left as it was.
    """
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(
        book,
        timeout=300,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    write(book, path)


def main():
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else notebooks():
        print(path, flush=True)
        execute(path.resolve())


if __name__ == "__main__":
    main()
